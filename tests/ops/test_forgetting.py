"""Forgetting attention: the reference against the formula, the kernels against the reference by the field's rule, and the contract."""

import math
import os
from dataclasses import replace

import pytest
import torch
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import flash_attention, forgetting_attention
from attnzoo_kernels._cpu import fused
from attnzoo_kernels.forgetting import gates, ops
from attnzoo_kernels.forgetting.cases import CORRECTNESS, LONG, Case
from benchmarks import forgetting as benchmark
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
# Triton's interpreter computes bfloat16 wrongly
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * GPU
pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("out", "lse", "dq", "dk", "dv", "dlog_f")


def run(case, impl, dtype=None, **changes):
    """By NAMES in `dtype` for inputs that were drawn in the case's; the LSE has a gradient, too."""
    x = case.inputs(DEVICE)
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:4]]
    out, lse = forgetting_attention(*leaves, return_lse=True, impl=impl, **x.options | changes)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check(case, **changes):
    assert_accurate(run(case, "triton", **changes), run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_kernels_keep_the_rule(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_kernels_keep_the_rule_at_length(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LONG[1], LONG[5], LONG[8]], ids=str)
def test_launches_repeat_bit_by_bit(case):
    first, second = (run(case, None, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@needs_triton
def test_gates_that_let_all_through_give_plain_attention():
    x = Case(seqlen_q=40, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32).inputs(DEVICE)
    out, lse = forgetting_attention(*x[:3], torch.zeros_like(x.log_f), return_lse=True, impl="triton")
    plain, plain_lse = flash_attention(*x[:3], causal=True, return_lse=True, impl="triton")
    assert_close(out, plain)
    assert_close(lse, plain_lse)


def test_the_reference_is_the_formula():
    x = Case(batch=2, seqlen_q=7, heads=4, kv_heads=2, head_dim=8, gate=0.0).inputs(DEVICE)
    leaves = [t.double().requires_grad_() for t in x[:4]]
    q, k, v, log_f = leaves
    out = forgetting_attention(*leaves, impl="reference")
    # decay from key j to query i: the gates of j + 1 .. i
    decay = torch.stack([torch.stack([log_f[:, j + 1 : i + 1].sum(1) for j in range(7)], -1) for i in range(7)], -2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5 + decay
    seen = torch.ones(7, 7, dtype=torch.bool, device=DEVICE).tril()
    expected = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(2, 2))
    assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)), strict=True):
        assert_close(ours, theirs)


def test_sums_begin_anew_in_each_sequence_and_keep_their_last_bits():
    bounds = torch.tensor([0, 300, 300, 1000, 1000], dtype=torch.int32)
    log_f = -5 - torch.rand(1010, 2, generator=torch.Generator().manual_seed(0)) * 1e3
    c = gates.cumulative(log_f, bounds)
    for first, end in ((0, 300), (300, 1000)):
        assert_close(c[:, first:end], log_f[first:end].double().cumsum(0).mT, rtol=0, atol=1e-8)
    high, low = gates.in_two_parts(c).double()
    assert_close(high + low, c, rtol=2**-47, atol=0)


@needs_triton
@pytest.mark.parametrize("case", [Case(batch=2, seqlen_q=40, seqlen_k=300, heads=3, head_dim=16, gate=-3.0),
                                  Case(lengths_q=(20, 0, 160), lengths_k=(390, 33, 160), heads=2, head_dim=16, resets=0.1)], ids=str)
def test_parts_of_c_add_up_to_it(case):
    from attnzoo_kernels.forgetting.blocks import empty_parts, key_bias

    x = replace(case, dtype=torch.float16).inputs(DEVICE)
    bounds = x.options.get("cu_seqlens_q"), x.options.get("cu_seqlens_k")
    options = ops._options(bounds[0], x.k, 0.25, -1, False)
    parts = empty_parts(x.q, x.k, options)
    bias = key_bias(x.log_f, x.q, x.k, *bounds, options, parts=parts)
    c = bias.c[: len(parts)]
    assert c.abs().max() > 100
    assert torch.equal(parts.float().sum(1), -c)


# 128 gates of -3 are far beyond what scores of 16 columns make up for
PRUNED = [Case(batch=2, seqlen_q=40, seqlen_k=300, kv_heads=1, head_dim=16, gate=-3.0),
          Case(lengths_q=(20, 0, 160), lengths_k=(390, 33, 160), heads=1, head_dim=16, gate=-3.0)]


