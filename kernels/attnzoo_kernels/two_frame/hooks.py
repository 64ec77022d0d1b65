"""Hooks of `_triton`'s mainloops for tiles of queries: first the keys of the far frame, then those of the near one, each in a window, under
one softmax.

The far window ends `near_keys` keys before a query's own, and the near window begins after it. Tiles on the border are read in both frames,
each time with the other frame's keys masked. Both frames of a head lie side by side, so loads treat a frame as a head, and one loop serves
both.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.forward import load_first_operand
from attnzoo_kernels._triton.mainloop import QueryTile, key_loops
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.tiles import Place, Rows, head_rows


class Frames(NamedTuple):
    """What all programs of a launch have in common. The Operands have the frames of head h as their heads 2 h (near) and 2 h + 1 (far)."""

    near_keys: Any
    far_keys: Any
    queries: Any
    keys: Any
    gradient: Any  # Operand, dQ
    softmax_scale: Any
    group: Any
    ONE_LOOP: Any
    Q_REGISTERS: Any = False
    Q_SELECT: Any = False
    BY_WARP: Any = False


class Frame(NamedTuple):
    """What steps take."""

    window: Any
    BY_WARP: Any


@triton.jit
def frame_loops(STEP: tl.constexpr, state, x, own, frame, SHORT_TAIL: tl.constexpr):
    """Steps over the keys of a frame (0 near, 1 far), with its queries and keys."""
    far = frame == 1
    # far keys count as a sequence of their own; the window says where it lies relative to the queries
    length = tl.where(far, tl.minimum(x.place.other_length, own.far_keys), x.place.other_length)
    left = tl.where(far, x.place.other_length, own.near_keys - 1)
    right = tl.where(far, x.place.other_length - length - own.near_keys, 0)
    q_rows = head_rows(own.queries, x.place.batch, 2 * x.place.head + frame, x.place.first, x.place.length, x.shape.TMA)
    k_rows = head_rows(own.keys, x.place.batch, x.place.head // own.group * 2 + frame, x.place.other_first, length, x.shape.TMA)
    q = load_first_operand(q_rows, x.place.row, x.shape, own.Q_REGISTERS, own.Q_SELECT)
    v = x.value_rows
    return key_loops(
        STEP, state,
        QueryTile(q, x.do, x.stats, k_rows, Rows(v.source, v.batch, v.head, v.first, length, v.stride),
                  Place(x.place.sequence, x.place.batch, x.place.head, x.place.row, x.place.first, x.place.length, x.place.other_first,
                        length),
                  x.i, x.unit, x.shape, x.EXACT_DELTA),
        Frame(Window(left, right, True, True), own.BY_WARP), own.ONE_LOOP, SHORT_TAIL)
