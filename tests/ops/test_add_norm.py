"""add_norm: the stream to the bit, norms and gradients within twice the error of plain PyTorch under autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from attnzoo_kernels.add_norm import Stream, add_norm, ops
from attnzoo_kernels.add_norm.cases import BENCHMARK, CORRECTNESS, Case
from attnzoo_kernels.add_norm.reference import _Join, _Split
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [*CORRECTNESS, *BENCHMARK[:1] * (DEVICE == "cuda")]


def run(case: Case, impl: str, call=add_norm) -> list[torch.Tensor]:
    """Sum, norm, and the gradients of stream, branch, weight and bias."""
    x, branch, weight, bias = case.inputs(DEVICE)
    stream = Stream(*(None if t is None else t.detach() for t in case.stream(x)))
    leaves = [t.requires_grad_() for t in (stream.high, branch, weight, bias) if t is not None]
    out, normed = call(stream, branch, weight, bias, kind=case.kind, last=case.last, impl=impl)
    dstream, dnormed = case.gradients(DEVICE)
    outputs, grads = ([normed], [dnormed]) if case.last else ([out.high, normed], [dstream, dnormed])
    gradients = torch.autograd.grad(outputs, leaves, grads)
    return [*([] if case.last else [joined(out)]), normed, *gradients]


def joined(stream: Stream) -> torch.Tensor:
    return stream.high if stream.low is None else _Join.apply(stream.high.detach(), stream.low)


def plain(case: Case, dtype: torch.dtype, rounded: bool = False) -> list[torch.Tensor]:
    """The same of a stream in one tensor of this dtype. rounded: norms see the sum in 16 bits, and the stream's gradient has as many."""
    x, branch, weight, bias = (None if t is None else t.to(dtype).requires_grad_() for t in case.inputs(DEVICE))
    out = x if branch is None else x + branch
    read = out.to(torch.bfloat16).to(dtype) if rounded else out
    normed = F.rms_norm(read, out.shape[-1:], weight, 1e-5) if case.kind == "rmsnorm" else F.layer_norm(read, out.shape[-1:], weight, bias)
    dstream, dnormed = case.gradients(DEVICE)
    outputs, grads = ([normed], [dnormed]) if case.last else ([out, normed], [dstream, dnormed])
    leaves = [t for t in (x, branch, weight, bias) if t is not None]
    gradients = torch.autograd.grad(outputs, leaves, [g.to(dtype) for g in grads])
    gradients = [g.to(torch.bfloat16).to(dtype) if rounded and g.shape == x.shape else g for g in gradients]
    return [*([] if case.last else [out]), normed, *gradients]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    """Sum and norm beside eager mode's, the gradients beside those of a sum that eager mode keeps in 16 bits for the backward."""
    ours, exact = run(case, "triton"), plain(case, torch.float64)
    eager, rounded = (plain(case, torch.float32, rounded) for rounded in (False, True))
    forward = 1 if case.last else 2
    for value, same_maths, truth in zip(ours, eager[:forward] + rounded[forward:], exact, strict=True):
        assert_accurate(value, same_maths.to(value.dtype), truth)
    assert case.last or torch.equal(ours[0], eager[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, run(case, "triton"), strict=True))


@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_reference_is_plain_pytorch(case):
    ours, theirs, forward = run(case, "reference"), plain(case, torch.float32), 1 if case.last else 2
    assert all(torch.equal(value, same.to(value.dtype)) for value, same in zip(ours[:forward], theirs, strict=False))
    for value, same in zip(ours[forward:], theirs[forward:], strict=True):  # the stream's gradient is rounded behind
        assert torch.equal(value.to(torch.bfloat16), same.to(torch.bfloat16))


def test_halves_are_all_bits():
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    bits[:6] = torch.tensor([0, -(2**31), 0x7F800000, 0x3F808000, 0x3F7F8000, 0x00008000])
    x = bits.view(torch.float32)
    high, low = _Split.apply(x)
    assert torch.equal(_Join.apply(high, low).view(torch.int32), bits)
    finite = x.isfinite() & (x.abs() < 3e38)
    assert ((high.float() - x).abs() <= (x.to(torch.bfloat16).float() - x).abs())[finite].all()  # the nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_post_norm_block_gives_the_stream_in_16_bits_and_the_bias_of_its_branch(impl, dtype, poisoned):
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, vectors = (torch.randn(2 + n, 37, 40, generator=generator, device=DEVICE).to(torch.bfloat16) for n in (1, 0))
    inputs = [*rows[:2], *(1 + vectors[0, :3]).to(dtype)]  # stream, branch, weight, bias, the branch's bias

    def results(cast: torch.dtype | None, call) -> list[torch.Tensor]:
        leaves = [x.detach().to(cast or x.dtype).requires_grad_() for x in inputs]
        normed = call(*leaves)
        return [normed, *torch.autograd.grad(normed, leaves, rows[2].to(normed.dtype))]

    def plain(x, branch, weight, bias, branch_bias):
        return F.layer_norm(x + (branch + branch_bias), x.shape[-1:], weight, bias)

    def ours(x, branch, weight, bias, branch_bias):
        return add_norm(Stream(x), branch, weight, bias, branch_bias=branch_bias, last=True, impl=impl)[1]

    found, exact, eager = results(None, ours), results(torch.float64, plain), results(torch.bfloat16, plain)
    for value, same_maths, truth in zip(found, eager, exact, strict=True):
        assert_accurate(value, same_maths.to(value.dtype), truth)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, results(None, compiled), strict=True))