@needs_triton
@pytest.mark.parametrize("case", [Case(batch=2, seqlen_q=300, seqlen_k=420, kv_heads=1, head_dim=16, gate=-3.0),
                                  Case(seqlen_q=420, seqlen_k=300, heads=3, head_dim=16, gate=2.0, resets=0.1)], ids=str)
def test_tiles_are_passed_over_where_no_weight_in_them_counts(case):
    from attnzoo_kernels.flash.options import C_BLOCK
    from attnzoo_kernels.forgetting.blocks import NEGLIGIBLE, key_bias, passed_over

    x = case.inputs(DEVICE)
    ends = key_bias(x.log_f, x.q, x.k, None, None, ops._options(None, x.k, 0.25, -1, True)).ends
    longest_q, longest_k = (t.double().norm(dim=-1).amax(1) for t in (x.q, x.k.repeat_interleave(case.heads // x.k.shape[2], 2)))
    farthest = 0.5 * longest_q * longest_k + math.log(case.seqlen_k) + NEGLIGIBLE
    c = x.log_f.double().cumsum(1).mT
    own = torch.arange(case.seqlen_q, device=DEVICE) + case.seqlen_k - case.seqlen_q
    counts = (c[:, :, own.clamp(min=0), None] - c[:, :, None] >= -farthest[:, :, None, None]) & (own >= 0)[:, None]
    blocks = [-(-n // C_BLOCK) for n in counts.shape[2:]]
    counts = torch.nn.functional.pad(counts, (0, blocks[1] * C_BLOCK - counts.shape[3], 0, blocks[0] * C_BLOCK - counts.shape[2]))
    counts = counts.unflatten(3, (-1, C_BLOCK)).any(-1).unflatten(2, (-1, C_BLOCK)).any(3)
    queries, keys = (torch.arange(n, device=DEVICE) for n in blocks)
    first_key = torch.where(counts, keys, blocks[1]).amin(3).flatten()
    assert torch.equal(ends, torch.cat([torch.where(counts, queries[:, None] + 1, 0).amax(2).flatten(), first_key]).int())
    seen = (((queries + 1) * C_BLOCK).clamp(max=case.seqlen_q) + case.seqlen_k - case.seqlen_q - 1) // C_BLOCK + 1
    share = torch.minimum(first_key.view(-1, blocks[0]), seen).sum() / (seen.sum() * case.batch * case.heads)
    assert 0 < share.item() == pytest.approx(passed_over(x.q, x.k, x.log_f, softmax_scale=0.25))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_nan_nothing_is_passed_over(dtype):
    from attnzoo_kernels.forgetting.blocks import passed_over

    log_f = torch.full((1, 400, 1), -3.0, device=DEVICE)
    q, k = torch.zeros(2, *log_f.shape, 16, dtype=dtype, device=DEVICE)
    assert passed_over(q, k, log_f, softmax_scale=0.25) > 0
    q[:, 300, :, 7] = torch.nan
    assert passed_over(q, k, log_f, softmax_scale=0.25) == passed_over(k, q, log_f, softmax_scale=0.25) == 0


@pytest.mark.parametrize("impl", [pytest.param(path, marks=[needs_triton] * (path == "triton")) for path in PATHS])
@pytest.mark.parametrize("behind", ((3, 0), (0, 2), (2, 5)), ids=str)
def test_other_numbers_of_queries_and_keys_behind_the_last_sequence_of_one_cu_seqlens(behind, impl):
    x = Case(lengths_q=(9, 0, 17), kv_heads=1, head_dim=16, dtype=torch.float32).inputs(DEVICE)
    queries, keys = (torch.nn.functional.pad(torch.arange(26, device=DEVICE), (0, n)) for n in behind)

    def run(rows_q, rows_k):
        leaves = [t[rows].detach().requires_grad_() for t, rows in zip(x[:4], (rows_q, *[rows_k] * 3), strict=True)]
        out, lse = forgetting_attention(*leaves, return_lse=True, impl=impl, **x.options)
        grads = torch.autograd.grad((out, lse), leaves, (x.dout[rows_q], torch.ones_like(lse)))
        return out, *grads

    alone = torch.arange(26, device=DEVICE)
    for ours, wanted in zip(run(queries, keys), run(alone, alone), strict=True):
        assert_close(ours[:26], wanted)
        assert not ours[26:].any()


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PRUNED, ids=str)
def test_what_is_passed_over_changes_no_bit(case, dtype):
    from attnzoo_kernels.forgetting.blocks import passed_over

    x = case.inputs(DEVICE)
    assert passed_over(x.q, x.k, x.log_f, softmax_scale=0.25, **{n: x.options[n] for n in x.options if n.startswith("cu_")}) > 0
    every, pruned = (run(replace(case, dtype=dtype), "triton", prune=prune) for prune in (False, True))
    assert all(torch.equal(every[name], pruned[name]) for name in NAMES)


@pytest.mark.skipif(GPU, reason="the path for CPUs")
@pytest.mark.parametrize("case", PRUNED, ids=str)
def test_the_path_for_cpus_leaves_out_what_does_not_count(case, monkeypatch):
    keys = []
    forward = fused.forward
    monkeypatch.setattr(fused, "forward", lambda parts, rule: keys.extend(part.k.shape[2] for part in parts) or forward(parts, rule))
    case, read = replace(case, dtype=torch.bfloat16), {}
    for prune in (False, True):
        keys.clear()
        assert_accurate(run(case, "cpu", prune=prune), run(case, "reference"), run(case, "reference", torch.float64))
        read[prune] = sum(keys)
    assert read[True] < read[False]


@needs_triton
@pytest.mark.parametrize("residual_wanted", [False, True])
def test_custom_operators_and_the_eager_path_agree_and_compile(residual_wanted):
    x = Case(lengths_q=(9, 0, 11), head_dim=16, dtype=torch.float16).inputs(DEVICE)
    inputs = tuple(t.detach().requires_grad_() for t in x[:4])
    bounds = x.options["cu_seqlens_q"]
    arguments = (*inputs, bounds, bounds, residual_wanted, "triton", True, 0.25, -1, True)
    torch.library.opcheck(torch.ops.attnzoo.forgetting_forward, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))

    def attend(*leaves):
        return forgetting_attention(*leaves, softmax_scale=0.25, impl="triton", cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    expected = attend(*inputs)
    wanted = torch.autograd.grad(expected, inputs, x.dout)
    for result in (torch.ops.attnzoo.forgetting_forward(*arguments)[0], ops.forward(*arguments)[0],
                   torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)):
        assert torch.equal(result, expected)
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, x.dout), wanted))


