"""Output layer and loss in one: within twice eager's error, the loss and all gradients."""

from dataclasses import replace

import pytest
import torch

from attnzoo_kernels import linear_cross_entropy
from attnzoo_kernels.linear_cross_entropy.cases import CORRECTNESS, Case
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


def test_many_chunks_give_what_one_gives(monkeypatch):
    from attnzoo_kernels.linear_cross_entropy import chunks

    case = Case(300, 16, 40, torch.float32, bias=True)
    whole = run(case, "triton")
    monkeypatch.setattr(chunks, "LOGITS", 256 * 40)
    torch.testing.assert_close(run(case, "triton"), whole)


@pytest.mark.parametrize("options", ({}, {"vocab_size": 37, "softcap": 3.0}))
def test_columns_that_are_loaded_ahead_are_the_same(monkeypatch, options):
    from attnzoo_kernels.linear_cross_entropy import chunks

    monkeypatch.setattr(chunks, "BLOCK", 16)
    case = Case(30, 16, 40, torch.float32, options=options)
    in_turn = run(case, "triton")
    monkeypatch.setattr(chunks, "AHEAD", True)
    assert all(torch.equal(a, b) for a, b in zip(run(case, "triton"), in_turn, strict=True))


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


@pytest.mark.slow
def test_operators_are_sound_and_compile():
    case = Case(9, 16, 40, torch.float32, bias=True, token_weights=True, reduction="mean")
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for chosen in (case, replace(case, reduction="none")):
        assert all(torch.equal(a, b) for a, b in zip(run(chosen, "triton"), run(chosen, "triton", call=compiled), strict=True))
    x, weight, targets, options = case.inputs(DEVICE)
    numbers = -100, 0.0, 0.0, 0.0, 40
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
        (NotImplementedError, "x: .* takes float16", lambda: linear_cross_entropy(x.double(), weight, targets, impl="triton")),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.slow
def test_benchmark_runs(capsys):
    from benchmarks import linear_cross_entropy as benchmark

    backends = ["attnzoo-reference", "eager"] + ["attnzoo-triton"] * (DEVICE == "cpu")
    assert benchmark.main(["speed", "memory", "--dry-run", "--dtype", "float32", "--backends", *backends]) == 0
    assert "allowed error" not in capsys.readouterr().out
