"""decode_attention over pages that sequences share, under the 2x rule; in the interpreter where there is no GPU."""

import random
from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels import decode_attention
from attnzoo_kernels.decode import forward, prefixes
from attnzoo_kernels.decode.tiles import decode_tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)  # the interpreter gets bfloat16 wrong
SHARED = ((3, 5), (1, 0), (4, 7), (2, 1))  # sequences, and the pages with which they begin


def inputs(shared, page=8, seqlen_q=1, kv_heads=2, group=2, head_dim=32, value_dim=None, dtype=torch.float32, seed=0, device="cpu"):
    """Queries, caches whose unused rows are NaN, and options: each sequence has up to four pages of its own behind those that it shares."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    rows, lengths, used = [], [], 0
    for n, pages in shared:
        prefix = list(range(used, used + pages))
        used += pages
        for _ in range(n):
            length = max(pages * page + draw.randint(0, 4 * page), seqlen_q)
            own = list(range(used, used - (-length // page) - pages))
            used += len(own)
            rows.append(prefix + own)
            lengths.append(length)
    table = torch.tensor([row + [-1] * (max(map(len, rows)) - len(row)) for row in rows], dtype=torch.int32)
    order = torch.randperm(used + 2, generator=generator)
    read = torch.zeros(used + 2, page, dtype=torch.bool)
    for row, length in zip(rows, lengths, strict=True):
        for token in range(length):
            read[order[row[token // page]], token % page] = True
    caches = (torch.randn(used + 2, page, kv_heads, width, generator=generator) for width in (head_dim, value_dim or head_dim))
    caches = [x.masked_fill(~read[..., None, None], torch.nan).to(device, dtype) for x in caches]
    q = torch.randn(len(rows), seqlen_q, kv_heads * group, head_dim, generator=generator).to(device, dtype)
    table = torch.where(table < 0, table, order[table.clamp(min=0)].int())
    return q, *caches, {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device), "block_table": table.to(device),
                        "causal": True}


CASES = {
    "plain": (SHARED, {}, {}),
    "several queries": (SHARED, {"seqlen_q": 3}, {}),
    "more queries than a page": (SHARED, {"seqlen_q": 9, "page": 4, "group": 1}, {}),
    "softcap, one key head": (SHARED, {"kv_heads": 1, "group": 4}, {"softcap": 3.0}),
    "sinks": (SHARED, {}, {"sinks": torch.linspace(-1, 2, 4)}),
    "scales": (SHARED, {}, {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.1])}),
    "groups of more than a tile": (((20, 3), (17, 6), (1, 2)), {}, {}),
    "widths": (((2, 9),) * 3, {"head_dim": 40, "value_dim": 24}, {}),
    "nothing shared": (((1, 3),) * 4, {}, {}),
    "too many queries to share": (SHARED, {"seqlen_q": 9, "group": 4}, {}),
    "one sequence": (((1, 3),), {}, {}),
}


def run(q, k, v, options, impl, dtype=None, **more):
    tensors = [x.to(dtype or x.dtype) for x in (q, k, v)]
    return dict(zip(("out", "lse"), decode_attention(*tensors, **options, return_lse=True, impl=impl, **more), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_that_of_eager(name, dtype, device, poisoned):
    shared, sizes, options = CASES[name]
    *tensors, lengths = inputs(shared, dtype=dtype, device=device, **sizes)
    options = lengths | {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    ours = run(*tensors, options, "triton", share_prefixes=True)
    assert_accurate(ours, run(*tensors, options, "reference"), run(*tensors, options, "reference", torch.float64))


@pytest.mark.parametrize("pairs", (True, False))
@pytest.mark.parametrize("head_dim, seqlen_q", ((32, 1), (128, 3)))
def test_caches_of_8_bits(head_dim, seqlen_q, pairs, device, poisoned, monkeypatch):
    if pairs:  # which the interpreter's tile does not read
        monkeypatch.setattr(forward, "decode_tile", lambda *shape, **more: replace(decode_tile(*shape, **more), pairs=True))
    q, k, v, options = inputs(SHARED, head_dim=head_dim, seqlen_q=seqlen_q, dtype=DTYPES[-1], device=device)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    if not pairs:  # values that begin at an odd address are read as bytes
        v = torch.cat([v.view(torch.uint8), v.view(torch.uint8)], -1)[..., 1 : head_dim + 1].view(torch.float8_e4m3fn)
    tensors = q, k, v
    options |= {"k_scale": torch.tensor([0.5, 2.0], device=device), "v_scale": torch.tensor([3.0, 0.1], device=device)}
    forward._plan.cache_clear()
    ours = run(*tensors, options, "triton", share_prefixes=True)
    forward._plan.cache_clear()
    assert_accurate(ours, run(*tensors, options, "reference"), run(*tensors, options, "reference", torch.float64))


@pytest.mark.parametrize("seed", range(4))
def test_random_groups(seed, device, poisoned):
    draw = random.Random(seed)
    shared = [(draw.randint(1, 5), draw.randint(0, 9)) for _ in range(draw.randint(3, 5))]
    sizes = {"page": draw.choice((4, 8, 16)), "seqlen_q": draw.choice((1, 2, 5)), "group": draw.choice((1, 2, 4)), "seed": seed}
    *tensors, options = inputs(shared, device=device, **sizes)
    options["causal"] = draw.random() < 0.7
    ours = run(*tensors, options, "triton", share_prefixes=True)
    assert_accurate(ours, run(*tensors, options, "reference"), run(*tensors, options, "reference", torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", (1, 4))
def test_long_prefixes(seqlen_q, device):
    *tensors, options = inputs(((16, 500), (1, 3), (40, 130), (9, 1)), page=16, seqlen_q=seqlen_q, kv_heads=4, group=4, head_dim=128,
                               dtype=torch.bfloat16, device=device)
    run(*tensors, options, "triton")  # whose kernels are others: their output is in bfloat16
    ours = run(*tensors, options, "triton", share_prefixes=True)
    assert_accurate(ours, run(*tensors, options, "reference"), run(*tensors, options, "reference", torch.float64))


@pytest.mark.parametrize("at_most, common, first, group", [
    (8, [0, 5, 5, 0, 7, 7, 7], [0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 1, 1, 1, 1]),
    (2, [0, 5, 5, 5, 5], [0, 0, 2, 2, 4], [0, 0, 1, 1, -1]),  # more than fit one tile
    (8, [0, 1, 9, 9, 1, 8], [0, 1, 1, 1, 4, 4], [-1, 0, 0, 0, 1, 1]),  # the first page is that of all
    (8, [0, 9, 6, 4], [0, 0, 0, 0], [0, 0, 0, 0]),
    (8, [0, 0, 0], [0, 1, 2], [-1, -1, -1]),
])
def test_groups_are_those_of_neighbours_with_about_as_much_in_common(at_most, common, first, group, device):
    table = torch.arange(len(common) * 10, dtype=torch.int32).view(-1, 10)
    for row, pages in enumerate(common):
        table[row, :pages] = table[row - 1, :pages]
    lengths = torch.full((len(common),), 40, dtype=torch.int32, device=device)
    table = table.to(device)
    common = [min(pages, 9) for pages in common]  # the last page holds the new token
    groups, found = prefixes.find_groups(table, lengths, 1, 4, at_most)
    assert found.tolist() == common
    numbers = range(max(group) + 1)
    leaders, more = [group.index(n) for n in numbers], [0] * (len(common) // 2 - len(numbers))
    assert groups.leaders.tolist() == leaders + more and groups.counts.tolist() == [group.count(n) for n in numbers] + more
    shared = [min(common[i] for i, other in enumerate(group) if other == n and first[i] != i) if n >= 0 else 0 for n in group]
    assert groups.lengths.tolist() == [4 * shared[leader] for leader in leaders] + more
    assert groups.skips.tolist() == shared and groups.own_lengths.tolist() == [40 - 4 * pages for pages in shared]


@pytest.mark.gpu
def test_a_graph_follows_tables_and_nothing_waits(device):
    *tensors, options = inputs(SHARED, dtype=torch.bfloat16, device=device)
    tensors = [x.nan_to_num(0.5) for x in tensors]
    decode_attention(*tensors, **options, share_prefixes=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode_attention(*tensors, **options, share_prefixes=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    table = options["block_table"]
    for new in (table.clone(), table.flip(0), table[:1].expand_as(table).contiguous()):
        table.copy_(new.clamp(min=0))
        graph.replay()
        assert torch.equal(captured, decode_attention(*tensors, **options, share_prefixes=True))


def test_what_does_not_go_with_it_is_refused(device):
    q, k, v, options = inputs(SHARED, device=device)
    for change in ({"block_table": None, "cache_seqlens": options["cache_seqlens"] * 0}, {"window_size": (9, 0)},
                   {"alibi_slopes": torch.ones(4, device=device)}):
        rows = () if "block_table" not in change else (k[:1].expand(len(q), -1, -1, -1), v[:1].expand(len(q), -1, -1, -1))
        with pytest.raises(ValueError, match="share_prefixes=True: must be False without block_table, with a window .* alibi_slopes"):
            decode_attention(q, *(rows or (k, v)), **options | change, share_prefixes=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_kernels_compile_without_spills(arch):
    kernels = compiled_kernels("decode_prefixes_ahead_of_time.py", arch)
    own = {"common_pages_kernel", "groups_kernel"}
    assert {k["kernel"] for k in kernels} == own | {"decode_split_kernel", "decode_merge_kernel"}
    assert not [k for k in kernels if k["kernel"] in own and k["stack"]]
