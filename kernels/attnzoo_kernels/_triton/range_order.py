"""The order in which programs of a Hopper backward over key ranges take the tiles of keys: those that most queries see come first, so that
no program is left with a long one at the end. The longest tiles are divided in two parts, each of which has half of the query heads. The
order is made in one launch without a wait for the device.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import Launch
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import UNLIMITED, WIDTH, load_range

LANES = tl.constexpr(512)  # tiles of keys that the program looks at at once
OTHERS = tl.constexpr(32)  # tiles with which it compares them at once
DIVIDED = 2  # a tile is divided if its steps are more than this part of what each program has on average
LEAST = tl.constexpr(4)  # steps of a query head that a divided tile has at least


@triton.jit
def _last_beginning(table, count, halvings, ends):
    """`last_beginning` of several ends. halvings: as many as leave nothing of `count` entries."""
    low = ends * 0
    high = low + count
    for _ in range(halvings):
        some = low < high
        middle = (low + high) // 2
        before = tl.load(table + middle.to(tl.int64) * WIDTH, mask=some, other=0) < ends
        low = tl.where(some & before, middle + 1, low)
        high = tl.where(some & (before == 0), middle, high)
    return low - 1


@triton.jit
def _touching(table, entry, keys):
    """`touching` of several tiles."""
    end = tl.load(table + entry.to(tl.int64) * WIDTH + 1, mask=entry >= 0, other=UNLIMITED)
    while tl.min(end - keys, 0) <= 0:
        early = end <= keys
        entry = tl.where(early, tl.load(table + entry.to(tl.int64) * WIDTH + 5, mask=early, other=-1), entry)
        end = tl.load(table + entry.to(tl.int64) * WIDTH + 1, mask=entry >= 0, other=UNLIMITED)
    return entry


@triton.jit
def _steps(table, entry, keys, window, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """How many tiles of ROWS queries see the KEYS keys from `keys` on in an entry's range; 0 without an entry."""
    of = load_range(table, tl.maximum(entry, 0), window, True)
    shift = of.length - of.other_length
    first = tl.maximum(keys - of.first, 0)
    last = tl.minimum(keys + KEYS - of.first, of.length) - 1
    begin = tl.maximum(first - shift - of.right, 0)
    end = tl.minimum(of.other_length, last - shift + of.left + 1)
    steps = (of.other_first + end + ROWS - 1) // ROWS - (of.other_first + begin) // ROWS
    return tl.where((entry >= 0) & (end > begin), steps, 0)


@triton.jit
def _is_divided(steps, longest, PARTS: tl.constexpr):
    return (PARTS == 2) & (steps.to(tl.float32) > longest) & (steps >= LEAST)


