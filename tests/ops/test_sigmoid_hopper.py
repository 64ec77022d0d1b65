"""Sigmoid attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_sigmoid import run

from attnzoo_kernels import dispatch, sigmoid_attention
from attnzoo_kernels.sigmoid.cases import CORRECTNESS, Case
from benchmarks.accuracy import assert_accurate

SHARED_MEMORY = 232448
SPILLS = {"pair_bwd_kernel": 192}  # bytes, as flash_attention's: the scalars of a tile, before and behind its loop
EDGES = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, window_size=window)
              for d in (64, 128) for m, n in ((192, 384), (333, 777), (777, 333)) for window in ((-1, -1), (-1, 0), (64, 0), (100, 30)))
LONG = (
    Case(seqlen_q=2100, heads=3, causal=True), Case(seqlen_q=4200, heads=2), Case(seqlen_q=2500, head_dim=128, causal=True),
    Case(seqlen_q=4090, seqlen_k=3500, heads=4, kv_heads=2), Case(seqlen_q=4160, seqlen_k=4200, heads=3, head_dim=128),
    Case(seqlen_q=777, head_dim=64, value_dim=128, causal=True), Case(seqlen_q=777, head_dim=40, value_dim=88, sigmoid_bias=-2.0),
    Case(seqlen_q=700, q_scale=50.0, head_dim=128),  # weights of one, and of nothing
    *(Case(lengths_q=(100, 0, 333, 1, 700), heads=4, kv_heads=2, head_dim=d, causal=causal) for d in (64, 128) for causal in (False, True)),
    Case(lengths_q=(300, 0, 64, 129, 1000, 7), lengths_k=(200, 5, 128, 700, 900, 0), heads=4, kv_heads=2, head_dim=128, causal=True),
    Case(lengths_q=(500, 2300), window_size=(100, 30)), Case(lengths_q=(400, 700, 130), strided=True, causal=True, sigmoid_bias=-4.0),
)
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in CORRECTNESS + EDGES + LONG
           if 32 < case.head_dim <= 128 and 32 < (case.value_dim or 64) and case.head_dim % 8 == 0 and not case.alibi]


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, deterministic, poisoned):
    inputs = case.inputs("cuda")
    dispatch.forget()
    ours = run(case, inputs, "gluon", deterministic=deterministic)
    assert dispatch.implementations_taken() == {"sigmoid forward": ["gluon"], "sigmoid backward": ["gluon"]}
    assert_accurate(ours, run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", (
    Case(batch=3, seqlen_q=1500, heads=16, kv_heads=8, head_dim=128, causal=True), Case(seqlen_q=4500, heads=8, causal=True),
    Case(batch=2, seqlen_q=2048, heads=8), Case(lengths_q=(1000, 0, 3000, 77), heads=8, head_dim=128)), ids=str)
def test_250_repeats_are_bitwise_equal(case):
    inputs = case.inputs("cuda")
    first = run(case, inputs, "gluon", deterministic=True)
    for _ in range(250):
        again = run(case, inputs, "gluon", deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
def test_nothing_depends_on_what_lies_beyond_a_sequence(head_dim):
    bounds = torch.tensor([0, 100, 433, 500, 500], device="cuda", dtype=torch.int32)
    tensors = [torch.randn(520, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    rows, results = slice(100, 433), []
    poisoned = [torch.full_like(x, torch.nan) for x in tensors]
    for x, y in zip(poisoned, tensors, strict=True):
        x[rows] = y[rows]
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = sigmoid_attention(q, k, v, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds, deterministic=True, impl="gluon")
        out.backward(dout)
        assert all((x[500:] == 0).all() for x in (out, q.grad, k.grad, v.grad))
        results.append([x[rows] for x in (out, q.grad, k.grad, v.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.hopper
def test_a_call_waits_for_nothing():
    """Lengths of packed sequences are read on the device."""
    case = Case(lengths_q=(100, 0, 333), heads=2, causal=True)
    inputs = case.inputs("cuda")
    run(case, inputs, "gluon")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, inputs, "gluon")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_tiles_fit_and_do_not_spill():
    kernels = compiled_kernels("sigmoid_hopper_ahead_of_time.py")
    assert len(kernels) == 4
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]
             or kernel["stack"] > SPILLS.get(kernel["kernel"], 0)]
    assert not wrong, "\n".join(map(str, wrong))
