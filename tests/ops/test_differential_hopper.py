"""Differential attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch

from attnzoo_kernels import differential_attention, dispatch
from attnzoo_kernels.differential.cases import CORRECTNESS, LONG, Case
from benchmarks.accuracy import assert_accurate

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("poisoned")]
WIDTHS = ((64, 128, False), (64, 64, True), (64, 128, True), (128, 256, False), (128, 128, True))
EDGES = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, value_dim=dv, window_size=w, shared_keys=shared)
              for d, dv, shared in WIDTHS for m, n in ((192, 384), (333, 777), (777, 333))
              for w in ((-1, -1), (-1, 0), (64, 0), (100, 30)))
PACKED = tuple(Case(lengths_q=(100, 0, 333, 1, 700), heads=4, kv_heads=2, head_dim=d, value_dim=dv, causal=causal, shared_keys=shared)
               for d, dv, shared in WIDTHS for causal in (False, True))
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in CORRECTNESS + LONG + EDGES + PACKED
           if case.head_dim > 32 and (case.value_dim or 64) > 32 and case.head_dim % 8 == 0 and (case.value_dim or 8) % 8 == 0]


def run(case: Case, impl: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """[out, lse, dq1, dq2, dk1, (dk2), dv, dlam] in `dtype` for inputs that were drawn in the case's."""
    x = case.inputs("cuda")
    leaves = [None if t is None else t.to(dtype or t.dtype).detach().requires_grad_() for t in (x.q1, x.q2, x.k1, x.k2, x.v, x.lam)]
    out, lse = differential_attention(*leaves, return_lse=True, impl=impl, deterministic=False, **x.options)
    grads = torch.autograd.grad(out, [t for t in leaves if t is not None], x.dout.to(out.dtype))
    return [out.detach(), lse.masked_fill(lse == -torch.inf, 0), *grads]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case):
    dispatch.forget()
    ours = run(case, "gluon")
    assert dispatch.implementations_taken() == {"differential forward": ["gluon"], "differential backward": ["gluon"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.parametrize("case", PACKED + (Case(batch=2, seqlen_q=2048, heads=8, head_dim=64, value_dim=128, causal=True),), ids=str)
def test_250_repeats_are_bitwise_equal(case):
    case = replace(case, dtype=torch.bfloat16)
    x = case.inputs("cuda")
    first = differential_attention(*x[:6], impl="gluon", return_lse=True, **x.options)
    for _ in range(250):
        again = differential_attention(*x[:6], impl="gluon", return_lse=True, **x.options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_path_that_does_not_hold_is_refused():
    x = Case(seqlen_q=40, head_dim=32, dtype=torch.bfloat16).inputs("cuda")
    with pytest.raises(NotImplementedError, match="head_dim must be 33 to 128"):
        differential_attention(*x[:6], impl="gluon", **x.options)