def test_the_residual_is_kept_where_hoppers_backward_may_need_it():
    q, k, v = (torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    log_f = torch.zeros(1, 8, 2)
    assert ops.wants_residual(q, k, v, log_f, "gluon", False) and ops.wants_residual(q, k, v, log_f, None, False)
    assert ops.wants_residual(*(x.detach() for x in (q, k, v)), log_f.requires_grad_(), "gluon", False)
    others = ((q, k, v, log_f, "triton", False), (q, k, v, log_f, "gluon", True), (q[:, :5], k, v, log_f, "gluon", False),
              (q.half(), k.half(), v.half(), log_f, "gluon", False), (q[..., :32], k[..., :32], v[..., :32], log_f, "gluon", False),
              (*(x.detach() for x in (q, k, v, log_f)), "gluon", False))
    assert not any(ops.wants_residual(*call) for call in others)
    with torch.no_grad():
        assert not ops.wants_residual(q, k, v, log_f, "gluon", False)


@pytest.mark.parametrize("impl", [pytest.param(path, marks=[needs_triton] * (path == "triton")) for path in PATHS])
def test_empty_inputs(impl):
    for rows in ((0, 5), (2, 0)):
        leaves = [torch.zeros(*rows, heads, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2)]
        log_f = torch.zeros(*rows, 4, device=DEVICE, requires_grad=True)
        forgetting_attention(*leaves, log_f, impl=impl).sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in (*leaves, log_f))


WRONG = {
    "gates of another shape": ({"log_f": torch.zeros(1, 4, 1)}, ValueError, r"log_f: must have shape \(1, 4, 2\).* got \(1, 4, 1\)"),
    "gates in half precision": ({"log_f": torch.zeros(1, 4, 2).half()}, TypeError, "log_f: must be float32, got torch.float16"),
    "no gates": ({"log_f": None}, TypeError, "log_f: must be a float32 tensor, got NoneType"),
    "a scale without end": ({"softmax_scale": float("inf")}, ValueError, "softmax_scale: must be a finite number.* got inf"),
    "a path that there is not": ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', .*got 'cuda'"),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {name: torch.zeros(1, 4, 2, 16) for name in ("q", "k", "v")} | {"log_f": torch.zeros(1, 4, 2)} | change
    with pytest.raises(error, match=message):
        forgetting_attention(**arguments)


def test_the_benchmark_runs(capsys):
    assert benchmark.main(["speed", "packed", "--dry-run", "--dtype", "float32", "--backends", "attnzoo-reference"]) == 0
    assert "d16 gate 4 64 backward" in capsys.readouterr().out
