"""flash_attention over key ranges: the kernels against a dense mask in float64, the tables against what they are for, and the contract."""

import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import GPU
from torch.testing import assert_close

from attnzoo_kernels import KeyRanges, flash_attention
from attnzoo_kernels.flash import backward, forward, ops
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.flash.range_cases import CORRECTNESS, RangeCase
from attnzoo_kernels.flash.tiles import Tile
from attnzoo_kernels.ranges import make_tables, times_seen
from benchmarks import ranges as benchmark
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU  # Triton's interpreter computes bfloat16 wrongly
pytestmark = pytest.mark.usefixtures("poisoned")


def run(case, impl, dtype=None):
    """Output, LSE and gradients, of a loss on output and LSE, in `dtype` for inputs that were drawn in the case's."""
    x = case.inputs(DEVICE)
    leaves = {name: getattr(x, name).to(dtype or case.dtype).detach().requires_grad_() for name in "qkv"}
    options = dict(x.options)
    if case.sinks:
        leaves["sinks"] = options["sinks"] = options["sinks"].to(dtype or torch.float32).requires_grad_()
    out, lse = flash_attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, impl=impl, **options)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), list(leaves.values()))
    return {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def check(case):
    assert_accurate(run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64))


@needs_triton
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_keep_the_rule(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="Hopper's own tiles use descriptors already")
@pytest.mark.parametrize("one_loop", (False, True))
def test_descriptors_and_either_loop_keep_the_rule(one_loop, monkeypatch):
    plans = (forward._plan, backward._dq_plan, backward._dkdv_plan)
    tile = Tile(32, 32, 4, 1, tma=True, q_registers=True, one_loop=one_loop, from_stats=one_loop)
    monkeypatch.setattr(forward, "forward_tile", lambda *_, **__: tile)
    monkeypatch.setattr(backward, "dq_tile", lambda *_, **__: tile)
    monkeypatch.setattr(backward, "dkdv_tile", lambda *_, **__: tile)
    for plan in plans:
        plan.cache_clear()
    check(replace(CORRECTNESS[1], dtype=torch.float16))
    check(replace(CORRECTNESS[2], dtype=torch.float16))
    for plan in plans:
        plan.cache_clear()


place = st.integers(0, 50)
lists = st.lists(st.tuples(place, place, place, place, st.integers(0, 2)), max_size=8).map(tuple)


@pytest.mark.slow
@needs_triton
@settings(max_examples=200 if GPU else 12, deadline=None, derandomize=True)
@given(ranges=lists, left=st.sampled_from((-1, 0, 7)), right=st.sampled_from((-1, 2)))
def test_any_list_is_what_its_mask_is(ranges, left, right):
    # A query with one key has no error at all in eager PyTorch, and twice that allows none. So 50 more queries see 50 keys of their own.
    ranges = (*ranges, (50, 100, 50, 100, 0))
    check(RangeCase(lengths_q=(100,), heads=1, head_dim=16, ranges=ranges, window_size=(left, right), dtype=torch.float32))


@needs_triton
def test_the_ranges_of_packed_sequences_give_packed_attention():
    case = Case(lengths_q=(33, 0, 20, 17), lengths_k=(40, 7, 9, 24), head_dim=16, causal=True, window_size=(12, -1), dtype=torch.float32)
    x = case.inputs(DEVICE)
    q, k = x.options["cu_seqlens_q"], x.options["cu_seqlens_k"]
    ranges = torch.stack([q[:-1], q[1:], k[:-1], k[1:], torch.ones_like(q[1:])], 1)
    ours = flash_attention(*x[:3], ranges=ranges, window_size=(12, -1), return_lse=True, impl="triton")
    packed = flash_attention(*x[:3], **x.options, return_lse=True, impl="triton")
    for a, b in zip(ours, packed, strict=True):
        assert_close(a, b)


