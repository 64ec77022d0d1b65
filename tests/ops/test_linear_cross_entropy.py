"""Output layer and loss in one: within twice eager's error, the loss and all gradients."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels import linear_cross_entropy
from attnzoo_kernels.fp8 import rounded
from attnzoo_kernels.linear_cross_entropy.cases import CORRECTNESS, Case
from attnzoo_kernels.linear_cross_entropy.chunks import KEPT
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = (Case(5000, 64, 50304, options={"vocab_size": 50257}), Case(700, 64, 1000, reduction="none", bias=True))
CASES = [*CORRECTNESS] + [replace(case, dtype=torch.bfloat16) for case in (*CORRECTNESS[:4], *ON_GPU)] * (DEVICE == "cuda")


def run(case: Case, impl: str, dtype: torch.dtype | None = None, call=linear_cross_entropy):
    x, weight, targets, options = case.inputs(DEVICE)
    leaves = [t if dtype is None else t.to(dtype) for t in (x, weight, *(options[n] for n in ("bias",) if n in options))]
    leaves = [t.requires_grad_() for t in leaves]
    options |= {"bias": leaves[2]} if case.bias else {}
    loss = call(*leaves[:2], targets, **options, impl=impl)
    dloss = torch.linspace(-1, 2, loss.numel(), device=DEVICE).view(loss.shape)  # by token it is not the same for all
    return loss, *torch.autograd.grad(loss, leaves, dloss.to(loss.dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    ours, eager, exact = run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64)
    assert [x.dtype for x in ours] == [x.dtype for x in eager]
    assert_accurate(ours, eager, exact)
    assert all(torch.equal(a, b) for a, b in zip(ours, run(case, "triton"), strict=True))


def test_weights_of_tokens_are_as_exact_as_the_tensors():
    x, weight, factors = torch.randn(40, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64), torch.rand(40)
    targets = torch.arange(40) % 9
    losses, ours = (linear_cross_entropy(x, weight, targets, token_weights=factors, reduction=r) for r in ("none", "mean"))
    torch.testing.assert_close(ours, losses.sum() / factors.double().sum(), rtol=1e-13, atol=0)


def test_chunks_grow_where_there_are_many():
    from attnzoo_kernels.linear_cross_entropy.chunks import LOGITS, n_chunks

    assert [n_chunks(n) for n in (0, 1, LOGITS, LOGITS + 1, 4 * LOGITS, 13 * LOGITS, 16 * LOGITS, 24 * LOGITS)] == [1, 1, 1, 2, 4, 4, 4, 6]


def test_many_chunks_give_what_one_gives(monkeypatch):
    from attnzoo_kernels.linear_cross_entropy import chunks

    case = Case(300, 16, 40, torch.float32, bias=True)
    whole = run(case, "triton")
    monkeypatch.setattr(chunks, "LOGITS", 256 * 40)
    torch.testing.assert_close(run(case, "triton"), whole)


@pytest.mark.parametrize("kept", (4, 0))
@pytest.mark.parametrize(
    "options", ({}, {"vocab_size": 37, "softcap": 3.0}, {"vocab_size": 32, "label_smoothing": 0.1}, {"z_loss": 0.1}), ids=str)
def test_rows_of_several_tiles_that_stay_in_registers_or_are_read_twice(kept, options, monkeypatch, poisoned):
    from attnzoo_kernels.linear_cross_entropy import chunks

    monkeypatch.setattr(chunks, "BLOCK", 32)
    monkeypatch.setattr(chunks, "KEPT", kept)
    case = Case(30, 16, 45, torch.float16, options=options)
    x = case.inputs(DEVICE)[0]
    assert (chunks._tiles(x, options.get("vocab_size", 45))[1] > 0) == (kept > 0)
    ours, eager, exact = run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("kept", (4, 0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_infinite_logits_are_capped(kept, dtype, monkeypatch, poisoned):
    from attnzoo_kernels.linear_cross_entropy import chunks

    monkeypatch.setattr(chunks, "BLOCK", 32)
    monkeypatch.setattr(chunks, "KEPT", kept)
    targets = torch.arange(30, device=DEVICE)
    tensors = [300 * torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((30, 16), (45, 16), (45,))]  # beyond float16's range
    tensors[2][::7] = -torch.inf
    results = []
    for impl, of in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [x.to(of).requires_grad_() for x in tensors]
        # by row: eager's error of one number may happen to be none
        losses = linear_cross_entropy(*leaves[:2], targets, bias=leaves[2], softcap=3.0, vocab_size=37, reduction="none", impl=impl)
        results.append([losses, *torch.autograd.grad(losses.sum(), leaves)])
    assert_accurate(*results)


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_longest_row_that_stays_in_registers_does_not_spill(arch):
    kernels = compiled_kernels("linear_cross_entropy_ahead_of_time.py", arch)
    assert [k["tiles"] for k in kernels] == [KEPT, KEPT // 4, 0] and not any(k["stack"] for k in kernels), kernels


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_targets_that_do_not_count_and_those_that_do_not_exist(impl):
    x, weight = (torch.randn(n, 16, device=DEVICE).requires_grad_() for n in (4, 10))
    none = torch.full((4,), -100, device=DEVICE)
    loss = linear_cross_entropy(x, weight, none, reduction="sum", impl=impl)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))
    mean = linear_cross_entropy(x, weight, none, impl=impl)
    assert mean.isnan() and not any(g.any() for g in torch.autograd.grad(mean, (x, weight)))
    losses = linear_cross_entropy(x, weight, torch.tensor([0, 10, -1, 9], device=DEVICE), reduction="none", impl=impl)
    assert losses.isnan().tolist() == [False, True, True, False]
    empty = linear_cross_entropy(x[:0], weight, none[:0], reduction="sum", impl=impl)
    assert empty == 0 and not torch.autograd.grad(empty, weight)[0].any()


def test_rows_and_no_gradient():
    x, weight, targets, _ = Case(24, 16, 50, torch.float32).inputs(DEVICE)
    rows = linear_cross_entropy(x.view(4, 6, 16), weight, targets.view(4, 6), reduction="none", impl="triton")
    flat = linear_cross_entropy(x, weight, targets, reduction="none", impl="reference")
    assert rows.shape == (4, 6) and not rows.requires_grad
    torch.testing.assert_close(rows.flatten(), flat)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_autocast_changes_nothing(reduction):
    """Products take x's dtype, in the backward under autocast too."""
    case = Case(9, 16, 40, torch.float32, bias=True, reduction=reduction)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = run(case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(ours, run(case, "triton"), strict=True))


