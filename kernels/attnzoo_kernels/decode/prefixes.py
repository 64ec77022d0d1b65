"""Prefixes that neighbouring sequences share: their pages are read once for all of these sequences.

Neighbouring rows of the block table that begin with the same pages form groups of at most `members` sequences. First the queries of a group
read the shared pages as if they were of one sequence. Then each sequence goes on with its own pages; it starts from what its group found,
as from a sink that has a value. Both are calls of the kernels in `forward`, with tables that two small kernels make. The host does not
wait, nothing is copied, and CUDA graphs may be replayed after tables and lengths have changed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnzoo_kernels._triton.launch import architecture, block_width, next_power_of_2, on_device_of
from attnzoo_kernels.decode import forward
from attnzoo_kernels.decode.tiles import shared_rows


class Groups(NamedTuple):
    """All int32. By group, zero where there is none: leaders, counts, and lengths (of the shared pages, in tokens). By sequence: skips
    (number of shared pages) and own_lengths (tokens after these)."""

    leaders: Tensor
    counts: Tensor
    lengths: Tensor
    skips: Tensor
    own_lengths: Tensor


@triton.jit
def _whole_pages(cache_seqlens, row, max_blocks, seqlen_q, PAGE: tl.constexpr):
    """How many pages of a sequence all of its queries see whole."""
    length = tl.minimum(tl.load(cache_seqlens + row), max_blocks * PAGE)
    return tl.maximum(length - seqlen_q, 0) // PAGE


@triton.jit(do_not_specialize=["stride_table", "max_blocks", "seqlen_q"], do_not_specialize_on_alignment=["block_table", "cache_seqlens"])
def common_pages_kernel(block_table, cache_seqlens, common, stride_table, max_blocks, seqlen_q, PAGE: tl.constexpr, BLOCK: tl.constexpr,
                        OVERLAP: tl.constexpr):
    """For each sequence, how many pages at its beginning it shares with the sequence before it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    pages = tl.minimum(_whole_pages(cache_seqlens, row, max_blocks, seqlen_q, PAGE),
                       _whole_pages(cache_seqlens, before, max_blocks, seqlen_q, PAGE))
    pages = tl.where(row == 0, 0, pages)
    table = block_table + tl.cast(row, tl.int64) * stride_table
    table_before = block_table + tl.cast(before, tl.int64) * stride_table
    equal = pages
    start = 0
    while start < equal:
        at = start + tl.arange(0, BLOCK)
        here = tl.load(table + at, mask=at < pages, other=0)
        there = tl.load(table_before + at, mask=at < pages, other=0)
        equal = tl.minimum(equal, tl.min(tl.where(here != there, at, pages), 0))
        start += BLOCK
    tl.store(common + row, equal)


@triton.jit
def _joins_before(common, row, batch):
    """Whether a sequence is in one group with the sequence before it: they share pages, and neither shares more than twice as many with its
    other neighbour."""
    pages = tl.load(common + row, mask=(row > 0) & (row < batch), other=0)
    before = tl.load(common + row - 1, mask=(row > 1) & (row <= batch), other=0)
    behind = tl.load(common + row + 1, mask=row + 1 < batch, other=0)
    return (pages > 0) & (before <= 2 * pages) & (behind <= 2 * pages)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["batch", "groups", "max_blocks"], do_not_specialize_on_alignment=["cache_seqlens"])
