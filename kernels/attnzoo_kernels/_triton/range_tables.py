"""Tables of key ranges for kernels: one by queries and one by keys, made in one launch without a wait for the device.

A table is sorted by the ranges' first place; of ranges with the same first place the longer comes first. Each entry links to the nearest
entry before it whose range ends later. A walk that goes back through the table follows this link from a range that ends too early, and so
skips those that end even earlier.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.ranges import COLUMNS, WIDTH

ROWS = 8  # ranges of a program
WIDE = 256  # ranges with which it compares them at once
LATEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _places(ranges, n, count, side, COLUMNS: tl.constexpr):
    """(begin, end, other_begin, other_end) of the ranges n. An empty range begins and ends at 0."""
    at = ranges + n.to(tl.int64) * COLUMNS
    begin = tl.load(at + 2 * side, mask=n < count, other=0)
    end = tl.load(at + 2 * side + 1, mask=n < count, other=0)
    other_begin = tl.load(at + 2 - 2 * side, mask=n < count, other=0)
    other_end = tl.load(at + 3 - 2 * side, mask=n < count, other=0)
    some = (begin < end) & (other_begin < other_end)
    return tl.where(some, begin, 0), tl.where(some, end, 0), other_begin, other_end


@triton.jit
def _columns(ranges, m, count, side, COLUMNS: tl.constexpr):
    """(begin, end) of the ranges m, each [1, len(m)]. Numbers behind the last range begin after all ranges."""
    begin, end, _, _ = _places(ranges, m, count, side, COLUMNS)
    return tl.where(m < count, begin, LATEST)[None, :], end[None, :]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ranges"])
def key_range_tables_kernel(ranges, tables, count, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The entry that a link leads to is the last one, of those that end later, with the largest begin up to the range's own. Up to it lie
    the entries with a smaller begin than that, and those with the same begin that end later than the range."""
    side = tl.program_id(1)
    lanes = tl.arange(0, WIDE)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin, end, other_begin, other_end = _places(ranges, n, count, side, COLUMNS)
    # [ROWS, WIDE]: a row is reduced once, behind the loop
    earlier = tl.zeros([ROWS, WIDE], tl.int32)
    linked = tl.zeros([ROWS, WIDE], tl.int32) - 1
    for start in range(0, count, WIDE):
        m = start + lanes
        its_begin, its_end = _columns(ranges, m, count, side, COLUMNS)
        longer = its_end > end[:, None]
        same = (its_end == end[:, None]) & (m[None, :] < n[:, None])
        before = its_begin < begin[:, None]
        beside = its_begin == begin[:, None]
        earlier += (before | beside & (longer | same)).to(tl.int32)
        linked = tl.maximum(linked, tl.where((before | beside) & longer, its_begin, -1))
    rank = tl.sum(earlier, 1)
    linked_begin = tl.max(linked, 1)
    up_to = tl.zeros([ROWS, WIDE], tl.int32)
    for start in range(0, count, WIDE):
        its_begin, its_end = _columns(ranges, start + lanes, count, side, COLUMNS)
        beside = its_begin == linked_begin[:, None]
        up_to += ((its_begin < linked_begin[:, None]) | beside & (its_end > end[:, None])).to(tl.int32)
    kind = tl.load(ranges + n.to(tl.int64) * COLUMNS + 4, mask=n < count, other=0)
    entry = tables + (side * count + rank).to(tl.int64) * WIDTH
    tl.store(entry, begin, mask=n < count)
    tl.store(entry + 1, end, mask=n < count)
    tl.store(entry + 2, other_begin, mask=n < count)
    tl.store(entry + 3, other_end, mask=n < count)
    tl.store(entry + 4, kind, mask=n < count)
    tl.store(entry + 5, tl.sum(up_to, 1) - 1, mask=n < count)


def launch_tables(ranges: Tensor) -> Tensor:
    """int32 (2, n, 8): the tables by queries and by keys. A row is begin, end, begin and end on the other side, the kind, the entry before
    that ends later (or -1), and two unused words. For a list without ranges, each table has one empty range."""
    ranges = ranges.contiguous() if len(ranges) else ranges.new_zeros(1, COLUMNS)
    tables = ranges.new_empty(2, len(ranges), WIDTH)
    with on_device_of(ranges):
        key_range_tables_kernel[(triton.cdiv(len(ranges), ROWS), 2)](ranges, tables, len(ranges), COLUMNS=COLUMNS, WIDTH=WIDTH,
                                                                     ROWS=ROWS, WIDE=WIDE)
    return tables