@triton.jit
def _weight(steps, divided, PART: tl.constexpr, group):
    """Of an item: the steps of its query heads. Part 0 is a whole tile or the first part of one, with half of the heads or one more. -1:
    there is no such part."""
    if PART == 0:
        weight = steps * tl.where(divided, group - group // 2, group)
    else:
        weight = tl.where(divided, steps * (group // 2), -1)
    return weight


@triton.jit
def _rank(weight, tile, PART: tl.constexpr, found, tiles, group, longest, PARTS: tl.constexpr):
    """How many items come before these: those of more weight, and of the same weight all first parts before all second ones, and those of
    earlier tiles."""
    rank = tile * 0
    for start in range(0, tiles, OTHERS):
        other = start + tl.arange(0, OTHERS)
        steps = tl.load(found + 2 * other + 1, mask=other < tiles, other=0)
        divided = _is_divided(steps, longest, PARTS)
        for part in tl.static_range(PARTS):
            its = tl.where(other < tiles, _weight(steps, divided, part, group), -2)
            before = its[None, :] > weight[:, None]
            same = its[None, :] == weight[:, None]
            if part < PART:
                before = before | same
            elif part == PART:
                before = before | same & (other[None, :] < tile[:, None])
            rank += tl.sum(before.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["count", "halvings", "window_left", "window_right", "tiles", "group", "n_flags"],
            do_not_specialize_on_alignment=["table", "found", "order", "flags"])
def key_tile_order_kernel(table, found, order, flags, count, halvings, window_left, window_right, tiles, group, share, n_flags,
                          PARTS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """For a single program. An item of `order` is a tile of keys or a part of one: the tile's number, or -1 for parts that there are not,
    which come last; the first entry of its walk; the steps of a query head; 0 for a whole tile, else which part it is; how many divided
    tiles lie before it.

    found: (tiles, 2), what the first loop finds: a tile's first entry and its steps. share: a tile with more than this share of all steps
    is divided. flags: set to zero.
    """
    lanes = tl.arange(0, LANES)
    window = Window(tl.where(window_left < 0, UNLIMITED, window_left), window_right, True, True)
    total = 0.0
    for start in range(0, tiles, LANES):
        tile = start + lanes
        keys = tile * KEYS
        entry = _touching(table, _last_beginning(table, count, halvings, keys + KEYS), keys)
        tl.store(found + 2 * tile, entry, mask=tile < tiles)
        steps = lanes * 0
        while tl.max(entry, 0) >= 0:
            steps += _steps(table, entry, keys, window, KEYS, ROWS)
            entry = _touching(table, entry - 1, keys)
        tl.store(found + 2 * tile + 1, steps, mask=tile < tiles)
        total += tl.sum(tl.where(tile < tiles, steps, 0).to(tl.float32), 0)
    for start in range(0, n_flags, LANES):
        tl.store(flags + start + lanes, 0, mask=start + lanes < n_flags)
    tl.debug_barrier()
    n_divided = 0
    for start in range(0, tiles, LANES):
        tile = start + lanes
        inside = tile < tiles
        first = tl.load(found + 2 * tile, mask=inside, other=0)
        steps = tl.load(found + 2 * tile + 1, mask=inside, other=0)
        divided = _is_divided(steps, share * total, PARTS)
        number = n_divided + tl.cumsum(divided.to(tl.int32), 0) - divided.to(tl.int32)
        n_divided += tl.sum(divided.to(tl.int32), 0)
        for part in tl.static_range(PARTS):
            weight = _weight(steps, divided, part, group)
            item = order + _rank(weight, tile, part, found, tiles, group, share * total, PARTS).to(tl.int64) * WIDTH
            tl.store(item, tl.where(weight < 0, -1, tile), mask=inside)
            tl.store(item + 1, first, mask=inside)
            tl.store(item + 2, steps, mask=inside)
            tl.store(item + 3, tl.where(divided, part + 1, 0), mask=inside)
            tl.store(item + 4, number, mask=inside)


@functools.lru_cache(maxsize=1024)
def _order_launch(ranges: int, tiles: int, kv_heads: int, group: int, programs: int, window: tuple[int, int], block: int,
                  rows: int) -> Launch:
    parts = parts_of(group)
    return Launch(key_tile_order_kernel, 1,
                  (ranges, ranges.bit_length(), *window, tiles, group, kv_heads / (DIVIDED * programs), 2 * divided_tiles(group, programs)),
                  {"PARTS": parts, "KEYS": block, "ROWS": rows}, 16, 1)


def parts_of(group: int) -> int:
    """Into how many parts a tile of keys may be divided."""
    return min(group, 2)


def divided_tiles(group: int, programs: int) -> int:
    """How many tiles of all heads may be divided: each has more than its part of what a program has on average."""
    return DIVIDED * programs if parts_of(group) == 2 else 0


def launch_order(table: Tensor, flags: Tensor, keys: int, kv_heads: int, group: int, programs: int, window: tuple[int, int], block: int,
                 rows: int) -> Tensor:
    """int32 (parts * tiles, 8): the items of key_tile_order_kernel. The caller has entered the table's device.

    table: of the ranges by keys. flags: int32 (2 * divided tiles,), which are set to zero. group: query heads of a key head. A tile has
    `block` keys, a step `rows` queries.
    """
    tiles = -(-keys // block)
    order, found = table.new_empty(parts_of(group) * tiles, WIDTH.value), table.new_empty(tiles, 2)
    _order_launch(len(table), tiles, kv_heads, group, programs, window, block, rows)(table, found, order, flags)
    return order