def test_empty_rows():
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    stream, normed = add_norm(Stream(torch.zeros(0, 8, device=DEVICE)), None, weight, impl="triton")
    assert stream.high.shape == stream.low.shape == normed.shape == (0, 8)
    normed.sum().backward()
    assert not weight.grad.any()


def test_operators_are_sound_and_compile():
    case = CORRECTNESS[0]
    x, *rest, bias = case.inputs(DEVICE)
    stream = case.stream(x)
    high, branch, weight = (t.detach().requires_grad_() for t in (stream.high, *rest))
    for low, last in ((stream.low, False), (stream.low, True)):
        torch.library.opcheck(torch.ops.attnzoo.add_norm, (high, low, branch, None, weight, bias, 1e-5, False, last))
    compiled = torch.compile(add_norm, backend="aot_eager", fullgraph=True)
    for case in CORRECTNESS:
        assert all(torch.equal(a, b) for a, b in zip(run(case, "triton"), run(case, "triton", call=compiled), strict=True)), case


def test_wrong_arguments_are_refused():
    x, weight = torch.zeros(2, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    halves = Stream(x.to(torch.bfloat16), x.to(torch.int16))
    for error, words, call in (
        (TypeError, "stream.high: must be torch.float32 .* without stream.low", lambda: add_norm(Stream(halves.high), None, weight)),
        (TypeError, "stream.high: must be torch.bfloat16 .* with stream.low", lambda: add_norm(Stream(x, halves.low), None, weight)),
        (ValueError, "branch: must be torch.bfloat16", lambda: add_norm(halves, x, weight)),
        (ValueError, r"weight: must be torch.float32 of shape \(3,\), got .* \(2,\)", lambda: add_norm(halves, None, weight[:2])),
        (ValueError, "bias: must be None for kind='rmsnorm'", lambda: add_norm(halves, None, weight, weight, kind="rmsnorm")),
        (ValueError, "kind: must be", lambda: add_norm(halves, None, weight, kind="batchnorm")),
        (TypeError, "stream: must be a Stream, got Tensor", lambda: add_norm(x, None, weight)),
        (TypeError, "last: must be True or False, got None", lambda: add_norm(halves, None, weight, last=None)),
        (ValueError, "eps: must be a finite number, got nan", lambda: add_norm(halves, None, weight, eps=float("nan"))),
        (ValueError, "impl: must be", lambda: add_norm(halves, None, weight, impl="gluon")),
        (NotImplementedError, "width of at most 16384",
         lambda: add_norm(Stream(torch.zeros(1, 16385, device=DEVICE)), None, torch.ones(16385, device=DEVICE), impl="triton")),
    ):
        with pytest.raises(error, match=words):
            call()


def test_benchmark_runs(capsys):
    from benchmarks import add_norm as benchmark

    tables = ["speed", "tiles"] if DEVICE == "cpu" else ["speed"]
    backends = ["attnzoo-reference", "eager"] + ["attnzoo-triton"] * (DEVICE == "cpu")
    assert benchmark.main([*tables, "--dry-run", "--backends", *backends]) == 0
    assert "allowed error" not in capsys.readouterr().out


@pytest.mark.parametrize("version, shown", (("2.11.0+cu130", False), ("2.13.0", True)))
def test_messages_of_older_compilers_leave_arguments_out(monkeypatch, version, shown):
    exc = pytest.importorskip("torch._inductor.exc")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    # PyTorch's own may have been replaced before by a call that was compiled
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(lambda target, args, kwargs: f"{target} {args}"))
    ops.leave_arguments_out()
    message = exc.MissingOperatorWithoutDecomp.operator_str("attnzoo.loss", ["a stream"], {})
    assert "attnzoo.loss" in message and ("a stream" in message) == shown