@needs_triton
@pytest.mark.parametrize("count", (90, pytest.param(10_000, marks=pytest.mark.gpu)))
def test_tables_lead_to_all_that_touch_a_tile_and_past_the_others(count):
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        begins = draw.randrange(200), draw.randrange(200)
        lengths = (draw.choice((0, 1, draw.randrange(10), draw.randrange(150))) for _ in begins)
        rows.append([x for begin, length in zip(begins, lengths, strict=True) for x in (begin, begin + length)] + [draw.randrange(3)])
    ranges = torch.tensor(rows, dtype=torch.int32)
    some = ranges[(ranges[:, 0] < ranges[:, 1]) & (ranges[:, 2] < ranges[:, 3])]
    for side, table in enumerate(make_tables(ranges.to(DEVICE)).cpu()):
        entries = table.tolist()
        assert [e[0] for e in entries] == sorted(e[0] for e in entries)
        own, other = (some[:, [0, 1]], some[:, [2, 3]]) if side == 0 else (some[:, [2, 3]], some[:, [0, 1]])
        places = torch.cat([own, other, some[:, 4:]], 1).tolist()
        for row in range(0, 360, 40):
            met, entry = [], max((n for n, e in enumerate(entries) if e[0] < row + 16), default=-1)
            while entry >= 0:
                if entries[entry][1] > row:
                    met.append(entries[entry][:5])
                    entry -= 1
                else:
                    assert entries[entry][5] < entry
                    entry = entries[entry][5]
            assert sorted(met) == sorted(p for p in places if p[0] < row + 16 and p[1] > row)


@needs_triton
@pytest.mark.parametrize("count", (1, 7, 63, 64, 65, 256, 257, 1000))
@pytest.mark.parametrize("places", (12, 1000, 2**31 - 2))
def test_tables_are_sorted_and_linked(count, places):
    """Few places: many ranges that are equal, begin together, or are empty."""
    draw = random.Random(count)
    rows = [[draw.randint(0, places) for _ in range(4)] + [draw.randrange(3)] for _ in range(count)]
    for side, table in enumerate(make_tables(torch.tensor(rows, dtype=torch.int32, device=DEVICE)).tolist()):
        turned = [row if side == 0 else [*row[2:4], *row[:2], row[4]] for row in rows]
        wanted = [row if row[0] < row[1] and row[2] < row[3] else [0, 0, *row[2:]] for row in turned]
        wanted.sort(key=lambda row: (row[0], -row[1]))
        ends = [row[1] for row in wanted]
        links = [next((j for j in reversed(range(i)) if ends[j] > end), -1) for i, end in enumerate(ends)]
        assert [entry[:6] for entry in table] == [[*row, link] for row, link in zip(wanted, links, strict=True)]


