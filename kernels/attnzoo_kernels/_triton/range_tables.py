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

BLOCK = 64
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
def _order(begin, end):
    return (begin.to(tl.int64) << 32) | (end ^ LATEST).to(tl.int64)  # the longer first


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ranges"])
def key_range_tables_kernel(ranges, tables, count, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    side = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    n = tl.program_id(0) * BLOCK + lanes
    begin, end, other_begin, other_end = _places(ranges, n, count, side, COLUMNS)
    order = _order(begin, end)
    rank = tl.zeros([BLOCK], tl.int32)
    longer = tl.zeros([BLOCK], tl.int64) - 1
    for start in range(0, count, BLOCK):
        m = start + lanes
        its_begin, its_end, _, _ = _places(ranges, m, count, side, COLUMNS)
        its_order = _order(its_begin, its_end)[None, :]
        # [BLOCK, BLOCK]
        earlier = (its_order < order[:, None]) & (m < count)[None, :]
        same = (its_order == order[:, None]) & (m[None, :] < n[:, None])
        rank += tl.sum((earlier | same).to(tl.int32), 1)
        later_end = earlier & (its_end[None, :] > end[:, None])
        longer = tl.maximum(longer, tl.max(tl.where(later_end, its_order, -1), 1))
    link = tl.zeros([BLOCK], tl.int32) - 1
    for start in range(0, count, BLOCK):
        m = start + lanes
        its_begin, its_end, _, _ = _places(ranges, m, count, side, COLUMNS)
        before = (_order(its_begin, its_end)[None, :] <= longer[:, None]) & (m < count)[None, :]
        link += tl.sum(before.to(tl.int32), 1)
    kind = tl.load(ranges + n.to(tl.int64) * COLUMNS + 4, mask=n < count, other=0)
    entry = tables + (side * count + rank).to(tl.int64) * WIDTH
    tl.store(entry, begin, mask=n < count)
    tl.store(entry + 1, end, mask=n < count)
    tl.store(entry + 2, other_begin, mask=n < count)
    tl.store(entry + 3, other_end, mask=n < count)
    tl.store(entry + 4, kind, mask=n < count)
    tl.store(entry + 5, link, mask=n < count)


def launch_tables(ranges: Tensor) -> Tensor:
    """int32 (2, n, 8): the tables by queries and by keys. A row is begin, end, begin and end on the other side, the kind, the entry before
    that ends later (or -1), and two unused words. For a list without ranges, each table has one empty range."""
    ranges = ranges.contiguous() if len(ranges) else ranges.new_zeros(1, COLUMNS)
    tables = ranges.new_empty(2, len(ranges), WIDTH)
    with on_device_of(ranges):
        key_range_tables_kernel[(triton.cdiv(len(ranges), BLOCK), 2)](ranges, tables, len(ranges), COLUMNS=COLUMNS, WIDTH=WIDTH,
                                                                      BLOCK=BLOCK)
    return tables
