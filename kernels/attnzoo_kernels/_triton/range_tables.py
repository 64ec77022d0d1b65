"""Tables of key ranges for kernels: one by queries and one by keys, made in one launch without a wait for the device.

A table is sorted by where ranges begin; of ranges with the same begin the longer one comes first. Each entry has a link to the nearest
entry before it whose range ends later. A tile goes backwards through the table. Where it meets a range that ends before the tile, it
follows the link, and so skips all ranges that end even earlier.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.ranges import COLUMNS, WIDTH

ROWS = 8  # ranges whose entries a program makes
WIDE = 256  # ranges with which it compares them at a time
LATEST = tl.constexpr(0x7FFFFFFF)  # the begin of numbers that are no ranges


@triton.jit
def _places(ranges, n, count, side, COLUMNS: tl.constexpr):
    """(begin, end, other_begin, other_end) of the ranges n. An empty range begins and ends at 0. side: 0 for queries, 1 for keys."""
    at = ranges + n.to(tl.int64) * COLUMNS
    begin = tl.load(at + 2 * side, mask=n < count, other=0)
    end = tl.load(at + 2 * side + 1, mask=n < count, other=0)
    other_begin = tl.load(at + 2 - 2 * side, mask=n < count, other=0)
    other_end = tl.load(at + 3 - 2 * side, mask=n < count, other=0)
    some = (begin < end) & (other_begin < other_end)
    return tl.where(some, begin, 0), tl.where(some, end, 0), other_begin, other_end


@triton.jit
def _columns(ranges, m, count, side, COLUMNS: tl.constexpr):
    """(begin, end) of the ranges m, each [1, len(m)]. Where there is no range m, begin is LATEST."""
    begin, end, _, _ = _places(ranges, m, count, side, COLUMNS)
    return tl.where(m < count, begin, LATEST)[None, :], end[None, :]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ranges"])
def key_range_tables_kernel(ranges, tables, count, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Each program finds the rank of ROWS ranges in a table, by counting the ranges that come earlier, and stores their entries there.

    A link leads to a range that ends later than the entry's own and begins no later. Of these it is the one with the largest begin, and of
    several with that begin the last in the table. Its rank is one less than the count of the ranges that begin earlier than it, and of
    those with the same begin that end later than the entry's range.
    """
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
    """int32 (2, n, 8): the table by queries and the table by keys. The words of an entry are: begin, end, begin and end on the other side,
    kind, link (-1 if there is none), and two unused words. For a list without ranges, each table has one empty range."""
    ranges = ranges.contiguous() if len(ranges) else ranges.new_zeros(1, COLUMNS)
    tables = ranges.new_empty(2, len(ranges), WIDTH)
    with on_device_of(ranges):
        key_range_tables_kernel[(triton.cdiv(len(ranges), ROWS), 2)](ranges, tables, len(ranges), COLUMNS=COLUMNS, WIDTH=WIDTH,
                                                                     ROWS=ROWS, WIDE=WIDE)
    return tables
