"""Prefixes that neighbouring sequences have in common: their pages are read once for all of them.

Rows of the block table that begin with the same pages form groups of at most MEMBERS sequences. The queries of a group read its pages as
those of one sequence, each sequence reads what is left of its own, and the two results are merged by their LSE. Both are calls of the
kernels in `forward`, over tables that the device makes: nothing waits for it, and a CUDA graph follows tables and lengths.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnzoo_kernels._triton.launch import block_width, next_power_of_2, on_device_of
from attnzoo_kernels.decode import forward

GO_ON = False  # whether each sequence goes on from what its group found (`following`), which has not been run on a GPU yet
ROWS = 64  # rows of a tile, at most: the queries of one key head's group, of all members


class Groups(NamedTuple):
    """All int32. first and group are by sequence: the first sequence of its group, and the group's number, -1 where it is alone."""

    first: Tensor
    group: Tensor


@triton.jit
def whole_pages(cache_seqlens, row, max_blocks, seqlen_q, PAGE: tl.constexpr):
    """Pages of a sequence that all of its queries see whole."""
    length = tl.minimum(tl.load(cache_seqlens + row), max_blocks * PAGE)
    return tl.maximum(length - seqlen_q, 0) // PAGE


@triton.jit(do_not_specialize=["stride_table", "max_blocks", "seqlen_q"], do_not_specialize_on_alignment=["block_table", "cache_seqlens"])
def common_pages_kernel(block_table, cache_seqlens, common, stride_table, max_blocks, seqlen_q, PAGE: tl.constexpr, BLOCK: tl.constexpr,
                        OVERLAP: tl.constexpr = False):
    """How many pages at its beginning each sequence has in common with the one before it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    pages = tl.minimum(whole_pages(cache_seqlens, row, max_blocks, seqlen_q, PAGE),
                       whole_pages(cache_seqlens, before, max_blocks, seqlen_q, PAGE))
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
def joins_before(common, row, batch):
    """Whether a sequence is in a group with the one before it: neither has more than twice as much in common with its other neighbour."""
    pages = tl.load(common + row, mask=(row > 0) & (row < batch), other=0)
    before = tl.load(common + row - 1, mask=(row > 1) & (row <= batch), other=0)
    behind = tl.load(common + row + 1, mask=row + 1 < batch, other=0)
    return (pages > 0) & (before <= 2 * pages) & (behind <= 2 * pages)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["batch", "groups"])
def groups_kernel(common, first, group, lengths, batch, groups, MEMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """Each sequence's group; the groups' lengths are set to zero."""
    row = tl.arange(0, BLOCK)
    joins = joins_before(common, row, batch)
    run = tl.associative_scan(tl.where(joins, 0, row), 0, larger)  # where a row of sequences that join begins
    place = (row - run) % MEMBERS
    leads = (place == 0) & joins_before(common, row + 1, batch)
    number = tl.cumsum(leads.to(tl.int32), 0) - 1
    tl.store(first + row, row - place, mask=row < batch)
    tl.store(group + row, tl.where((place > 0) | leads, number, -1), mask=row < batch)
    tl.store(lengths + row, 0, mask=row < groups)


@triton.jit(do_not_specialize=["stride_table", "max_blocks", "seqlen_q", "batch"],
            do_not_specialize_on_alignment=["block_table", "cache_seqlens"])
def divide_kernel(q_ptr, block_table, cache_seqlens, common, first, group, group_q, group_table, group_lengths, own_table, own_lengths,
                  stride_qb, stride_qs, stride_qh, stride_table, max_blocks, seqlen_q, batch, heads, HEAD_DIM: tl.constexpr,
                  PAGE: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """A sequence's queries beside those of its group; the table and the length of the group, and those of what is left to the sequence."""
    row = tl.program_id(0)
    number = tl.load(group + row)
    leader = tl.load(first + row)
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + row), 0), max_blocks * PAGE)
    shared = 0
    if number >= 0:
        member = leader + tl.arange(0, BLOCK_MEMBERS)
        inside = (member > leader) & (member < leader + MEMBERS) & (member < batch)
        inside = inside & (tl.load(group + member, mask=inside, other=-1) == number)
        shared = tl.min(tl.load(common + member, mask=inside, other=max_blocks), 0)
        columns = tl.arange(0, BLOCK_D)
        source = q_ptr + tl.cast(row, tl.int64) * stride_qb
        target = group_q + (tl.cast(number, tl.int64) * MEMBERS + row - leader) * seqlen_q * heads * HEAD_DIM
        for query in range(seqlen_q):
            for start in range(0, heads, 16):
                head = start + tl.arange(0, 16)
                there = (head < heads)[:, None] & (columns < HEAD_DIM)[None, :]
                x = tl.load(source + query * stride_qs + head[:, None] * stride_qh + columns[None, :], mask=there)
                tl.store(target + (query * heads + head[:, None]) * HEAD_DIM + columns[None, :], x, mask=there)
    table = block_table + tl.cast(row, tl.int64) * stride_table
    if (number >= 0) & (row == leader):
        tl.store(group_lengths + number, shared * PAGE)
        for start in range(0, shared, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(group_table + tl.cast(number, tl.int64) * max_blocks + at, tl.load(table + at, mask=at < shared), mask=at < shared)
    tl.store(own_lengths + row, length - shared * PAGE)
    left = tl.cdiv(length, PAGE) - shared
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(own_table + tl.cast(row, tl.int64) * max_blocks + at, tl.load(table + shared + at, mask=at < left), mask=at < left)


@triton.jit(do_not_specialize=["seqlen_q"])
def join_kernel(group_out, group_lse, own_out, own_lse, out_ptr, lse_ptr, first, group, seqlen_q, heads, VALUE_DIM: tl.constexpr,
                MEMBERS: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr):
    """A query's two results, merged by their LSE."""
    row = tl.program_id(0) // seqlen_q
    query = tl.program_id(0) % seqlen_q
    number = tl.load(group + row)
    member = row - tl.load(first + row)
    columns = tl.arange(0, BLOCK_DV)
    for start in range(0, heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)
        real = head < heads
        there = real[:, None] & (columns < VALUE_DIM)[None, :]
        index = (tl.cast(row, tl.int64) * seqlen_q + query) * heads + head
        lse_index = (tl.cast(row, tl.int64) * heads + head) * seqlen_q + query
        # [BLOCK_H, BLOCK_DV]
        result = tl.load(own_out + index[:, None] * VALUE_DIM + columns[None, :], mask=there, other=0.0)
        lse = tl.load(own_lse + lse_index, mask=real, other=0.0)
        if number >= 0:
            queries = MEMBERS * seqlen_q
            place = member * seqlen_q + query
            shared_index = (tl.cast(number, tl.int64) * queries + place) * heads + head
            shared = tl.load(group_out + shared_index[:, None] * VALUE_DIM + columns[None, :], mask=there, other=0.0)
            shared_lse = tl.load(group_lse + (tl.cast(number, tl.int64) * heads + head) * queries + place, mask=real, other=0.0)
            larger = tl.maximum(lse, shared_lse)
            larger = tl.where(larger == -float("inf"), 0.0, larger)
            weight, shared_weight = tl.exp(lse - larger), tl.exp(shared_lse - larger)
            total = weight + shared_weight
            divisor = tl.where(total > 0, total, 1.0)
            result = result * (weight / divisor)[:, None] + shared * (shared_weight / divisor)[:, None]
            lse = larger + tl.log(total)
        tl.store(out_ptr + index[:, None] * VALUE_DIM + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=there)
        tl.store(lse_ptr + lse_index, lse, mask=real)


def members(seqlen_q: int, group: int) -> int:
    """Sequences whose queries of a key head fit one tile."""
    return ROWS // (seqlen_q * group)


def find_groups(block_table: Tensor, cache_seqlens: Tensor, seqlen_q: int, page: int, at_most: int) -> tuple[Groups, Tensor, Tensor]:
    """The groups; how many pages each sequence has in common with the one before it; zeros for the groups' lengths, (groups,)."""
    batch, max_blocks = block_table.shape
    common, first, group = torch.empty(3, batch, dtype=torch.int32, device=block_table.device)
    lengths = torch.empty(max(batch // 2, 1), dtype=torch.int32, device=block_table.device)
    common_pages_kernel[(batch,)](block_table, cache_seqlens, common, block_table.stride(0), max_blocks, seqlen_q, PAGE=page, BLOCK=1024,
                                  num_warps=4)
    groups_kernel[(1,)](common, first, group, lengths, batch, lengths.shape[0], MEMBERS=at_most, BLOCK=next_power_of_2(batch), num_warps=4)
    return Groups(first, group), common, lengths


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor, sinks: Tensor | None,
                   softmax_scale: float, window_right: int, softcap: float, k_scale: Tensor | None = None,
                   v_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `forward.launch_forward`, of pages, without ALiBi and without a left window."""
    batch, seqlen_q, heads, head_dim = q.shape
    page, kv_heads = k.shape[1:3]
    at_most = members(seqlen_q, heads // kv_heads)
    if q.numel() == 0 or batch < 2 or at_most < 2:
        return forward.launch_forward(q, k, v, cache_seqlens, block_table, None, sinks, softmax_scale, -1, window_right, softcap, k_scale,
                                      v_scale)
    if GO_ON:
        from attnzoo_kernels.decode import following

        return following.launch_forward(q, k, v, cache_seqlens, block_table, sinks, softmax_scale, window_right, softcap, k_scale, v_scale)
    max_blocks = block_table.shape[1]
    with on_device_of(q):
        groups, common, group_lengths = find_groups(block_table, cache_seqlens, seqlen_q, page, at_most)
        n_groups = group_lengths.shape[0]
        group_q = q.new_empty(n_groups, at_most * seqlen_q, heads, head_dim)
        group_table, own_table = block_table.new_empty(n_groups, max_blocks), block_table.new_empty(batch, max_blocks)
        own_lengths = cache_seqlens.new_empty(batch)
        divide_kernel[(batch,)](
            q, block_table, cache_seqlens, common, *groups, group_q, group_table, group_lengths, own_table, own_lengths, *q.stride()[:3],
            block_table.stride(0), max_blocks, seqlen_q, batch, heads, HEAD_DIM=head_dim, PAGE=page, MEMBERS=at_most,
            BLOCK_MEMBERS=next_power_of_2(at_most), BLOCK_D=block_width(head_dim), BLOCK=1024, num_warps=4)
        options = softcap, k_scale, v_scale, torch.float32
        shared = forward.launch_forward(group_q, k, v, group_lengths, group_table, None, None, softmax_scale, -1, -1, *options)
        own = forward.launch_forward(q, k, v, own_lengths, own_table, None, sinks, softmax_scale, -1, window_right, *options)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = torch.empty_like(own[1])
        block_dv = block_width(v.shape[-1])
        join_kernel[(batch * seqlen_q,)](*shared, *own, out, lse, *groups, seqlen_q, heads, VALUE_DIM=v.shape[-1], MEMBERS=at_most,
                                         BLOCK_DV=block_dv, BLOCK_H=max(2048 // block_dv, 1), num_warps=4)
    return out, lse
