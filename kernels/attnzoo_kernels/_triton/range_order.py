"""The order in which programs of a Hopper backward over key ranges take the tiles of keys.

The tiles that most queries see come first, so that no program is left with a long one at the end. The longest tiles are divided in two
parts, each with half of the query heads. As few key heads are interleaved as that allows, so that their queries stay in L2. The order is
made in one launch, for which the host does not wait.

A step is a tile of queries that sees a tile of keys. An item of the order is a tile of keys or a part of one; its weight is the number of
its steps over all of its query heads.
"""

import functools
import math

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import Launch
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import UNLIMITED, WIDTH, load_range, queries_seeing_keys
from attnzoo_kernels._triton.search import count_below

LANES = tl.constexpr(512)  # tiles of keys that a program looks at at a time
OWN = tl.constexpr(32)  # tiles whose places in the order a program finds
DIVIDED = 0.75  # a tile is divided if it has more than this share of the steps that a program has on average
LEAST = tl.constexpr(4)  # a divided tile has at least this many steps for each query head


@triton.jit
def _touching(table, entry, keys):
    """`touching` for several tiles of keys at a time."""
    end = tl.load(table + entry.to(tl.int64) * WIDTH + 1, mask=entry >= 0, other=UNLIMITED)
    while tl.min(end - keys, 0) <= 0:
        early = end <= keys
        entry = tl.where(early, tl.load(table + entry.to(tl.int64) * WIDTH + 5, mask=early, other=-1), entry)
        end = tl.load(table + entry.to(tl.int64) * WIDTH + 1, mask=entry >= 0, other=UNLIMITED)
    return entry


