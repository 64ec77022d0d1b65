"""Forgetting attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_forgetting import NAMES, run

from attnzoo_kernels import dispatch, forgetting_attention
from attnzoo_kernels.forgetting.cases import LONG, Case
from benchmarks.accuracy import assert_accurate

pytestmark = pytest.mark.usefixtures("poisoned")
EDGES = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, value_dim=dv, window_size=window, gate=5.0)
              for d, dv in ((64, 64), (128, 128), (96, 64)) for m, n in ((192, 192), (777, 777), (333, 777), (777, 333))
              for window in ((-1, -1), (100, 0)))
PACKED = tuple(Case(lengths_q=(100, 0, 333, 1, 700), heads=4, kv_heads=2, head_dim=d, gate=gate, resets=0.02)
               for d in (64, 128) for gate in (-2.0, 6.0))
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in LONG + EDGES + PACKED
           if case.head_dim <= 128]


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case):
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False)
    covered = case.dtype == torch.bfloat16 and all(m == n for m, n in case.lengths)
    assert dispatch.implementations_taken() == {"forgetting forward": ["gluon"], "forgetting backward": ["gluon" if covered else "triton"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", [PACKED[0], Case(batch=2, seqlen_q=2048, heads=8, head_dim=128, gate=6.0)], ids=str)
def test_repeats_are_bitwise_equal(case):
    case = replace(case, dtype=torch.bfloat16)
    x = case.inputs("cuda")
    first = forgetting_attention(*x[:4], impl="gluon", return_lse=True, **x.options)
    for _ in range(250):
        again = forgetting_attention(*x[:4], impl="gluon", return_lse=True, **x.options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    first, second = (run(case, "gluon", deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.tables
@pytest.mark.slow
def test_kernels_fit_and_spill_little():
    kernels = compiled_kernels("forgetting_hopper_ahead_of_time.py")
    assert {kernel["kernel"] for kernel in kernels} == {"forgetting_fwd_hopper_kernel", "pair_bwd_kernel"}
    most = {"forgetting_fwd_hopper_kernel": 8, "pair_bwd_kernel": 352}
    wrong = [kernel for kernel in kernels if kernel["shared"] > 232448 or kernel["complaints"] or kernel["stack"] > most[kernel["kernel"]]]
    assert not wrong, "\n".join(map(str, wrong))
