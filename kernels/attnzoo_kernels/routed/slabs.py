"""The forward of chosen blocks in 16 bits on Hopper, slab by slab: the order of pairs and the launch. The kernel is in slabs_hopper.py.

A slab is the queries of one key head that a program orders by block: SLAB tokens, with all heads that read this key head. Its pairs are
numbered by token, chooser and slot; a query's own block is its last slot. An item of work goes over at most CHUNK query rows of one block
and writes a part of the output and its LSE for each, in the order of blocks. When all items of a slab are done, other items merge its rows.
Parts lie in a ring of RING slabs.

Programs take items by a ticket. The blocks of slab n and the rows of slab n - LAG are mixed evenly. An item waits only for items of smaller
tickets, which belong to programs that run, so that it never waits for ever; RING is larger than LAG. Which program takes an item, and the
order of a block's rows, have no effect on a result.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, multiprocessors, on_device_of

NUMBERS = ["total_q", "slabs", "units", "capacity", "pairs"]
ENABLED = True  # whether the forward takes these kernels and not those of walk.py, while that is undecided
ITEM = tl.constexpr(8)  # integers of an item, of which six are used: see routed_slab_order_kernel


@dataclass(frozen=True)
class Tile:
    programs: int  # of a multiprocessor
    registers: int  # of a thread; 0: as many as it takes
    slab_rows: int = 8192  # query rows of a slab at most
    slab_pairs: int = 16384  # which one program puts into order
    block_m: int = 64  # query rows of a step
    steps: int = 8  # of an item at most
    merge_rows: int = 32  # rows that an item merges
    slots_at_once: int = 20
    lag: int = 2
    ring: int = 4  # 0: as many as there are slabs
    order_block: int = 2048


def forward_tile(block_size: int) -> Tile:
    return Tile(3, 168) if block_size <= 64 else Tile(2, 0)


def takes(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> bool:
    """Whether the kernel takes a call."""
    if not (ENABLED and q.is_cuda):
        return False
    from attnzoo_kernels._gluon.hopper import why_not_tma

    return block_size <= 128 and v.shape[-1] in (64, 128) and q.shape[-1] in (v.shape[-1], 128) and why_not_tma(q, k, v) is None


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


class Order(NamedTuple):
    """What routed_slab_order_kernel writes of `units` slabs, `slabs` for each key head, of `slab` tokens and `pairs` pairs."""

    slab: int
    slabs: int
    units: int
    pairs: int
    capacity: int  # of items
    rows: int  # query heads that choose together
    group: int  # choosers of a key head
    pair: Tensor
    place: Tensor
    item: Tensor
    items: Tensor


def launch_order(chosen: Tensor, first: Tensor, bounds_q: Tensor, bounds_k: Tensor, sequence: Tensor, own: Tensor, heads: int,
                 kv_heads: int, tile: Tile) -> Order:
    chosen = chosen.contiguous()
    total_q, choosers, slots = chosen.shape
    rows, group, bins = heads // choosers, choosers // kv_heads, 2 * (bounds_k.shape[0] - 1)
    most = min(tile.slab_rows // (rows * group), tile.slab_pairs // (group * (slots + 1)))
    slab = 1 << max(most.bit_length() - 1, 0)
    slabs, chunk = triton.cdiv(total_q, slab), tile.block_m * tile.steps
    units, pairs = slabs * kv_heads, slab * group * (slots + 1)
    capacity = pairs * rows // chunk + min(pairs, bins)
    programs = min(units, 4 * multiprocessors(chosen.device))
    bins_of = torch.zeros(programs * bins, dtype=torch.int32, device=chosen.device)
    pair, place, item, items = (torch.empty(n, dtype=torch.int32, device=chosen.device)
                                for n in (units * pairs, units * pairs, units * capacity * ITEM.value, units))
    with on_device_of(chosen):
        routed_slab_order_kernel[(programs,)](
            chosen, first, sequence, own, bounds_q, bounds_k, bins_of, pair, place, item, items, total_q, slabs, units, capacity, pairs,
            bins, SLAB=slab, SLOTS=slots, GROUP=group, CHOOSERS=choosers, ROWS=rows, CHUNK=chunk, BLOCK=tile.order_block,
            num_warps=max(tile.order_block // 128, 1))
    return Order(slab, slabs, units, pairs, capacity, rows, group, pair, place, item, items)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, first: Tensor, bounds_q: Tensor, bounds_k: Tensor, sequence: Tensor,
                   own: Tensor, block_size: int, softmax_scale: float, tile: Tile | None = None,
                   phases: tuple[int, ...] = (0,)) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics, as flash's forward gives them, of the chosen blocks (total_q, choosers, slots) and of each query's own
    one. The other tensors are those of Blocks."""
    from attnzoo_kernels.routed.slabs_hopper import routed_slab_hopper_kernel

    tile = tile or forward_tile(block_size)
    (total_q, heads, head_dim), value_dim, slots = q.shape, v.shape[-1], chosen.shape[-1]
    order = launch_order(chosen, first, bounds_q, bounds_k, sequence, own, heads, k.shape[1], tile)
    units, ring = order.units, min(tile.ring or order.units, order.units)
    part_rows = ring * order.pairs * order.rows
    zeros = torch.zeros(len(phases) + 2 * units, dtype=torch.int32, device=q.device)
    tickets, walked, merged = zeros.split((len(phases), units, units))
    out, stats = q.new_empty(total_q, heads, value_dim), torch.empty(2, heads, total_q, dtype=torch.float32, device=q.device)
    lse, part_lse, part = torch.empty_like(stats[0]), stats.new_empty(part_rows), q.new_empty(part_rows, value_dim)
    at_once = triton.cdiv(slots + 1, triton.cdiv(slots + 1, tile.slots_at_once))
    with on_device_of(q):
        for n, phase in enumerate(phases):
            routed_slab_hopper_kernel[(multiprocessors(q.device) * tile.programs,)](
                q, k, v, out, lse, stats, order.pair, order.place, order.item, order.items, tickets[n:], walked, merged, part, part_lse,
                *(x.stride()[:2] for x in (q, k, v)), softmax_scale, total_q, order.slabs, units, order.capacity, order.pairs, ring,
                SLAB=order.slab, SLOTS=slots, GROUP=order.group, ROWS=order.rows, HEADS=heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
                BLOCK_N=block_width(block_size), BLOCK_M=tile.block_m, MERGE_ROWS=tile.merge_rows, SLOTS_AT_ONCE=at_once, LAG=tile.lag,
                PHASE=phase, num_warps=4, maxnreg=tile.registers or None)
    return out, lse, stats