@triton.jit
def _steps(table, entry, keys, window, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """How many tiles of ROWS queries see, in an entry's range, the KEYS keys from `keys` on; 0 where entry < 0."""
    r = load_range(table, tl.maximum(entry, 0), window, True)
    begin, end, _, _ = queries_seeing_keys(r, keys, KEYS)
    steps = (r.other_first + end + ROWS - 1) // ROWS - (r.other_first + begin) // ROWS
    return tl.where((entry >= 0) & (end > begin), steps, 0)


@triton.jit
def _is_divided(steps, longest, PARTS: tl.constexpr):
    return (PARTS == 2) & (steps.to(tl.float32) > longest) & (steps >= LEAST)


@triton.jit
def _weight(steps, divided, PART: tl.constexpr, group):
    """An item's weight, the steps of its query heads; -1 if there is no such item. PART 0 is a whole tile, or the first part of a divided
    one, which has half of the heads, rounded up. PART 1 is the second part."""
    if PART == 0:
        weight = steps * tl.where(divided, group - group // 2, group)
    else:
        weight = tl.where(divided, steps * (group // 2), -1)
    return weight


@triton.jit
def _before(other_weight, weight, other_tile, tile, OTHER_PART: tl.constexpr, PART: tl.constexpr):
    """How many of the other items come before each item: those with more weight, and of the same weight first parts before second ones and
    lower tiles before higher ones."""
    before = other_weight[None, :] > weight[:, None]
    same = other_weight[None, :] == weight[:, None]
    if OTHER_PART < PART:
        before = before | same
    elif OTHER_PART == PART:
        before = before | same & (other_tile[None, :] < tile[:, None])
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def _find_all(table, found, count, halvings, window, tiles, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Stores, for each tile of keys, the entry where its walk over the ranges begins, and its steps for one query head. Returns the sum of
    all steps."""
    total = 0.0
    for start in range(0, tiles, LANES):
        tile = start + tl.arange(0, LANES)
        keys = tile * KEYS
        entry = _touching(table, count_below(table, keys + KEYS, count, halvings, STRIDE=WIDTH) - 1, keys)
        tl.store(found + 2 * tile, entry, mask=tile < tiles)
        steps = tile * 0
        while tl.max(entry, 0) >= 0:
            steps += _steps(table, entry, keys, window, KEYS, ROWS)
            entry = _touching(table, entry - 1, keys)
        tl.store(found + 2 * tile + 1, steps, mask=tile < tiles)
        total += tl.sum(tl.where(tile < tiles, steps, 0).to(tl.float32), 0)
    return total


@triton.jit
def _store_items(order, rank, tile, entry, steps, divided, number, weight, PART: tl.constexpr, inside):
    """Stores the items of this PART at their ranks; number: how many divided tiles have lower numbers."""
    item = order + rank.to(tl.int64) * WIDTH
    tl.store(item, tile, mask=inside & (weight >= 0))
    tl.store(item + 1, entry, mask=inside & (weight >= 0))
    tl.store(item + 2, steps, mask=inside & (weight >= 0))
    tl.store(item + 3, tl.where(divided, PART + 1, 0), mask=inside & (weight >= 0))
    tl.store(item + 4, number, mask=inside & (weight >= 0))


@triton.jit(do_not_specialize=["count", "halvings", "window_left", "window_right", "tiles", "kv_heads", "group", "most_groups", "n_flags"],
            do_not_specialize_on_alignment=["table", "found", "order", "flags"])
def key_tile_order_kernel(table, found, order, flags, count, halvings, window_left, window_right, tiles, kv_heads, group, per_program,
                          divided_from, most_groups, n_flags, PARTS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Stores `order`, in which each program finds the places of OWN tiles.

    The words of an item are: the tile's number; the entry where its walk begins; its steps for one query head; 0 for a whole tile, else
    which part it is (1 or 2); how many divided tiles have lower numbers. `order` has room for PARTS items of each tile. The row behind them
    holds the number of items, and how many key heads are interleaved.

    found: (tiles, 2), for _find_all; all programs write the same. per_program: what share of one head's steps a program has on average,
    over all heads. divided_from: DIVIDED. most_groups: into how many groups the key heads may be divided at most. flags: set to zero.
    """
    window = Window(tl.where(window_left < 0, UNLIMITED, window_left), window_right, True, True)
    average = per_program * _find_all(table, found, count, halvings, window, tiles, KEYS, ROWS)
    lanes = tl.arange(0, LANES)
    for start in range(tl.program_id(0) * LANES, n_flags, tl.num_programs(0) * LANES):
        tl.store(flags + start + lanes, 0, mask=start + lanes < n_flags)
    tl.debug_barrier()
    tile = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = tile < tiles
    entry = tl.load(found + 2 * tile, mask=inside, other=0)
    steps = tl.load(found + 2 * tile + 1, mask=inside, other=0)
    divided = _is_divided(steps, divided_from * average, PARTS)
    first, second = _weight(steps, divided, 0, group), _weight(steps, divided, 1, group)
    rank, second_rank, number = tile * 0, tile * 0, tile * 0
    longest, n_divided = 0, 0
    for start in range(0, tiles, LANES):
        other = start + lanes
        other_steps = tl.load(found + 2 * other + 1, mask=other < tiles, other=0)
        other_divided = _is_divided(other_steps, divided_from * average, PARTS)
        n_divided += tl.sum(other_divided.to(tl.int32), 0)
        number += tl.sum((other_divided[None, :] & (other[None, :] < tile[:, None])).to(tl.int32), 1)
        other_first = tl.where(other < tiles, _weight(other_steps, other_divided, 0, group), -2)
        longest = tl.maximum(longest, tl.max(other_first, 0))
        rank += _before(other_first, first, other, tile, 0, 0)
        if PARTS == 2:
            other_second = tl.where(other < tiles, _weight(other_steps, other_divided, 1, group), -2)
            rank += _before(other_second, first, other, tile, 1, 0)
            second_rank += _before(other_first, second, other, tile, 0, 1) + _before(other_second, second, other, tile, 1, 1)
    _store_items(order, rank, tile, entry, steps, divided, number, first, 0, inside)
    if PARTS == 2:
        _store_items(order, second_rank, tile, entry, steps, divided, number, second, 1, inside)
    if tl.program_id(0) == 0:
        # so many heads are interleaved that the longest item is at most a program's average share of their steps
        groups = tl.minimum(average * group / tl.maximum(longest, 1), most_groups.to(tl.float32)).to(tl.int32)
        last = order + (PARTS * tiles).to(tl.int64) * WIDTH
        tl.store(last, tiles + n_divided)
        tl.store(last + 1, tl.cdiv(kv_heads, tl.maximum(groups, 1)))


@functools.lru_cache(maxsize=1024)
def _order_launch(ranges: int, tiles: int, kv_heads: int, group: int, most_groups: int, programs: int, window: tuple[int, int], block: int,
                  rows: int) -> Launch:
    return Launch(key_tile_order_kernel, max(1, -(-tiles // OWN.value)),
                  (ranges, ranges.bit_length(), *window, tiles, kv_heads, group, kv_heads / programs, DIVIDED, most_groups,
                   2 * divided_tiles(group, programs)),
                  {"PARTS": parts_of(group), "KEYS": block, "ROWS": rows}, 16, 1)


def parts_of(group: int) -> int:
    """Into how many parts a tile of keys may be divided."""
    return min(group, 2)


def divided_tiles(group: int, programs: int) -> int:
    """How many tiles of all heads can be divided at most, because each has at least DIVIDED of a program's average share of steps."""
    return math.ceil(programs / DIVIDED) if parts_of(group) == 2 else 0


def launch_order(table: Tensor, flags: Tensor, keys: int, kv_heads: int, group: int, most_groups: int, programs: int,
                 window: tuple[int, int], block: int, rows: int) -> Tensor:
    """int32 (parts * tiles + 1, 8): the items of key_tile_order_kernel. The caller has entered the table's device.

    table: of the ranges by keys. flags: int32 (2 * divided tiles,), which are set to zero. group: query heads of a key head. A tile has
    `block` keys, a step `rows` queries.
    """
    tiles = -(-keys // block)
    order, found = table.new_empty(parts_of(group) * tiles + 1, WIDTH.value), table.new_empty(tiles, 2)
    _order_launch(len(table), tiles, kv_heads, group, most_groups, programs, window, block, rows)(table, found, order, flags)
    return order
