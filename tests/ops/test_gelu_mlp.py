"""gelu_mlp: within twice eager's error, the result and all gradients."""

from dataclasses import replace

import pytest
import torch

from attnzoo_kernels.gelu_mlp import gelu_mlp
from attnzoo_kernels.gelu_mlp.cases import BENCHMARK, CORRECTNESS, Case
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU_CASES = [replace(case, dtype=torch.bfloat16) for case in (*CORRECTNESS, replace(BENCHMARK[0], rows=5000))]
CASES = [*CORRECTNESS, *GPU_CASES * (DEVICE == "cuda")]


def run(case: Case, impl: str, dtype: torch.dtype | None = None, call=gelu_mlp):
    *leaves, dout = (t if dtype is None else t.to(dtype) for t in case.inputs(DEVICE))
    out = call(*(t.requires_grad_() for t in leaves), approximate=case.approximate, impl=impl)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    ours, eager, exact = run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64)
    assert [x.dtype for x in ours] == [x.dtype for x in eager]
    for value, same_maths, truth in zip(ours, eager, exact, strict=True):
        assert_accurate(value, same_maths, truth)
    assert all(torch.equal(a, b) for a, b in zip(ours, run(case, "triton"), strict=True))


def test_operators_are_sound_and_compile():
    case = CORRECTNESS[1]
    x, up, down, _ = (t.requires_grad_() for t in case.inputs(DEVICE))
    torch.library.opcheck(torch.ops.attnzoo.gelu_mlp, (x, up, down, False))
    compiled = torch.compile(gelu_mlp, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(run(case, "triton"), run(case, "triton", call=compiled), strict=True))


def test_no_rows():
    up = torch.ones(16, 8, device=DEVICE, dtype=torch.float16, requires_grad=True)
    out = gelu_mlp(torch.ones(2, 0, 8, device=DEVICE, dtype=torch.float16), up, up.detach().t(), impl="triton")
    assert out.shape == (2, 0, 8)
    out.sum().backward()
    assert not up.grad.any()


def test_wrong_arguments_are_refused():
    x, up, down = (torch.zeros(shape, dtype=torch.float16, device=DEVICE) for shape in ((2, 8), (16, 8), (8, 16)))
    for error, words, call in (
        (TypeError, "up: must be .* x's dtype torch.float16, got torch.float32", lambda: gelu_mlp(x, up.float(), down)),
        (ValueError, r"up, down: must be \(hidden, 8\) and .* got \(8, 16\)", lambda: gelu_mlp(x, down, up)),
        (NotImplementedError, "x: .* takes float16", lambda: gelu_mlp(x.float(), up.float(), down.float(), impl="triton")),
        (NotImplementedError, "multiples of 8", lambda: gelu_mlp(x, up[:7], down[:, :7], impl="triton")),
        (ValueError, "impl: must be", lambda: gelu_mlp(x, up, down, impl="gluon")),
        (ValueError, "approximate: must be one of", lambda: gelu_mlp(x, up, down, approximate="erf")),
    ):
        with pytest.raises(error, match=words):
            call()


def test_gpus_before_hopper_are_refused(monkeypatch):
    from attnzoo_kernels.gelu_mlp import products

    monkeypatch.setattr(products, "architecture", lambda x: 80)
    x, up, down, _ = CORRECTNESS[0].inputs(DEVICE)
    with pytest.raises(NotImplementedError, match="needs compute capability 9.0 or later, got 8.0"):
        gelu_mlp(x, up, down, impl="triton")


def test_benchmark_runs(capsys):
    from benchmarks import gelu_mlp as benchmark

    backends = ["attnzoo-reference", "eager"] + ["attnzoo-triton"] * (DEVICE == "cpu")
    assert benchmark.main(["speed", "--dry-run", "--backends", *backends]) == 0
    assert "allowed error" not in capsys.readouterr().out