def steps_of_tiles(ranges, queries, keys, window, block, rows):
    """For each tile of `block` keys, how many tiles of `rows` queries see it, each range for itself."""
    steps = [0] * -(-keys // block)
    for one in ranges.split(1):
        seen = times_seen(one, queries, keys, window)
        for tile, its in enumerate(seen.split(block, 1)):
            of = its.any(1).nonzero().flatten().tolist()
            steps[tile] += of[-1] // rows - of[0] // rows + 1 if of else 0
    return steps


@needs_triton
@pytest.mark.parametrize("group", (1, 3, 4))
@pytest.mark.parametrize("window", ((-1, -1), (40, 3)))
@pytest.mark.parametrize("count, most_groups", ((0, 5), (1, 5), (20, 1), (20, 5)))
def test_tiles_that_most_queries_see_come_first_and_the_longest_in_two_parts(count, window, group, most_groups):
    from attnzoo_kernels._triton.range_order import DIVIDED, divided_tiles, launch_order

    draw = random.Random(count + group)
    block, rows, queries, keys, kv_heads, programs = 16, 8, 90, 150 if count < 2 else 9000, 5, 12
    bounds = [[sorted(draw.randrange(n + 1) for _ in range(2)) for n in (queries, keys)] for _ in range(count)]
    ranges = torch.tensor([[*q, *k, draw.randrange(3)] for q, k in bounds], dtype=torch.int32).view(-1, 5)
    flags = torch.ones(2 * divided_tiles(group, programs), dtype=torch.int32, device=DEVICE)
    order = launch_order(make_tables(ranges.to(DEVICE))[1], flags, keys, kv_heads, group, most_groups, programs, window, block, rows)
    steps = steps_of_tiles(ranges, queries, keys, window, block, rows)
    average = sum(steps) * kv_heads / programs
    assert not flags.any()
    *items, (n_items, head_group, *_) = order.tolist()
    items = [item[:5] for item in items[:n_items]]
    divided = [tile for tile, n in enumerate(steps) if group > 1 and n > max(DIVIDED * average, 3)]
    there = [(tile, part) for tile, _, _, part, _ in items]
    assert sorted(there) == sorted((tile, part) for tile in range(len(steps)) for part in ((1, 2) if tile in divided else (0,)))
    assert len(divided) * kv_heads <= divided_tiles(group, programs)
    assert all(n == steps[tile] for tile, _, n, *_ in items)
    assert all(number == divided.index(tile) for tile, _, _, part, number in items if part)
    heads = {0: group, 1: group - group // 2, 2: group // 2}
    weights = [n * heads[part] for _, _, n, part, _ in items]
    assert weights == sorted(weights, reverse=True)
    groups = max(1, min(most_groups, int(average * group / max(*weights, 1))))
    assert head_group == -(-kv_heads // groups)
    assert all(there.index((tile, 1)) < there.index((tile, 2)) for tile in divided)


def test_what_ranges_mean():
    ranges = torch.tensor([[0, 2, 0, 3, 0], [2, 4, 1, 4, 1], [2, 5, 4, 6, 2], [4, 5, 4, 5, 0]], dtype=torch.int32)
    seen = [[1, 1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 1, 1, 0, 1, 0],
            [0, 1, 1, 1, 1, 1],
            [0, 0, 0, 0, 2, 1]]
    assert times_seen(ranges, 5, 6, (-1, -1)).tolist() == seen
    # around the diagonals: 0 sees 1, 1 sees 2, and so on
    assert times_seen(ranges, 5, 6, (0, 0)).tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1],
                                                        [0, 0, 0, 0, 1, 0]]


def test_check_refuses_overlapping_ranges_and_no_others():
    rows = [[0, 10, 0, 10, 1], [0, 10, 10, 20, 0], [10, 20, 5, 20, 0], [20, 30, 0, 10, 2], [20, 30, 9, 10, 1], [5, 5, 0, 30, 0]]
    ranges = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    pairs = times_seen(ranges, 30, 30, (-1, -1))
    assert pairs.amax() == 2 and (pairs == 2).nonzero().tolist() == [[29, 9]]
    with pytest.raises(ValueError, match=r"ranges: must not show a query one key twice, but rows 3 and 4 do: \[20, 30, 0, 10, 2\] and"):
        KeyRanges.of(ranges, check=True)
    KeyRanges.of(ranges[[0, 1, 2, 3, 5]], check=True)
    with pytest.raises(ValueError, match="ranges: kind must be 0 .full.* got 3 in row 1"):
        KeyRanges.of(ranges.new_tensor([[0, 1, 0, 1, 0], [0, 1, 0, 1, 3]]), check=True)


@pytest.mark.slow
@needs_triton
def test_custom_operators_and_the_eager_path_agree_and_compile():
    x = replace(CORRECTNESS[0], dtype=torch.float16).inputs(DEVICE)
    inputs = tuple(t.detach().requires_grad_() for t in x[:3])
    ranges = x.options["ranges"]
    torch.library.opcheck(torch.ops.attnzoo.key_range_tables, (ranges,), test_utils=("test_schema", "test_faketensor"))

    def attend(*leaves, ranges=ranges):
        return flash_attention(*leaves, ranges=ranges, impl="triton")

    expected = attend(*inputs)
    wanted = torch.autograd.grad(expected, inputs, x.dout)
    arguments = (*inputs, *make_tables(ranges), None, None, None, False, "triton", True, 0.25, -1, -1, 0.0, 0.0)
    for result in (torch.ops.attnzoo.flash_forward(*arguments)[0], ops.forward(*arguments)[0],
                   attend(*inputs, ranges=KeyRanges(ranges, make_tables(ranges))),
                   torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)):
        assert torch.equal(result, expected)
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, x.dout), wanted))


