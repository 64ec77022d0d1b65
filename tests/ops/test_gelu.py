"""GELU of a sum with a bias: within twice eager's error, outputs and both gradients."""

from dataclasses import replace

import pytest
import torch

from attnzoo_kernels.gelu import bias_gelu
from attnzoo_kernels.gelu.cases import BENCHMARK, CORRECTNESS, Case
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [*CORRECTNESS] + [replace(case, dtype=torch.bfloat16) for case in (*CORRECTNESS, BENCHMARK[0])] * (DEVICE == "cuda")


def run(case: Case, impl: str, dtype: torch.dtype | None = None, call=bias_gelu):
    x, dout, bias = (t if dtype is None or t is None else t.to(dtype) for t in case.inputs(DEVICE))
    leaves = [t.requires_grad_() for t in (x, bias) if t is not None]
    out = call(x, bias, approximate=case.approximate, impl=impl)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    ours, eager, exact = run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64)
    assert [x.dtype for x in ours] == [x.dtype for x in eager]
    for value, same_maths, truth in zip(ours, eager, exact, strict=True):
        assert_accurate(value, same_maths, truth)
    assert all(torch.equal(a, b) for a, b in zip(ours, run(case, "triton"), strict=True))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_extremes_and_empty(approximate):
    x = torch.tensor([[-torch.inf, -60.0, 0.0, 60.0, torch.inf]], device=DEVICE, dtype=torch.float16)
    out = bias_gelu(x, torch.zeros(5, device=DEVICE), approximate=approximate, impl="triton")
    assert out.isnan().tolist() == [[True, False, False, False, False]]  # -inf times 0, as in PyTorch
    assert out[0, 1:].tolist() == [0, 0, 60, torch.inf]
    for shape in ((0, 4), (3, 0)):
        x, bias = torch.ones(shape, device=DEVICE, requires_grad=True), torch.ones(shape[1], device=DEVICE, requires_grad=True)
        bias_gelu(x, bias, approximate=approximate, impl="triton").sum().backward()
        assert not bias.grad.any()


def test_operators_are_sound_and_compile():
    x, _, bias = Case(5, 24, torch.float32).inputs(DEVICE)
    for given in (bias.requires_grad_(), None):
        torch.library.opcheck(torch.ops.attnzoo.bias_gelu, (x.requires_grad_(), given, given is None))
    compiled = torch.compile(bias_gelu, backend="aot_eager", fullgraph=True)
    for case in (Case(9, 40, torch.float32), Case(9, 40, torch.float32, tanh=True, bias=False)):
        assert all(torch.equal(a, b) for a, b in zip(run(case, "triton"), run(case, "triton", call=compiled), strict=True))


def test_wrong_arguments_are_refused():
    x, bias, short = (torch.zeros(shape, device=DEVICE) for shape in ((2, 3), 3, 2))
    for error, words, call in (
        (ValueError, "x: must be .* contiguous", lambda: bias_gelu(x.t(), short)),
        (ValueError, r"bias: must be .* shape \(3,\), got \(2,\)", lambda: bias_gelu(x, short)),
        (ValueError, "bias: must be floating point", lambda: bias_gelu(x, bias.long())),
        (NotImplementedError, "x: .* takes float16", lambda: bias_gelu(x.double(), bias, impl="triton")),
        (ValueError, "impl: must be", lambda: bias_gelu(x, bias, impl="gluon")),
        (TypeError, "x: must be a tensor, got list", lambda: bias_gelu([0.0], bias)),
        (TypeError, "bias: must be a tensor or None, got list", lambda: bias_gelu(x, [0.0])),
        (ValueError, "approximate: must be one of 'none', 'tanh', got 'erf'", lambda: bias_gelu(x, bias, approximate="erf")),
    ):
        with pytest.raises(error, match=words):
            call()


def test_benchmark_runs(capsys):
    from benchmarks import gelu as benchmark

    backends = ["attnzoo-reference", "eager"] + ["attnzoo-triton"] * (DEVICE == "cpu")
    assert benchmark.main(["--dry-run", "--dtype", "float32", "--backends", *backends]) == 0
    assert "allowed error" not in capsys.readouterr().out
