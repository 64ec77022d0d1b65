"""Attention with a bias by distance: the reference against the formula, the kernels against the reference by the field's rule, and the
contract."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import distance_bias_attention, flash_attention
from attnzoo_kernels.distance_bias import ops
from attnzoo_kernels.distance_bias.cases import CORRECTNESS, LONG, Case
from benchmarks import distance_bias as benchmark
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for n, case in enumerate(CORRECTNESS) for m, dtype in enumerate(DTYPES)
         if GPU or max(max(pair) for pair in case.lengths) <= 150 and case.head_dim <= 80 and (n + m) % 2 == 0]
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
pytestmark = pytest.mark.usefixtures("poisoned")


def run(case, impl, dtype=None, **changes):
    """By NAMES in `dtype` for inputs that were drawn in the case's; the LSE has a gradient, too."""
    x = case.inputs(DEVICE)
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:4]]
    out, lse = distance_bias_attention(*leaves, return_lse=True, impl=impl, **x.options | changes)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check(case):
    assert_accurate(run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_keep_the_rule(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_kernels_keep_the_rule_at_length(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LONG[1], LONG[4], LONG[8]], ids=str)
def test_launches_repeat_bit_by_bit(case):
    first, second = (run(case, None, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_the_reference_is_the_formula():
    x = Case(batch=2, seqlen_q=7, heads=4, kv_heads=2, head_dim=8, distances=5, origin=2).inputs(DEVICE)
    leaves = [t.double().requires_grad_() for t in x[:4]]
    q, k, v, bias = leaves
    out = distance_bias_attention(*leaves, origin=2, impl="reference")
    table = torch.stack([torch.stack([bias[:, min(max(i - j + 2, 0), 4)] for j in range(7)], -1) for i in range(7)], -2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5 + table
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(2, 2))
    assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)), strict=True):
        assert_close(ours, theirs)


def test_reference_gradients_by_gradcheck():
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 5, 4, 3), (1, 7, 2, 3), (1, 7, 2, 3), (4, 4))]
    assert torch.autograd.gradcheck(lambda *x: distance_bias_attention(*x, origin=1, window_size=(3, 2)), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: distance_bias_attention(*x, causal=True), leaves)


@pytest.mark.parametrize("impl", PATHS)
def test_a_table_of_zeros_gives_plain_attention_and_one_of_slopes_alibi(impl):
    q, k, v = (torch.randn(1, 50, heads, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(heads)) for heads in (4, 2, 2))
    slopes = torch.tensor([1.0, 0.5, 0.1, 0.0], device=DEVICE)
    out, lse = distance_bias_attention(q, k, v, torch.zeros(4, 3, device=DEVICE), causal=True, return_lse=True, impl=impl)
    assert_close((out, lse), flash_attention(q, k, v, causal=True, return_lse=True, impl=impl))
    table = -slopes[:, None] * torch.arange(-49, 50, device=DEVICE).abs()
    out = distance_bias_attention(q, k, v, table, origin=49, impl=impl)
    assert_close(out, flash_attention(q, k, v, alibi_slopes=slopes, impl=impl))


@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("origin, entry", ((2**31 - 10, -1), (2**40, -1), (-(2**31) + 5, 0), (-(2**40), 0)))
def test_an_origin_far_away_gives_all_distances_one_entry(origin, entry, impl):
    q, k, v = torch.randn(3, 1, 40, 2, 16, device=DEVICE)
    table = torch.randn(2, 5, device=DEVICE)
    results = [distance_bias_attention(q, k, v, bias, origin=at, return_lse=True, impl=impl)
               for bias, at in ((table, origin), (table[:, [entry]].contiguous(), 0))]
    assert_close(*results)


@pytest.mark.parametrize("impl", PATHS)
def test_what_lies_beyond_a_sequence_does_not_matter(impl):
    """NaN behind the last packed sequence, in which the table has no gradient."""
    x = Case(lengths_q=(33, 0, 40), lengths_k=(40, 9, 33), head_dim=16, causal=True, dtype=torch.float32).inputs(DEVICE)
    results = []
    for end in (0, 5):
        q, k, v, dout = (torch.cat([t, torch.full_like(t[:end], torch.nan)]) for t in (*x[:3], x.dout))
        leaves = [t.detach().requires_grad_() for t in (q, k, v, x.bias)]
        out = distance_bias_attention(*leaves, **x.options, impl=impl)
        grads = torch.autograd.grad(out, leaves, dout)
        results.append([t[:73] for t in (out, *grads)])
    assert_close(*results)


