"""How a tile goes over the key ranges that touch it.

It reads one of the two tables of `range_tables`. By a binary search it finds the last range that begins before the tile's end, and from
there it goes backwards; `touching` skips the ranges that end before the tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels import ranges
from attnzoo_kernels._triton.mainloop import RowStats
from attnzoo_kernels._triton.masks import key_ranges, query_ranges

CAUSAL_TOP_LEFT = tl.constexpr(ranges.CAUSAL_TOP_LEFT)
WIDTH = tl.constexpr(ranges.WIDTH)
UNLIMITED = tl.constexpr(2**30)


class Range(NamedTuple):
    """One range as seen from a tile of its queries, or of its keys, which are then its own side (see Place)."""

    first: Any
    length: Any
    other_first: Any
    other_length: Any
    left: Any  # the window around the range's bottom-right diagonal
    right: Any


@triton.jit
def last_beginning(table, count, end):
    """The last of `count` entries that begins before `end`, or -1."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        before = tl.load(table + middle.to(tl.int64) * WIDTH) < end
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit
def touching(table, entry, row):
    """`entry`, or the nearest one before it whose range ends after `row`; below 0 if there is none. Word 5 of an entry is its link, see
    `range_tables`."""
    at = table + entry.to(tl.int64) * WIDTH
    end = tl.load(at + 1, mask=entry >= 0, other=UNLIMITED)
    while end <= row:
        entry = tl.load(at + 5)
        at = table + entry.to(tl.int64) * WIDTH
        end = tl.load(at + 1, mask=entry >= 0, other=UNLIMITED)
    return entry


@triton.jit
def load_range(table, entry, window, TRANSPOSED: tl.constexpr):
    """The Range of an entry. TRANSPOSED: the table is by keys."""
    at = table + entry.to(tl.int64) * WIDTH
    first = tl.load(at)
    other_first = tl.load(at + 2)
    length = tl.load(at + 1) - first
    other_length = tl.load(at + 3) - other_first
    kind = tl.load(at + 4)
    # the window counts from the bottom-right diagonal; for the top-left one it is shifted by the distance of the two
    back = other_length - length if TRANSPOSED else length - other_length
    back = tl.where(kind == CAUSAL_TOP_LEFT, back, 0)
    right = tl.where(kind != 0, 0, tl.where(window.right < 0, UNLIMITED, window.right))
    return Range(first, length, other_first, other_length, window.left - back, right + back)


@triton.jit
def queries_seeing_keys(r, key, KEYS: tl.constexpr):
    """(begin, end, first, last), of the queries of a Range by keys. The queries begin .. end see some of the KEYS keys from `key` on. The
    queries first and last stand at the first and the last of these keys that the range has. Gluon's kernels call this, too."""
    shift = r.length - r.other_length
    first = tl.maximum(key - r.first, 0)
    last = tl.minimum(key + KEYS - r.first, r.length) - 1
    begin = tl.maximum(first - shift - r.right, 0)
    return begin, tl.minimum(r.other_length, last - shift + r.left + 1), first - shift, last - shift


@triton.jit
def source_at(rows, first, TMA: tl.constexpr):
    """The source of a head's Rows; a pointer is moved to the first row of a range."""
    moved = rows.source
    if not TMA:
        moved += tl.cast(first, tl.int64) * rows.stride
    return moved


@triton.jit
def _whole(row, r, BLOCK: tl.constexpr):
    """Whether all rows of a tile lie in the range."""
    return (row >= r.first) & (row + BLOCK <= r.first + r.length)


@triton.jit
def range_key_bounds(row, r, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GUARD_TAIL: tl.constexpr):
    """key_ranges of a tile of queries within one Range. All tiles of keys need a mask if the tile reaches beyond the range."""
    begin, full_begin, full_end, tail, end = key_ranges(row - r.first, r.length, r.other_length, window, BLOCK_M, BLOCK_N, GUARD_TAIL)
    whole = _whole(row, r, BLOCK_M)
    return begin, tl.where(whole, full_begin, begin), tl.where(whole, full_end, begin), tail, end


@triton.jit
def range_query_bounds(row, r, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GUARD_TAIL: tl.constexpr):
    """query_ranges of a tile of keys within one Range. All tiles of queries need a mask if the tile reaches beyond the range."""
    begin, full_begin, full_end, tail, end = query_ranges(row - r.first, r.other_length, r.length, window, BLOCK_M, BLOCK_N, GUARD_TAIL)
    whole = _whole(row, r, BLOCK_N)
    return begin, tl.where(whole, full_begin, begin), tl.where(whole, full_end, begin), tail, end


@triton.jit
def range_seen(x, own, i, j, position):
    """MASK of forward and dQ: like keys_seen, but queries outside of the range see nothing."""
    shift = x.place.other_length - x.place.length
    last = tl.minimum(i + (shift + own.window.right), x.place.other_length - 1)
    seen = j <= tl.where((i >= 0) & (i < x.place.length), last, -1)
    if own.window.HAS_LEFT:
        seen = seen & (j >= i + (shift - own.window.left))
    return seen


@triton.jit
def range_seen_transposed(x, own, i, j, position):
    """MASK of dK/dV: like queries_seeing, but nothing sees keys outside of the range."""
    shift = x.place.length - x.place.other_length
    first = tl.where((j >= 0) & (j < x.place.length), j - (shift + own.window.right), UNLIMITED)
    seen = i >= first
    if own.window.HAS_LEFT:
        seen = seen & (i <= j - (shift - own.window.left))
    return seen


@triton.jit
def load_range_stats(x, own, at):
    """LOAD_STATS: statistics after the range's end belong to other queries and are not used."""
    inside = at + tl.arange(0, x.shape.BLOCK_M) < x.place.other_length
    here = x.row_stats + at + tl.arange(0, x.shape.BLOCK_M)
    lse_log2 = tl.load(here, mask=inside, other=float("inf"))
    delta = tl.load(here + x.stride_rows, mask=inside, other=0.0)
    row_sum = 1.0
    if x.shape.PRECISION == "ieee":
        row_sum = tl.load(here + 2 * x.stride_rows, mask=inside, other=1.0)
    return RowStats(lse_log2, row_sum, delta)
