"""FlashAttention's plain kernels over key ranges: loops over all ranges that a tile touches, in place of a loop over one sequence.

Within a range, a step sees it as a sequence: places, masks and rows count from the range's first query and key.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import KeyTile, QueryTile, range_loops
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import last_beginning, load_range, range_key_bounds, range_query_bounds, source_at, touching
from attnzoo_kernels._triton.tiles import Place, Rows
from attnzoo_kernels.flash.hooks import Loaded, TileBias


@triton.jit
def walk_keys(STEP: tl.constexpr, state, x, modifiers, ONE_LOOP: tl.constexpr, SHORT_TAIL: tl.constexpr):
    """Steps over the keys of all ranges that a QueryTile touches. The tile's place is one among all packed queries."""
    TMA: tl.constexpr = x.shape.TMA
    TAIL: tl.constexpr = not TMA
    LEFT: tl.constexpr = modifiers.window.HAS_LEFT
    row = x.place.row
    entry = touching(modifiers.table, last_beginning(modifiers.table, modifiers.n_seqs, row + x.shape.BLOCK_M), row)
    while entry >= 0:
        r = load_range(modifiers.table, entry, modifiers.window, False)
        entry = touching(modifiers.table, entry - 1, row)
        bounds = range_key_bounds(row, r, Window(r.left, r.right, LEFT, True), x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
        state = range_loops(
            STEP, state,
            QueryTile(x.q, x.do, x.stats,
                      Rows(source_at(x.key_rows, r.other_first, TMA), 0, x.key_rows.head, r.other_first, r.other_length,
                           x.key_rows.stride),
                      Rows(source_at(x.value_rows, r.other_first, TMA), 0, x.value_rows.head, r.other_first, r.other_length,
                           x.value_rows.stride),
                      Place(0, 0, x.place.head, row - r.first, r.first, r.length, r.other_first, r.other_length), x.i - r.first,
                      x.unit, x.shape, x.EXACT_DELTA),
            Loaded(Window(r.left, r.right, LEFT, True), modifiers, 0.0, 0, 0, x.place.head, TileBias(0, 0, 0, 0, 0)), bounds,
            x.shape.BLOCK_N, LEFT, True, TAIL, ONE_LOOP, False, SHORT_TAIL)
    return state


@triton.jit
def walk_queries(STEP: tl.constexpr, state, x, modifiers, ONE_LOOP: tl.constexpr):
    """Steps over the queries of all ranges that a KeyTile touches. The tile's place is one among all packed keys."""
    TMA: tl.constexpr = x.shape.TMA
    TAIL: tl.constexpr = not TMA
    LEFT: tl.constexpr = modifiers.window.HAS_LEFT
    row = x.place.row
    entry = touching(modifiers.table, last_beginning(modifiers.table, modifiers.n_seqs, row + x.shape.BLOCK_N), row)
    while entry >= 0:
        r = load_range(modifiers.table, entry, modifiers.window, True)
        entry = touching(modifiers.table, entry - 1, row)
        bounds = range_query_bounds(row, r, Window(r.left, r.right, LEFT, True), x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
        state = range_loops(
            STEP, state,
            KeyTile(x.k, x.v,
                    Rows(source_at(x.query_rows, r.other_first, TMA), 0, x.query_rows.head, r.other_first, r.other_length,
                         x.query_rows.stride),
                    Rows(source_at(x.grad_rows, r.other_first, TMA), 0, x.grad_rows.head, r.other_first, r.other_length,
                         x.grad_rows.stride),
                    x.row_stats + r.other_first, x.stride_rows,
                    Place(0, 0, x.place.head, row - r.first, r.first, r.length, r.other_first, r.other_length), x.head,
                    x.j - r.first, x.unit, x.shape),
            Loaded(Window(r.left, r.right, LEFT, True), modifiers, 0.0, 0, 0, x.head, TileBias(0, 0, 0, 0, 0)), bounds,
            x.shape.BLOCK_M, True, True, TAIL, ONE_LOOP, False, False)
    return state