def groups_kernel(common, cache_seqlens, leaders, counts, lengths, skips, own_lengths, batch, groups, max_blocks, MEMBERS: tl.constexpr,
                  PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Finds the groups, and what is left of each sequence after the shared pages."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, BLOCK)
    joins = _joins_before(common, row, batch)
    run = tl.associative_scan(tl.where(joins, 0, row), 0, _larger)  # the first of the consecutive sequences that join
    place = (row - run) % MEMBERS
    leads = (place == 0) & _joins_before(common, row + 1, batch)
    member = (place > 0) | leads
    number = tl.cumsum(leads.to(tl.int32), 0) - 1
    # minimum and maximum within a group, by scans of combined numbers whose higher part is the group
    leader = (row - place).to(tl.int64)
    step = tl.cast(max_blocks, tl.int64) + 1
    pages = tl.where(place > 0, tl.load(common + row, mask=row < batch, other=0), max_blocks)
    before = tl.associative_scan((BLOCK - leader) * step + pages, 0, _smaller) % step
    behind = tl.associative_scan(leader * step + pages, 0, _smaller, reverse=True) % step
    shared = tl.where(member, tl.minimum(before, behind), 0).to(tl.int32)
    last = (tl.associative_scan((BLOCK - leader) * BLOCK + place, 0, _larger, reverse=True) % BLOCK).to(tl.int32)
    tl.store(leaders + number, row, mask=leads)
    tl.store(counts + number, last + 1, mask=leads)
    tl.store(lengths + number, shared * PAGE, mask=leads)
    none = (row >= tl.sum(leads.to(tl.int32), 0)) & (row < groups)
    for by_group in tl.static_range(3):
        tl.store((leaders, counts, lengths)[by_group] + row, 0, mask=none)
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + row, mask=row < batch, other=0), 0), max_blocks * PAGE)
    tl.store(skips + row, shared, mask=row < batch)
    tl.store(own_lengths + row, length - shared * PAGE, mask=row < batch)


def find_groups(block_table: Tensor, cache_seqlens: Tensor, seqlen_q: int, page: int, at_most: int) -> tuple[Groups, Tensor]:
    """(the groups, how many pages each sequence shares with the one before it)."""
    batch, max_blocks = block_table.shape
    common, skips, own_lengths = torch.empty(3, batch, dtype=torch.int32, device=block_table.device)
    leaders, counts, lengths = torch.empty(3, forward.most_groups(batch), dtype=torch.int32, device=block_table.device)
    groups = Groups(leaders, counts, lengths, skips, own_lengths)
    overlap = forward.overlaps(architecture(block_table))
    options = {"PAGE": page, "OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})
    block = next_power_of_2(batch)
    common_pages_kernel[(batch,)](block_table, cache_seqlens, common, block_table.stride(0), max_blocks, seqlen_q, BLOCK=1024, num_warps=4,
                                **options)
    # scans over one warp's lanes need no barrier
    groups_kernel[(1,)](common, cache_seqlens, *groups, batch, leaders.shape[0], max_blocks, MEMBERS=at_most, BLOCK=block,
                        num_warps=1 if block <= 128 else 4, **options)
    return groups, common


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor, sinks: Tensor | None,
                   softmax_scale: float, window_right: int, softcap: float, k_scale: Tensor | None = None,
                   v_scale: Tensor | None = None, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """As `forward.launch_forward`, of pages, without ALiBi and without a left window."""
    batch, seqlen_q, heads, head_dim = q.shape
    page, kv_heads = k.shape[1:3]
    at_most = 0  # number of sequences whose queries of a key head fit into one tile
    if q.numel() > 0 and batch > 1:
        queries = seqlen_q * heads // kv_heads
        width = max(block_width(head_dim), block_width(v.shape[-1]))
        at_most = shared_rows(architecture(q), width, k.element_size(), batch * queries) // queries
    if at_most < 2:
        return forward.launch_forward(q, k, v, cache_seqlens, block_table, None, sinks, softmax_scale, -1, window_right, softcap, k_scale,
                                      v_scale, out_dtype)
    with on_device_of(q):
        groups, _ = find_groups(block_table, cache_seqlens, seqlen_q, page, at_most)
        found = forward.launch_forward(q, k, v, groups.lengths, block_table, None, sinks, softmax_scale, -1, -1, softcap, k_scale, None,
                                       torch.float32, group=forward.Group(at_most, groups.leaders, groups.counts))
        return forward.launch_forward(q, k, v, groups.own_lengths, block_table, None, sinks, softmax_scale, -1, window_right, softcap,
                                      k_scale, v_scale, out_dtype, prefix=forward.Prefix(groups.skips, *found))
