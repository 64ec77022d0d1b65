"""Where there is no GPU, Triton kernels run in Triton's interpreter, which has to be chosen before a kernel is defined."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores
if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import make_faster, round_as_gpus_do

    make_faster()
    round_as_gpus_do()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """One case of each test is quick, and the others are slow: `-m "not slow"` meets every test, the whole run every case."""
    gpu = torch.cuda.is_available()
    hopper = gpu and torch.cuda.get_device_capability() == (9, 0)
    seen = set()
    for item in items:
        if item.get_closest_marker("hopper"):
            item.add_marker(pytest.mark.gpu)
            if not hopper:
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
        elif "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if not item.get_closest_marker("skip") and "slow" not in item.keywords:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(test)


def pytest_collection_finish():
    """The search for garbage, which tests set off all the time, leaves out what was imported and collected: it stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def memory_of_others():
    """Processes that test side by side on one GPU do not keep what a large float64 reference took."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**32:
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned():
    """torch.empty and its relatives hand out NaN, so that an element that no kernel writes shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Names of the kernels that Triton compiles or reads from its files during the test."""
    from triton import knobs

    names = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **event: names.append(src.name))
    return names