def test_only_the_reference_has_a_gradient_for_weights_of_tokens():
    x, weight, targets, options = Case(9, 16, 40, torch.float32, token_weights=True, reduction="mean").inputs(DEVICE)
    factors = options.pop("token_weights").requires_grad_()
    losses = linear_cross_entropy(x, weight, targets, reduction="none", impl="reference")
    expected = torch.where(targets == -100, 0, losses - (losses * factors).sum() / (factors * (targets != -100)).sum())
    loss = linear_cross_entropy(x, weight, targets, token_weights=factors, **options, impl="reference")
    (gradient,) = torch.autograd.grad(loss, factors)
    torch.testing.assert_close(gradient, expected / factors[targets != -100].sum())
    with pytest.raises(NotImplementedError, match='token_weights: only impl="reference" has a gradient'):
        linear_cross_entropy(x, weight, targets, token_weights=factors, **options, impl="triton")
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets, token_weights=factors, **options, impl="triton"), loss)


EIGHT_BITS = (
    Case(40, 32, 64, torch.float32, options={"vocab_size": 60, "fp8": True}),
    Case(33, 48, 96, torch.float32, bias=True, token_weights=True, reduction="none", options={"label_smoothing": 0.1, "fp8": True}),
    Case(300, 16, 48, torch.float32, bias=True, token_weights=True, options={"softcap": 2.0, "fp8": True}),
    *[Case(9000, 768, 8192, bias=True, token_weights=True, options={"vocab_size": 8100, "fp8": True})] * (DEVICE == "cuda"),
)


