"""sigmoid_attention's kernels against the reference in float64, under the 2x rule; in the interpreter where there is no GPU."""

import math
from dataclasses import replace

import pytest
import torch
from paths import GPU, PATHS

from attnzoo_kernels import sigmoid_attention
from attnzoo_kernels.sigmoid.cases import CORRECTNESS, Case
from benchmarks.accuracy import assert_accurate

DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for n, case in enumerate(CORRECTNESS) for m, dtype in enumerate(DTYPES)
         if GPU or max(max(pair) for pair in case.lengths) <= 150 and case.head_dim <= 80 and (n + m) % 2 == 0]


def run(case: Case, inputs, impl: str, dtype: torch.dtype | None = None, **options) -> dict[str, torch.Tensor]:
    """Output and all gradients."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs[:3]]
    out = sigmoid_attention(*tensors, **inputs.options, **options, impl=impl)
    out.backward(inputs.dout.to(out.dtype))
    return {"out": out} | dict(zip(("dq", "dk", "dv"), (x.grad for x in tensors), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    inputs = case.inputs(device)
    ours, eager, exact = run(case, inputs, "triton"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


def test_the_paper_s_formula(device):
    """A row's weights are sigmoid(score - log n) with n the sequence's keys, of each packed sequence, whether seen or not."""
    q, k, v = (torch.randn(9, 1, 16, device=device) for _ in range(3))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    expected = []
    for rows in (slice(0, 4), slice(4, 9)):
        scores = q[rows, 0] @ k[rows, 0].T / 4 - math.log(rows.stop - rows.start)
        expected.append(scores.sigmoid().tril() @ v[rows, 0])
    for impl in PATHS:
        out = sigmoid_attention(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds, impl=impl)
        torch.testing.assert_close(out[:, 0], torch.cat(expected))


def test_rows_without_a_key_are_zero_with_finite_gradients(device):
    for impl in PATHS:
        q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (40, 9, 9))
        out = sigmoid_attention(q, k, v, causal=True, impl=impl)
        out.sum().backward()
        assert (out[:, :31] == 0).all() and (q.grad[:, :31] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_nothing_depends_on_what_lies_beyond_a_sequence(device, dtype, impl):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    bounds = torch.tensor((0, 33, 83, 102, 102), device=device, dtype=torch.int32)
    tensors = [torch.randn(110, 2, 32, device=device, generator=torch.Generator(device).manual_seed(i)).to(dtype) for i in range(4)]
    rows = slice(33, 83)
    poisoned = [torch.full_like(x, torch.nan) for x in tensors]
    for x, y in zip(poisoned, tensors, strict=True):
        x[rows] = y[rows]
    results = []
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = sigmoid_attention(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds, impl=impl)
        out.backward(dout)
        assert all((x[102:] == 0).all() for x in (out, q.grad, k.grad, v.grad))
        results.append([x[rows] for x in (out, q.grad, k.grad, v.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reference_gradients_by_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2)))

    def call(q, k, v):
        return sigmoid_attention(q, k, v, alibi_slopes=torch.linspace(0, 1, 4), window_size=(3, 2))

    assert torch.autograd.gradcheck(call, (q, k, v)) and torch.autograd.gradgradcheck(call, (q, k, v))


@pytest.mark.parametrize("changes, error, message", [
    ({"sigmoid_bias": "x"}, TypeError, "sigmoid_bias: must be a finite number, or None for minus the log.* got 'x'"),
    ({"sigmoid_bias": math.inf}, ValueError, "sigmoid_bias: must be a finite number.* got inf"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
    ({"alibi_slopes": torch.zeros(2, requires_grad=True), "impl": "triton"}, NotImplementedError, "alibi_slopes: only impl=\"reference\""),
])
def test_what_does_not_fit_is_named(changes, error, message, device):
    q, k, v = torch.randn(3, 1, 5, 2, 16, device=device)
    changes = {name: x.to(device).detach().requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    with pytest.raises(error, match=message):
        sigmoid_attention(q, k, v, **changes)
