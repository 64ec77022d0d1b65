"""The forward of chosen blocks in 16 bits, slab by slab: parts stay in L2 between the program that writes them and the one that merges
them.

A slab is the queries of one key head that a program orders by block: SLAB tokens, with all heads that read this key head. Its pairs are
numbered by token, chooser and slot; a query's own block is its last slot. An item of work goes over at most CHUNK query rows of one block
and writes a part of the output and its LSE for each, in the order of blocks. When all items of a slab are done, other items merge its rows.
Parts lie in a ring of RING slabs.

Programs take items by a ticket, in this order: the blocks of slab 0, .., of slab LAG, rows of slab 0, the blocks of slab LAG + 1, rows of
slab 1, and so on. An item waits only for items of smaller tickets, which belong to programs that run, so that it never waits for ever.
Which program takes an item, and the order of a block's rows, have no effect on a result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.forward import normalised
from attnzoo_kernels._triton.launch import architecture, block_width, multiprocessors, on_device_of, value_block
from attnzoo_kernels._triton.softmax import LN2, in_units, softmax_step
from attnzoo_kernels._triton.tiles import Operand, head_rows, load_rows
from attnzoo_kernels.routed.parts import gather_tile, store_tile

NUMBERS = ["total_q", "slabs", "units", "capacity", "pairs"]
ENABLED = True  # whether the forward takes these kernels and not those of walk.py, while that is undecided
ITEM = tl.constexpr(8)  # integers of an item, of which six are used: see routed_slab_order_kernel


@dataclass(frozen=True)
class Tile:
    slab_rows: int  # of a slab
    block_m: int  # query rows of a step
    steps: int  # of an item at most
    merge_rows: int  # rows that an item merges
    at_once: int  # of which it merges so many at once
    slots_at_once: int
    lag: int
    ring: int
    programs: int  # of a multiprocessor
    num_warps: int = 4
    registers: int = 0
    order_block: int = 1024
    gluon: bool = False


def forward_tile(arch: int) -> Tile:
    if arch == 0:
        return Tile(32, 16, 2, 8, 4, 2, 1, 3, 1, order_block=64)
    return Tile(2048, 64, 4, 16, 8, 4, 1, 3, 4, registers=168)


@triton.jit
def _pairs_of_slab(chosen_ptr, first_ptr, sequence_ptr, own_ptr, at, token, key_head, total_q, pairs, SLOTS: tl.constexpr,
                   GROUP: tl.constexpr, CHOOSERS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the pairs at .. at + BLOCK of the slab that begins with `token`: their bins, which of them stand for a block, which of those are
    own ones, and their queries. A block has a bin for those that chose it and behind it one for those whose own block it is."""
    pair = (at + tl.arange(0, BLOCK)).to(tl.uint32)
    slot = pair % (SLOTS + 1)
    chooser = pair // (SLOTS + 1) % GROUP
    query = token + (pair // ((SLOTS + 1) * GROUP)).to(tl.int32)
    inside = (pair < pairs) & (query < total_q)
    own = tl.load(own_ptr + query, mask=inside, other=-1)
    first = tl.load(first_ptr + tl.load(sequence_ptr + query, mask=inside, other=0), mask=inside, other=0)
    source = (query.to(tl.int64) * CHOOSERS + key_head * GROUP + chooser) * SLOTS + slot
    chosen = tl.load(chosen_ptr + source, mask=inside & (slot < SLOTS), other=-1)
    is_own = inside & (slot == SLOTS) & (own >= 0)
    valid = is_own | (inside & (slot < SLOTS) & (chosen >= 0) & (chosen < own))
    bin = 2 * (first + tl.where(is_own, own, chosen)) + is_own.to(tl.int32)
    return bin, valid, is_own, query, chooser.to(tl.int32)


@triton.jit
def _own_queries(bounds_q, bounds_k, block, token, mask):
    """Of blocks: the first key, the number of keys, the query from `token` on that is the first to have it as own block, and how many of
    the block's keys that query sees."""
    key = tl.load(bounds_k + block, mask=mask, other=0)
    keys = tl.load(bounds_k + block + 1, mask=mask, other=0) - key
    last = tl.load(bounds_q + block + 1, mask=mask, other=0) - 1  # sees the whole block
    query = tl.maximum(tl.maximum(tl.load(bounds_q + block, mask=mask, other=0), token), last - keys + 1)
    return key, keys, query, keys - (last - query)


@triton.jit(do_not_specialize=[*NUMBERS, "bins"], do_not_specialize_on_alignment=["chosen_ptr", "first_ptr", "sequence_ptr", "own_ptr",
                                                                                  "bounds_q", "bounds_k"])
def routed_slab_order_kernel(chosen_ptr, first_ptr, sequence_ptr, own_ptr, bounds_q, bounds_k, bins_ptr, pair_ptr, place_ptr, item_ptr,
                             items_ptr, total_q, slabs, units, capacity, pairs, bins, SLAB: tl.constexpr, SLOTS: tl.constexpr,
                             GROUP: tl.constexpr, CHOOSERS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The chooser, among those of its slab, of each pair in the order of blocks; each pair's place in that order, -1 for one that stands
    for no block; the slab's items, and their number. bins_ptr: (programs, bins), zeros, and zeros again in the end."""
    bins_ptr += tl.program_id(0).to(tl.int64) * bins
    lane = tl.arange(0, BLOCK)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        key_head = unit // slabs
        token = unit % slabs * SLAB
        low = 2 * tl.load(first_ptr + tl.load(sequence_ptr + token))
        high = low
        for at in range(0, pairs, BLOCK):
            bin, valid, _, _, _ = _pairs_of_slab(chosen_ptr, first_ptr, sequence_ptr, own_ptr, at, token, key_head, total_q, pairs, SLOTS,
                                                 GROUP, CHOOSERS, BLOCK)
            tl.atomic_add(bins_ptr + bin, 1, mask=valid, sem="relaxed")
            high = tl.maximum(high, tl.max(tl.where(valid, bin + 1, 0), 0))
        tl.debug_barrier()
        before, items = 0, 0
        first_item = item_ptr + tl.cast(unit, tl.int64) * capacity * ITEM
        for at in range(low, high, BLOCK):
            bin = at + lane
            found = tl.load(bins_ptr + bin, mask=bin < high, other=0, cache_modifier=".cg")
            place = before + tl.cumsum(found, 0) - found
            tl.store(bins_ptr + bin, place, mask=bin < high)
            needed = (found * ROWS + CHUNK - 1) // CHUNK
            item = first_item + (items + tl.cumsum(needed, 0) - needed) * ITEM
            key, keys, _, seen = _own_queries(bounds_q, bounds_k, bin // 2, token, found > 0)
            for n in range(tl.max(needed, 0)):
                target = item + n * ITEM
                tl.store(target, key, mask=n < needed)
                tl.store(target + 1, keys, mask=n < needed)
                tl.store(target + 2, place * ROWS + n * CHUNK, mask=n < needed)
                tl.store(target + 3, tl.minimum(found * ROWS - n * CHUNK, CHUNK), mask=n < needed)
                tl.store(target + 4, tl.where(bin % 2 == 1, seen, keys), mask=n < needed)
                tl.store(target + 5, bin * 0 + n * CHUNK, mask=n < needed)
            before += tl.sum(found, 0)
            items += tl.sum(needed, 0)
        tl.store(items_ptr + unit, items)
        tl.debug_barrier()
        for at in range(0, pairs, BLOCK):
            bin, valid, is_own, query, chooser = _pairs_of_slab(chosen_ptr, first_ptr, sequence_ptr, own_ptr, at, token, key_head, total_q,
                                                                pairs, SLOTS, GROUP, CHOOSERS, BLOCK)
            place = tl.atomic_add(bins_ptr + bin, 1, mask=valid & ~is_own, sem="relaxed")
            _, _, first_query, _ = _own_queries(bounds_q, bounds_k, bin // 2, token, is_own)
            own_place = tl.load(bins_ptr + bin, mask=is_own, other=0, cache_modifier=".cg") + (query - first_query) * GROUP + chooser
            place = tl.where(valid, tl.where(is_own, own_place, place), -1)
            base = tl.cast(unit, tl.int64) * pairs
            tl.store(pair_ptr + base + place, (at + lane) // (SLOTS + 1), mask=valid)
            tl.store(place_ptr + base + at + lane, place, mask=at + lane < pairs)
        tl.debug_barrier()
        for at in range(low, high, BLOCK):
            tl.store(bins_ptr + at + lane, 0, mask=at + lane < high)
        tl.debug_barrier()


@triton.jit
def _wait_for(ptr, number):
    """Until a counter has reached `number`. What was written before it was raised is seen from here on."""
    while tl.atomic_add(ptr, 0, sem="acquire") < number:
        pass


@triton.jit
def _signal(ptr):
    """Raises a counter after all that this program wrote."""
    tl.debug_barrier()
    tl.atomic_add(ptr, 1, sem="release")


@triton.jit
def _slab_rows(row, unit, slabs, SLAB: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Token and head of rows of a slab, which count the heads of all its tokens."""
    row = row.to(tl.uint32)
    token = (row // (ROWS * GROUP)).to(tl.int32) + unit % slabs * SLAB
    head = (row % (ROWS * GROUP)).to(tl.int32) + unit // slabs * (ROWS * GROUP)
    return token, head


@triton.jit
def _pairs_of_rows(pair_ptr, row, end, ROWS: tl.constexpr):
    """The slab's rows, as _slab_rows has them, of rows in the order of blocks."""
    row = row.to(tl.uint32)
    return tl.load(pair_ptr + row // ROWS, mask=row < end, other=0).to(tl.uint32) * ROWS + row % ROWS


@triton.jit
def _walk(q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, pair_ptr, item_ptr, part_ptr, part_lse_ptr, merged_ptr, unit, slabs,
          softmax_scale, merges, SLAB: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
          VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
          RING: tl.constexpr, PHASE: tl.constexpr):
    """An item's parts."""
    key, keys, first, rows = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    seen_by_first, before = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    lane = tl.arange(0, BLOCK_M)
    own_row = _pairs_of_rows(pair_ptr, first + lane, first + rows, ROWS)
    # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
    head = unit // slabs
    k = load_rows(head_rows(Operand(k_ptr, 0, k_strides[0], k_strides[1]), 0, head, key, keys, False), 0, HEAD_DIM, BLOCK_N, BLOCK_D, True,
                  False)
    v = load_rows(head_rows(Operand(v_ptr, 0, v_strides[0], v_strides[1]), 0, head, key, keys, False), 0, VALUE_DIM, BLOCK_N, BLOCK_DV,
                  True, False)
    column = tl.arange(0, BLOCK_N)
    if PHASE == 0:
        if unit >= RING:
            while tl.load(merged_ptr + unit - RING, volatile=True) < merges:
                pass
    part_ptr += first * VALUE_DIM
    part_lse_ptr += first
    for at in range(0, rows, BLOCK_M):
        row = at + lane
        token, query_head = _slab_rows(own_row, unit, slabs, SLAB, ROWS, GROUP)
        # [BLOCK_M, BLOCK_D]
        q = gather_tile(q_ptr, *q_strides, token, query_head, row < rows, HEAD_DIM, BLOCK_D)
        own_row = _pairs_of_rows(pair_ptr, first + row + BLOCK_M, first + rows, ROWS)
        # [BLOCK_M, BLOCK_N]. Keys that a query of the block itself does not see yet, and those beyond the block's end
        seen = tl.minimum(keys, seen_by_first + ((before + row).to(tl.uint32) // (ROWS * GROUP)).to(tl.int32))
        scores = tl.where(column[None, :] < seen[:, None], tl.dot(q, tl.trans(k)), -float("inf"))
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        weights, row_max, row_sum, _ = softmax_step(scores, row_max, tl.zeros([BLOCK_M], tl.float32), in_units(softmax_scale, False), True,
                                                    False)
        # [BLOCK_M, BLOCK_DV]
        out = normalised(tl.dot(weights.to(v.dtype), v), row_sum, 1.0, "tf32")
        store_tile(part_ptr, row, row < rows, out, VALUE_DIM, BLOCK_DV)
        tl.store(part_lse_ptr + row, row_max + tl.log2(row_sum), mask=row < rows)


@triton.jit
def _slots_of_rows(place_ptr, part_lse_ptr, row, slot, inside, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Part rows of slots [slots, 1] of a slab's rows [1, rows], which of them there are, and their LSE in units of log2."""
    place = tl.load(place_ptr + row // ROWS * (SLOTS + 1) + slot, mask=inside & (slot <= SLOTS), other=-1)
    part = place * ROWS + row % ROWS
    return part, place >= 0, tl.load(part_lse_ptr + part, mask=place >= 0, other=-float("inf"), cache_modifier=".cg")


@triton.jit
def _merge(place_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, stats_ptr, unit, slabs, first, total_q, HEADS: tl.constexpr,
           SLAB: tl.constexpr, SLOTS: tl.constexpr, ALL_SLOTS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
           VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr, SLOTS_AT_ONCE: tl.constexpr):
    """Output, LSE and statistics of MERGE_ROWS rows of a slab."""
    column = tl.arange(0, BLOCK_DV)
    for at in range(0, MERGE_ROWS, AT_ONCE):
        row = first + at + tl.arange(0, AT_ONCE)
        token, head = _slab_rows(row, unit, slabs, SLAB, ROWS, GROUP)
        inside = (row < SLAB * GROUP * ROWS) & (token < total_q)
        all_slots = tl.arange(0, ALL_SLOTS)[:, None]
        _, _, lses = _slots_of_rows(place_ptr, part_lse_ptr, row[None, :], all_slots, inside[None, :], ROWS, SLOTS)
        base = tl.max(lses, 0)
        finite = tl.where(base == -float("inf"), 0.0, base)
        total = tl.sum(tl.exp2(lses - finite[None, :]), 0)
        acc = tl.zeros([AT_ONCE, BLOCK_DV], tl.float32)
        for slots in range(0, SLOTS + 1, SLOTS_AT_ONCE):
            slot = slots + tl.arange(0, SLOTS_AT_ONCE)[:, None]
            part, there, lse = _slots_of_rows(place_ptr, part_lse_ptr, row[None, :], slot, inside[None, :], ROWS, SLOTS)
            # [SLOTS_AT_ONCE, AT_ONCE, BLOCK_DV]
            parts = tl.load(part_ptr + part[:, :, None] * VALUE_DIM + column[None, None, :],
                            mask=there[:, :, None] & (column < VALUE_DIM)[None, None, :], other=0.0, cache_modifier=".cg")
            acc += tl.sum(tl.exp2(lse - finite[None, :])[:, :, None] * parts.to(tl.float32), 0)
        empty = base == -float("inf")
        total = tl.where(empty, 1.0, total)
        store_tile(out_ptr, token.to(tl.int64) * HEADS + head, inside, acc / total[:, None], VALUE_DIM, BLOCK_DV)
        lse_at = head.to(tl.int64) * total_q + token
        sum_log2 = tl.log2(total)
        tl.store(lse_ptr + lse_at, tl.where(empty, -float("inf"), (base + sum_log2) * LN2), mask=inside)
        # as softmax_stats
        tl.store(stats_ptr + lse_at, tl.where(empty, float("inf"), base), mask=inside)
        tl.store(stats_ptr + total_q.to(tl.int64) * HEADS + lse_at, sum_log2, mask=inside)


@triton.jit
def _work_of(items_ptr, group, units, merges, LAG: tl.constexpr, PHASE: tl.constexpr):
    """How many items a group has that go over blocks, and how many in all."""
    walks = tl.load(items_ptr + group, mask=group < units, other=0)
    if PHASE == 2:
        walks = 0
    merging = merges
    if PHASE == 1:
        merging = 0
    return walks, walks + tl.where((group >= LAG) & (group - LAG < units), merging, 0)


@triton.jit(do_not_specialize=[*NUMBERS, "RING"])
def routed_slab_fwd_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stats_ptr, pair_ptr, place_ptr, item_ptr, items_ptr, ticket_ptr,
                           walked_ptr, merged_ptr, part_ptr, part_lse_ptr, q_strides, k_strides, v_strides, softmax_scale, total_q, slabs,
                           units, capacity, pairs, RING, HEADS: tl.constexpr, SLAB: tl.constexpr, SLOTS: tl.constexpr,
                           ALL_SLOTS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                           VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
                           BLOCK_M: tl.constexpr, MERGE_ROWS: tl.constexpr, AT_ONCE: tl.constexpr, SLOTS_AT_ONCE: tl.constexpr,
                           LAG: tl.constexpr, PHASE: tl.constexpr):
    merges = tl.cdiv(SLAB * GROUP * ROWS, MERGE_ROWS)
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    group, start = 0, 0
    walks, work = _work_of(items_ptr, 0, units, merges, LAG, PHASE)
    while group < units + LAG:
        if ticket >= start + work:
            start += work
            group += 1
            walks, work = _work_of(items_ptr, group, units, merges, LAG, PHASE)
        else:
            index = ticket - start
            ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
            unit = group
            if index >= walks:
                unit = group - LAG
            place = tl.cast(unit, tl.int64) * pairs
            part_row = tl.cast(unit % RING, tl.int64) * pairs * ROWS
            parts, part_lses = part_ptr + part_row * VALUE_DIM, part_lse_ptr + part_row
            if index < walks:
                item = item_ptr + (tl.cast(unit, tl.int64) * capacity + index) * ITEM
                _walk(q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, pair_ptr + place, item, parts, part_lses, merged_ptr, unit,
                      slabs, softmax_scale, merges, SLAB, SLOTS, ROWS, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_M,
                      RING, PHASE)
                if PHASE == 0:
                    _signal(walked_ptr + unit)
            else:
                if PHASE == 0:
                    _wait_for(walked_ptr + unit, tl.load(items_ptr + unit))
                _merge(place_ptr + place, parts, part_lses, out_ptr, lse_ptr, stats_ptr, unit, slabs, (index - walks) * MERGE_ROWS, total_q,
                       HEADS, SLAB, SLOTS, ALL_SLOTS, ROWS, GROUP, VALUE_DIM, BLOCK_DV, MERGE_ROWS, AT_ONCE, SLOTS_AT_ONCE)
                if PHASE == 0:
                    _signal(merged_ptr + unit)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, first: Tensor, bounds_q: Tensor, bounds_k: Tensor, sequence: Tensor,
                   own: Tensor, block_size: int, softmax_scale: float, tile: Tile | None = None,
                   phases: tuple[int, ...] = (0,)) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics, as flash's forward gives them, of the chosen blocks (total_q, choosers, slots) and of each query's own
    one. The other tensors are those of Blocks."""
    tile = tile or forward_tile(architecture(q))
    chosen = chosen.contiguous()
    (total_q, heads, head_dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[-1]
    choosers, slots = chosen.shape[1:]
    rows, group, bins = heads // choosers, choosers // kv_heads, 2 * (bounds_k.shape[0] - 1)
    slab = 1 << max((tile.slab_rows // (rows * group)).bit_length() - 1, 0)
    slabs, chunk = triton.cdiv(total_q, slab), tile.block_m * tile.steps
    units, pairs = slabs * kv_heads, slab * group * (slots + 1)
    capacity = pairs * rows // chunk + min(pairs, bins)
    programs, order_programs = multiprocessors(q.device) * tile.programs, min(units, 4 * multiprocessors(q.device))
    ring = tile.ring or units

    def integers(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=q.device)

    zeros = torch.zeros(len(phases) + 2 * units + order_programs * bins, dtype=torch.int32, device=q.device)
    tickets, walked, merged, bins_of = zeros.split((len(phases), units, units, order_programs * bins))
    pair, place, item, items = integers(units * pairs), integers(units * pairs), integers(units * capacity * ITEM.value), integers(units)
    out, stats = q.new_empty(total_q, heads, value_dim), torch.empty(2, heads, total_q, dtype=torch.float32, device=q.device)
    lse, part_lse = torch.empty_like(stats[0]), stats.new_empty(ring * pairs * rows)
    part = q.new_empty(ring * pairs * rows, value_dim)
    shared = {"SLAB": slab, "SLOTS": slots, "GROUP": group, "ROWS": rows}
    with on_device_of(q):
        routed_slab_order_kernel[(order_programs,)](
            chosen, first, sequence, own, bounds_q, bounds_k, bins_of, pair, place, item, items, total_q, slabs, units, capacity, pairs,
            bins, **shared, CHOOSERS=choosers, CHUNK=chunk, BLOCK=tile.order_block, num_warps=8)
        kernel = routed_slab_fwd_kernel
        if tile.gluon:
            from attnzoo_kernels.routed.slabs_hopper import routed_slab_hopper_kernel as kernel
        for n, phase in enumerate(phases):
            kernel[(programs,)](
                q, k, v, out, lse, stats, pair, place, item, items, tickets[n:], walked, merged, part, part_lse,
                *(x.stride()[:2] for x in (q, k, v)), softmax_scale, total_q, slabs, units, capacity, pairs, ring, **shared, HEADS=heads,
                ALL_SLOTS=triton.next_power_of_2(slots + 1), HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_width(head_dim),
                BLOCK_DV=value_block(head_dim, value_dim), BLOCK_N=block_width(block_size), BLOCK_M=tile.block_m,
                MERGE_ROWS=tile.merge_rows, AT_ONCE=tile.at_once, SLOTS_AT_ONCE=tile.slots_at_once, LAG=tile.lag, PHASE=phase,
                num_warps=tile.num_warps, num_stages=1, maxnreg=tile.registers or None)
    return out, lse, stats