@pytest.mark.parametrize("impl", PATHS)
def test_what_is_no_number_makes_none(impl):
    q, k, v = torch.randn(3, 1, 9, 1, 16, device=DEVICE)
    v[0, 0, 0, 0] = torch.nan
    bias = torch.zeros(1, 3, device=DEVICE, requires_grad=True)
    distance_bias_attention(q, k, v, bias, causal=True, impl=impl).sum().backward()
    assert bias.grad.isnan().any()


def test_custom_operators_and_the_eager_path_agree_and_compile():
    x = Case(lengths_q=(9, 0, 11), head_dim=16, dtype=torch.float16).inputs(DEVICE)
    inputs = tuple(t.detach().requires_grad_() for t in x[:4])
    bounds = x.options["cu_seqlens_q"]
    arguments = (*inputs, bounds, bounds, False, "triton", False, False, 0, 0.25, -1, 0)
    torch.library.opcheck(torch.ops.attnzoo.distance_bias_forward, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))

    def attend(*leaves):
        return distance_bias_attention(*leaves, softmax_scale=0.25, causal=True, impl="triton", cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    expected = attend(*inputs)
    wanted = torch.autograd.grad(expected, inputs, x.dout)
    for result in (torch.ops.attnzoo.distance_bias_forward(*arguments)[0], ops.forward(*arguments)[0],
                   torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)):
        assert torch.equal(result, expected)
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, x.dout), wanted))


@pytest.mark.parametrize("impl", PATHS)
def test_empty_inputs(impl):
    for rows in ((0, 5), (2, 0)):
        leaves = [torch.zeros(*rows, heads, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2)]
        bias = torch.zeros(4, 3, device=DEVICE, requires_grad=True)
        distance_bias_attention(*leaves, bias, impl=impl).sum().backward()
        assert all(t.grad is not None and not t.grad.any() and t.grad.shape == t.shape for t in (*leaves, bias))


def test_without_a_gradient_of_the_table():
    q, k, v = torch.randn(3, 1, 40, 2, 16, device=DEVICE).requires_grad_().unbind()
    bias = torch.randn(2, 9, device=DEVICE)
    results = [torch.autograd.grad(distance_bias_attention(q, k, v, table, impl="triton").sum(), (q, k, v))
               for table in (bias, bias.clone().requires_grad_())]
    assert_close(*results)


WRONG = {
    "a table for other heads": ({"bias": torch.zeros(1, 4)}, ValueError, r"bias: must have shape \(2, distances\).* got \(1, 4\)"),
    "a table without entries": ({"bias": torch.zeros(2, 0)}, ValueError, r"bias: must have shape \(2, distances\).* got \(2, 0\)"),
    "a table in half precision": ({"bias": torch.zeros(2, 4).half()}, TypeError, "bias: must be float32, got torch.float16"),
    "no table": ({"bias": None}, TypeError, "bias: must be a float32 tensor, got NoneType"),
    "half an entry": ({"origin": 0.5}, ValueError, "origin: must be an integer, got 0.5"),
    "a scale without end": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale: must be a finite number.* got inf"),
    "a path that there is not": ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', .*got 'cuda'"),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {name: torch.zeros(1, 4, 2, 16) for name in ("q", "k", "v")} | {"bias": torch.zeros(2, 4)} | change
    with pytest.raises(error, match=message):
        distance_bias_attention(**arguments)


def test_the_benchmark_runs(capsys):
    arguments = ["speed", "packed", "--dry-run", "--dtype", "float32", "--backends", "attnzoo-reference"]
    assert benchmark.main(arguments) == 0
    assert "d16 causal t5 64 backward" in capsys.readouterr().out


def test_covered_tables_have_an_entry_for_each_visible_distance():
    for m, n, distances, origin, left, right in product((1, 3), (1, 2, 4), (1, 2, 4, 7), (-1, 0, 2, 3), (-1, 0, 2), (-1, 0, 1)):
        visible = [i + n - m - j for i in range(m) for j in range(n)]
        visible = [d for d in visible if (left < 0 or d <= left) and (right < 0 or -d <= right)]
        covered = ops.is_covered(m, n, distances, origin, left, right, fewest=0)
        inside = all(0 <= d + origin < distances for d in visible)
        assert inside or not covered
        if left < 0 and right < 0:
            assert covered == inside
    assert ops.is_covered(128, 128, 128, 0, -1, 0) and not ops.is_covered(127, 127, 128, 0, -1, 0)