LARGE = RangeCase(lengths_q=(3000,), heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, label="many",
                  ranges=tuple((n % 2990, n % 2990 + n % 11, n * 7 % 2900, n * 7 % 2900 + n % 97, n % 3) for n in range(10_000)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", (LARGE, replace(LARGE, head_dim=64, window_size=(20, 5)), replace(LARGE, dtype=torch.float32)), ids=str)
def test_ten_thousand_ranges(case):
    check(case)


@pytest.mark.gpu
def test_nothing_waits_and_graphs_follow_the_list():
    others = (0, 70, 0, 70, 1), (0, 0, 0, 0, 0), (3, 20, 5, 9, 0), (30, 60, 50, 70, 2)
    first, second = (replace(CORRECTNESS[0], head_dim=64, ranges=ranges) for ranges in (CORRECTNESS[0].ranges, others))
    x = first.inputs(DEVICE)
    ranges, q = x.options["ranges"], x.q.detach().requires_grad_()

    def step():
        out = flash_attention(q, *x[1:3], ranges=ranges, impl="triton")
        return out, *torch.autograd.grad(out, q, x.dout)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for case in (second, first):
        ranges.copy_(torch.tensor(case.ranges, dtype=torch.int32))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


@pytest.mark.parametrize("case", (CORRECTNESS[0], CORRECTNESS[2]), ids=str)
def test_the_benchmarks_compare_equals(case):
    seen = times_seen(case.inputs()[4]["ranges"], *case.lengths[0], case.window_size) > 0
    i, j = (torch.arange(n) for n in case.lengths[0])
    assert torch.equal(benchmark.mask_of(case)(0, 0, i[:, None], j[None]), seen)
    assert case.pairs() == seen.sum() or case.window_size == (-1, -1)  # half a square counts for a causal range


def test_the_benchmark_runs(capsys):
    assert benchmark.main(["--dry-run",]) == 0
    assert "packed attnzoo-reference" in capsys.readouterr().out


WRONG = {
    "no tensor": ({"ranges": [(0, 4, 0, 4, 1)]}, TypeError, "ranges: must be an int32 tensor of shape .ranges, 5., .* got list"),
    "a list of another form": ({"ranges": torch.zeros(5, dtype=torch.int32)}, ValueError, r"ranges: must have shape .* got \(5,\)"),
    "other integers": ({"ranges": torch.zeros(1, 5, dtype=torch.int64)}, TypeError, "ranges: must be int32, got torch.int64"),
    "a range of more than there is": ({"ranges": torch.tensor([[0, 5, 0, 4, 0]], dtype=torch.int32)}, ValueError,
                                      "ranges: must end within the 4 queries, got 5 in row 0"),
    "a causal call": ({"causal": True}, ValueError, "causal: must be False with ranges, .* got True"),
    "lengths, too": ({"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "cu_seqlens_q: must be None with ranges"),
    "a batch": ({"q": torch.zeros(1, 4, 2, 16)}, ValueError, r"q: must be \(total, heads, head_dim\), got shape"),
    "slopes": ({"alibi_slopes": torch.ones(2)}, NotImplementedError, "ranges: go with no alibi_slopes and no dropout_p"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "ranges: go with no alibi_slopes and no dropout_p"),
    "the path for CPUs": ({"impl": "cpu"}, NotImplementedError, 'impl="cpu" does not take this call: it has no ranges'),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {name: torch.zeros(4, 2, 16) for name in "qkv"} | {"ranges": torch.zeros(1, 5, dtype=torch.int32)} | change
    with pytest.raises(error, match=message):
        flash_attention(**arguments)
