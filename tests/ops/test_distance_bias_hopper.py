"""The Gluon path of attention with a bias by distance: its numbers under the 2x rule, and what its launches promise."""

import math
from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_distance_bias import NAMES, run
from torch.testing import assert_close

from attnzoo_kernels import dispatch, distance_bias_attention
from attnzoo_kernels.distance_bias import why_not_gluon
from attnzoo_kernels.distance_bias.cases import LONG, Case
from benchmarks.accuracy import assert_accurate

pytestmark = pytest.mark.usefixtures("poisoned")
TABLES = ({"distances": 128}, {"distances": 2000}, {"distances": 255, "origin": 127}, {"distances": 2}, {"distances": 1},
          {"distances": 9, "origin": -200}, {"distances": 40, "origin": 333})
EDGES = tuple(
    Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, value_dim=dv, causal=causal, window_size=window,
         **TABLES[number % len(TABLES)])
    for number, (d, dv, m, n, causal, window) in enumerate(
        (d, dv, m, n, causal, window) for d, dv in ((64, 64), (128, 128), (40, 64))
        for m, n in ((192, 192), (777, 777), (333, 777), (777, 333))
        for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (False, (100, 30)))))
SOME = tuple(Case(batch=2, seqlen_q=1300, heads=4, head_dim=64, causal=causal, **table) for table in TABLES for causal in (False, True))
PACKED = tuple(Case(lengths_q=(100, 0, 333, 1, 700), heads=6, kv_heads=2, head_dim=d, causal=causal, **table)
               for d in (64, 128) for causal, table in ((True, TABLES[0]), (False, TABLES[2]), (True, TABLES[1])))
CASES = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in LONG + EDGES + SOME + PACKED]


def narrow(case):
    return max(case.head_dim, case.value_dim or case.head_dim) <= 64


def covered(case):
    """Whether no two visible distances share an entry of the table, and there are at least 128."""
    left, right = case.window_size
    nearest, farthest = (0 if case.causal else -right if right >= 0 else -math.inf), (left if left >= 0 else math.inf)
    distances = {i + n - m - j for m, n in case.lengths for i in (0, m - 1) for j in (0, n - 1) if m and n}
    entries = [min(max(distance, nearest), farthest) + case.origin for distance in distances]
    return min(entries) >= 0 and max(entries) < case.distances and max(entries) - min(entries) >= 127


@pytest.mark.hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case):
    dispatch.forget()
    ours = run(case, None, deterministic=False)
    assert dispatch.implementations_taken() == {
        "distance_bias forward": ["gluon"], "distance_bias backward": ["gluon" if narrow(case) and covered(case) else "triton"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", [case for case in CASES if narrow(case) and not covered(case)], ids=str)
def test_shared_entries_by_request(case):
    """The table's gradient is a sum of numbers of 16 bits, which the rule does not hold for; bfloat16 has 8 bits."""
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False)
    assert dispatch.implementations_taken() == {"distance_bias forward": ["gluon"], "distance_bias backward": ["gluon"]}
    exact = run(case, "reference", torch.float64)
    error = ours.pop("dbias").double() - exact["dbias"]
    assert torch.linalg.vector_norm(error) < 2.0**-8 * torch.linalg.vector_norm(exact.pop("dbias"))
    assert_accurate(ours, run(case, "reference"), exact)


@pytest.mark.hopper
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.bfloat16][::3], ids=str)
def test_without_a_gradient_of_the_table(case):
    x = case.inputs("cuda")
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    dispatch.forget()
    out = distance_bias_attention(*leaves, x.bias, impl="gluon", **x.options)
    grads = torch.autograd.grad(out, leaves, x.dout)
    assert dispatch.implementations_taken()["distance_bias backward"] == ["gluon"]

    def reference(dtype):
        own = [t.detach().to(dtype or t.dtype).requires_grad_() for t in x[:3]]
        y = distance_bias_attention(*own, x.bias.to(dtype or x.bias.dtype), impl="reference", **x.options)
        return dict(zip(NAMES[2:5], torch.autograd.grad(y, own, x.dout.to(y.dtype)), strict=True))

    assert_accurate(dict(zip(NAMES[2:5], grads, strict=True)), reference(None), reference(torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", (LONG[0], PACKED[0], EDGES[1]), ids=str)
def test_deterministic_calls_repeat_bit_by_bit(case):
    case = replace(case, dtype=torch.bfloat16)
    dispatch.forget()
    first, second = (run(case, "gluon", deterministic=True) for _ in range(2))
    assert dispatch.implementations_taken() == {"distance_bias forward": ["gluon"], "distance_bias backward": ["triton"]}
    assert [name for name in NAMES if not torch.equal(first[name], second[name])] == []


@pytest.mark.hopper
def test_calls_that_it_takes_and_does_not_take():
    q, k, v = torch.randn(3, 1, 70, 2, 64, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(2, 5, device="cuda")
    assert why_not_gluon(q, k, v, bias, causal=True) is None
    assert "head_dim" in why_not_gluon(*(torch.cat([x] * 4, -1) for x in (q, k, v)), bias)
    dispatch.forget()
    distance_bias_attention(q, k, v, bias)
    assert dispatch.implementations_taken() == {"distance_bias forward": ["gluon"]}


@pytest.mark.hopper
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-4])
def test_any_scale(scale):
    case = Case(seqlen_q=300, heads=2, head_dim=64, causal=True, distances=100, dtype=torch.bfloat16)
    ours = run(case, None, softmax_scale=scale, deterministic=False)
    assert_accurate(ours, run(case, "reference", softmax_scale=scale), run(case, "reference", torch.float64, softmax_scale=scale))


@pytest.mark.hopper
def test_a_compiled_graph_gives_the_same():
    case = Case(seqlen_q=300, heads=2, head_dim=64, causal=True, distances=100, dtype=torch.bfloat16)
    x = case.inputs("cuda")
    leaves = [t.detach().requires_grad_() for t in x[:4]]

    def attend(*leaves):
        return distance_bias_attention(*leaves, causal=True)

    expected, out = attend(*leaves), torch.compile(attend, fullgraph=True)(*leaves)
    assert torch.equal(out, expected)
    assert_close(torch.autograd.grad(out, leaves, x.dout), torch.autograd.grad(expected, leaves, x.dout), rtol=2e-2, atol=2e-2)


def test_compiles_without_complaints_of_the_assembler():
    kernels = compiled_kernels("distance_bias_hopper_ahead_of_time.py", 90)
    assert {kernel["kernel"] for kernel in kernels} == {"hopper_fwd_kernel", "pair_bwd_kernel"}
    assert all(kernel["complaints"] == [] for kernel in kernels)
    assert all(kernel["shared"] <= 232448 for kernel in kernels)
