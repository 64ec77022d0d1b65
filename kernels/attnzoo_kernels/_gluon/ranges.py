"""How a tile of a Hopper kernel goes over the key ranges that touch it: `_triton.ranges` for Gluon."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._triton.ranges import CAUSAL_TOP_LEFT, UNLIMITED, WIDTH, Range


class Table(NamedTuple):
    """A table of `_triton.range_tables`, by queries or by keys, and the call's window."""

    entries: Any
    count: Any
    window_left: Any
    window_right: Any


@gluon.jit
def last_beginning(table, end):
    """The last entry that begins before `end`, or -1."""
    low = 0
    high = table.count
    while low < high:
        middle = (low + high) // 2
        before = gl.load(table.entries + middle.to(gl.int64) * WIDTH) < end
        low = gl.where(before, middle + 1, low)
        high = gl.where(before, high, middle)
    return low - 1


@gluon.jit
def _word(table, entry, WORD: gl.constexpr):
    return gl.load(table.entries + gl.maximum(entry, 0).to(gl.int64) * WIDTH + WORD)


@gluon.jit
def touching(table, entry, row):
    """`entry`, or the nearest one before it whose range ends after `row`; below 0 if there is none."""
    end = _word(table, entry, 1)
    while (entry >= 0) & (end <= row):
        entry = _word(table, entry, 5)
        end = _word(table, entry, 1)
    return entry


@gluon.jit
def load_range(table, entry, TRANSPOSED: gl.constexpr):
    """The Range of an entry; an empty one for entries below 0. TRANSPOSED: the table is by keys."""
    there = entry >= 0
    first = _word(table, entry, 0)
    other_first = _word(table, entry, 2)
    length = gl.where(there, _word(table, entry, 1) - first, 0)
    other_length = gl.where(there, _word(table, entry, 3) - other_first, 0)
    kind = _word(table, entry, 4)
    # the window counts from the bottom-right diagonal; for the top-left one it is shifted by the distance of the two
    back = other_length - length if TRANSPOSED else length - other_length
    back = gl.where(kind == CAUSAL_TOP_LEFT, back, 0)
    right = gl.where(kind != 0, 0, gl.where(table.window_right < 0, UNLIMITED, table.window_right))
    return Range(first, length, other_first, other_length, table.window_left - back, right + back)
