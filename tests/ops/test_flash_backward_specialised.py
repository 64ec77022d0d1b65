"""The plain dK/dV whose warps Triton's compiler specialises: compiled ahead of time, and on a Hopper GPU under the 2x rule."""

from dataclasses import replace

import pytest
import torch
import triton
from busy_gpu import busy_gpu
from compiled_kernels import compiled_kernels
from test_flash import run

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash.cases import Case
from benchmarks.accuracy import error_ratio

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="only Triton 3.6 takes descriptors of halved tiles")
hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
PLAIN = Case(batch=2, seqlen_q=300, seqlen_k=256, heads=4, head_dim=128)
CASES = [replace(PLAIN, dtype=dtype, **changes) for dtype in (torch.bfloat16, torch.float16) for changes in (
    {}, {"seqlen_q": 1025, "seqlen_k": 1024, "kv_heads": 1}, {"seqlen_q": 1, "seqlen_k": 128}, {"seqlen_k": 200}, {"sinks": True},
    {"batch": 5, "seqlen_q": 64, "seqlen_k": 320}, {"seqlen_k": 1152, "q_scale": 20.0},
    {"seqlen_q": 1023, "seqlen_k": 2048, "kv_heads": 2}, {"seqlen_q": 2048, "seqlen_k": 40},
    {"causal": True, "seqlen_q": 128, "seqlen_k": 128}, {"causal": True, "seqlen_q": 256, "seqlen_k": 640, "q_scale": 20.0},
    {"causal": True, "batch": 5, "seqlen_q": 1024, "seqlen_k": 1024, "heads": 3, "sinks": True},
    {"causal": True, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "heads": 2})]


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the specialised kernels that a test launches."""
    from attnzoo_kernels._triton.specialised import HalvedLaunch

    names, launch = [], HalvedLaunch.__call__
    monkeypatch.setattr(HalvedLaunch, "__call__", lambda self, *tensors: (names.append(self.kernel.fn.__name__), launch(self, *tensors))[1])
    return names


@pytest.fixture
def at_any_length(monkeypatch):
    """Causal calls take the specialised kernel at lengths, too, where the ordinary one is faster."""
    from attnzoo_kernels.flash import backward

    table = backward.specialised_dkdv_tile
    backward._dkdv_plan.cache_clear()
    monkeypatch.setattr(backward, "specialised_dkdv_tile", lambda *widths: replace(table(*widths), shortest_causal=0))
    yield
    backward._dkdv_plan.cache_clear()


def gradients(q, k, v, dout, causal=False) -> tuple[torch.Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(flash_attention(q, k, v, causal=causal, impl="triton"), (q, k, v), dout)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned, launched, at_any_length):
    inputs = case.inputs("cuda")
    ours, eager, exact = run(case, inputs, "triton"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    assert "flash_bwd_dkdv_specialised_kernel" in launched
    ratios = {name: error_ratio(ours[name].detach(), eager[name].detach(), exact[name].detach()) for name in exact}
    assert max(ratios.values()) <= 1, {name: round(ratio, 2) for name, ratio in ratios.items()}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("changes", ({"kv_heads": 3}, {"causal": True, "seqlen_q": 2048}), ids=str)
def test_repeated_runs_are_bitwise_equal(changes, at_any_length):
    case = replace(Case(batch=2, seqlen_q=1023, seqlen_k=2048, heads=6, head_dim=128), **changes)
    x = case.inputs("cuda")
    first = gradients(x.q, x.k, x.v, x.dout, case.causal)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x.q, x.k, x.v, x.dout, case.causal), first, strict=True))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(causal, at_any_length):
    """Queries, keys, values and gradients of one sequence as parts of a larger tensor, which is NaN elsewhere."""
    results, queries = [], 256 if causal else 333
    for filling in (0.0, torch.nan):
        everything = torch.full((3, 384, 4, 6, 128), filling, device="cuda", dtype=torch.bfloat16)
        torch.manual_seed(3)
        everything[1, :, :, 1:5] = torch.randn(384, 4, 4, 128)
        everything[1, queries:, :, 1::3] = filling
        q, k, v, dout = (everything[1:2, :, :, n] for n in (1, 2, 3, 4))
        results.append(gradients(q[:, :queries], k, v, dout[:, :queries], causal))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("causal", (False, True))
def test_no_compiling_for_a_new_length(causal, launched):
    """The first call compiles what other lengths take, too."""
    from triton import knobs

    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        for index, seqlen in enumerate((200, 128, 64, 8192, 999, 1)):
            x = Case(batch=index + 1, seqlen_q=seqlen, heads=3, head_dim=128).inputs("cuda")
            flash_attention(x.q, x.k, x.v, causal=causal, impl="triton")
            before = len(compiled)
            gradients(x.q, x.k, x.v, x.dout, causal)
            assert index == 0 or len(compiled) == before, compiled[before:]
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert launched.count("flash_bwd_dkdv_specialised_kernel") == (1 if causal else 6)


@pytest.mark.gpu
@pytest.mark.slow
@hopper
@pytest.mark.parametrize("causal", (False, True))
def test_no_tile_is_lost_where_another_process_shares_the_gpu(causal, at_any_length):
    """A program that is stopped and resumed finds its shared memory as it left it, also what lies in place of barriers."""
    x = Case(batch=8, seqlen_q=4096, heads=8, head_dim=128).inputs("cuda")
    first = gradients(x.q, x.k, x.v, x.dout, causal)
    with busy_gpu():
        for _ in range(200):
            assert all(torch.equal(a, b) for a, b in zip(gradients(x.q, x.k, x.v, x.dout, causal), first, strict=True))


@pytest.mark.slow
def test_the_compiler_specialises_the_warps_and_leaves_no_barrier_under_data():
    kernels = compiled_kernels("backward_specialised_ahead_of_time.py")
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel["specialised"] and not kernel["spills"] and not kernel["clash"] and kernel["shared"] <= 232448, kernel
        assert kernel["unused_barriers"] == kernel["invalidated"] == [0, 8], kernel