def of_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far a product may be from a b: sums in float32, and on Hopper of 32 products with 13 bits of the largest."""
    terms = a.shape[1]
    return (max(1, terms / 32) * 2.0**-13 if a.is_cuda else terms * 2.0**-24) * (a.abs() @ b.abs())


@pytest.mark.parametrize("case", EIGHT_BITS, ids=str)
def test_8_bit_products_are_those_of_the_rounded_factors(case, monkeypatch, poisoned):
    """Gradients of logits may be off by half a step of e5m2, or by half of its smallest number, or by what logits are off."""
    from attnzoo_kernels.linear_cross_entropy import chunks

    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products of 8-bit floats")
    if case.rows == 48:
        monkeypatch.setattr(chunks, "LOGITS", 256 * 48)
    x, weight, targets, options = case.inputs(DEVICE)
    options.pop("fp8")
    loss, dx, dw, *db = run(case, "triton")
    x, weight = (value.double() * unit.double() for value, unit in (rounded(one, torch.float8_e4m3fn) for one in (x, weight)))
    logits = (x @ weight.t() + (options.pop("bias").double() if case.bias else 0)).requires_grad_()
    factors, one = options.pop("token_weights", None), torch.eye(case.rows, device=DEVICE, dtype=torch.float64)
    exact = linear_cross_entropy(logits, one, targets, token_weights=factors, impl="reference", **options)
    dloss = torch.linspace(-1, 2, loss.numel(), device=DEVICE, dtype=torch.float64).view(loss.shape)
    (gradient,) = torch.autograd.grad(exact, logits, dloss)
    logits = logits.detach()
    of_dtype = torch.finfo(case.dtype).eps
    off = 2 * (of_dtype * logits.abs().max() + of_sums(x, weight.t()).max())  # of a loss, at most
    of_tokens = torch.ones(case.tokens, device=DEVICE) if factors is None else factors
    of_losses = of_tokens if case.reduction == "none" else of_tokens.sum()
    assert ((loss - exact).abs() <= (off + 2.0**-22 * exact.abs().max()) * of_losses).all()
    scale = (dloss * of_tokens).abs()
    softcap = options.get("softcap", 0.0)
    shares = (softcap * (logits / softcap).tanh() if softcap else logits)[:, : options.get("vocab_size")].softmax(-1)
    shares = torch.nn.functional.pad(shares, (0, case.rows - shares.shape[1]))
    wrong = gradient.abs() / 8 + scale.max() * 2.0**-32 + (off.expm1() + (off / softcap if softcap else 0)) * scale[:, None] * shares
    ones = torch.ones(case.tokens, 1, device=DEVICE, dtype=torch.float64)
    of_bias = [(one[:, None], gradient.t(), ones, wrong.t()) for one in db]
    for found, a, b, of_a in ((dx, gradient, weight, wrong), (dw, gradient.t(), x, wrong.t()), *of_bias):
        wanted, bound = a @ b, of_a @ b.abs() + of_sums(a, b)
        assert ((found.double() - wanted).abs() <= bound + torch.finfo(found.dtype).eps * wanted.abs()).all()
        assert (found.double() - wanted).norm() < 0.1 * wanted.norm()


def test_8_bit_targets_that_do_not_count_and_those_that_do_not_exist():
    x, weight = (torch.randn(n, 16, device=DEVICE).requires_grad_() for n in (16, 32))
    none = torch.full((16,), -100, device=DEVICE)
    loss = linear_cross_entropy(x, weight, none, reduction="sum", fp8=True, impl="triton")
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))
    none[2] = 32
    loss = linear_cross_entropy(x, weight, none, reduction="sum", fp8=True, impl="triton")
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and dx[2].isnan().all() and dw.isnan().all()


@pytest.mark.slow
def test_operators_are_sound_and_compile():
    case = Case(9, 16, 40, torch.float32, bias=True, token_weights=True, reduction="mean")
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for chosen in (case, replace(case, reduction="none"), replace(case, rows=48, options={"fp8": True})):
        assert all(torch.equal(a, b) for a, b in zip(run(chosen, "triton"), run(chosen, "triton", call=compiled), strict=True))
    x, weight, targets, options = case.inputs(DEVICE)
    numbers = -100, 0.0, 0.0, 0.0, 40, False
    inputs = x.requires_grad_(), weight.requires_grad_(), options["bias"].requires_grad_(), targets, options["token_weights"]
    torch.library.opcheck(torch.ops.attnzoo.linear_cross_entropy_by_token, (*inputs, *numbers))


def test_wrong_arguments_are_refused():
    x, weight, targets = torch.zeros(2, 4), torch.zeros(6, 4), torch.zeros(2, dtype=torch.int64)
    for error, words, call in (
        (TypeError, "x: must be floating point", lambda: linear_cross_entropy(x[0], weight, targets)),
        (ValueError, r"weight: must be .* \(rows, 4\), got .* \(6, 3\)", lambda: linear_cross_entropy(x, weight[:, :3], targets)),
        (ValueError, "targets: must be int64", lambda: linear_cross_entropy(x, weight, targets.int())),
        (ValueError, r"bias: must be .* \(6,\)", lambda: linear_cross_entropy(x, weight, targets, bias=torch.zeros(5))),
        (ValueError, r"token_weights: must be .* \(2,\), got torch.float8_e4m3fn",
         lambda: linear_cross_entropy(x, weight, targets, token_weights=torch.ones(2).to(torch.float8_e4m3fn))),
        (ValueError, "reduction: must be one of", lambda: linear_cross_entropy(x, weight, targets, reduction="max")),
        (ValueError, "vocab_size: must be at most", lambda: linear_cross_entropy(x, weight, targets, vocab_size=7)),
        (ValueError, "label_smoothing: must lie", lambda: linear_cross_entropy(x, weight, targets, label_smoothing=1.0)),
        (ValueError, r"fp8: needs z_loss=0 and sizes of weight that are multiples of 16, got z_loss=0.0 and shape \(6, 4\)",
         lambda: linear_cross_entropy(x, weight, targets, fp8=True)),
        (TypeError, "fp8: must be True or False, got Tensor of shape", lambda: linear_cross_entropy(x, weight, targets, fp8=weight)),
        (ValueError, "fp8: needs z_loss=0",
         lambda: linear_cross_entropy(torch.zeros(2, 16), torch.zeros(16, 16), targets, z_loss=0.1, fp8=True)),
        (NotImplementedError, "x: .* takes float16",
         lambda: linear_cross_entropy(*(t.to(DEVICE) for t in (x.double(), weight, targets)), impl="triton")),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.slow
def test_benchmark_runs(capsys):
    from benchmarks import linear_cross_entropy as benchmark

    backends = ["attnzoo-reference", "eager"] + ["attnzoo-triton"] * (DEVICE == "cpu")
    assert benchmark.main(["speed", "memory", "--dry-run", "--dtype", "float32", "--backends", *backends]) == 0
    assert "allowed error" not in capsys.readouterr().out
