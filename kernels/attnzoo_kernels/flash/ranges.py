"""FlashAttention's plain kernels over key ranges: the hooks that go through them where a packed call goes through one sequence."""

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import KeyTile, QueryTile, range_loops
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import last_beginning, load_range, range_key_bounds, range_query_bounds, source_at, touching
from attnzoo_kernels._triton.tiles import Place, Rows
from attnzoo_kernels.flash.hooks import Loaded, TileBias


@triton.jit
def walk_keys(STEP: tl.constexpr, state, x, modifiers, ONE_LOOP: tl.constexpr, SHORT_TAIL: tl.constexpr):
    """Steps over the keys of all ranges that a QueryTile of all packed queries touches."""
    TMA: tl.constexpr = x.shape.TMA
    TAIL: tl.constexpr = not TMA
    LEFT: tl.constexpr = modifiers.window.HAS_LEFT
    row = x.place.row
    entry = touching(modifiers.table, last_beginning(modifiers.table, modifiers.n_seqs, row + x.shape.BLOCK_M), row)
    while entry >= 0:
        of = load_range(modifiers.table, entry, modifiers.window, False)
        entry = touching(modifiers.table, entry - 1, row)
        bounds = range_key_bounds(row, of, Window(of.left, of.right, LEFT, True), x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
        state = range_loops(
            STEP, state,
            QueryTile(x.q, x.do, x.stats,
                      Rows(source_at(x.key_rows, of.other_first, TMA), 0, x.key_rows.head, of.other_first, of.other_length,
                           x.key_rows.stride),
                      Rows(source_at(x.value_rows, of.other_first, TMA), 0, x.value_rows.head, of.other_first, of.other_length,
                           x.value_rows.stride),
                      Place(0, 0, x.place.head, row - of.first, of.first, of.length, of.other_first, of.other_length), x.i - of.first,
                      x.unit, x.shape, x.EXACT_DELTA),
            Loaded(Window(of.left, of.right, LEFT, True), modifiers, 0.0, 0, 0, x.place.head, TileBias(0, 0, 0, 0, 0)), bounds,
            x.shape.BLOCK_N, LEFT, True, TAIL, ONE_LOOP, False, SHORT_TAIL)
    return state


@triton.jit
def walk_queries(STEP: tl.constexpr, state, x, modifiers, ONE_LOOP: tl.constexpr):
    """Steps over the queries of all ranges that a KeyTile of all packed keys touches."""
    TMA: tl.constexpr = x.shape.TMA
    TAIL: tl.constexpr = not TMA
    LEFT: tl.constexpr = modifiers.window.HAS_LEFT
    row = x.place.row
    entry = touching(modifiers.table, last_beginning(modifiers.table, modifiers.n_seqs, row + x.shape.BLOCK_N), row)
    while entry >= 0:
        of = load_range(modifiers.table, entry, modifiers.window, True)
        entry = touching(modifiers.table, entry - 1, row)
        bounds = range_query_bounds(row, of, Window(of.left, of.right, LEFT, True), x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
        state = range_loops(
            STEP, state,
            KeyTile(x.k, x.v,
                    Rows(source_at(x.query_rows, of.other_first, TMA), 0, x.query_rows.head, of.other_first, of.other_length,
                         x.query_rows.stride),
                    Rows(source_at(x.grad_rows, of.other_first, TMA), 0, x.grad_rows.head, of.other_first, of.other_length,
                         x.grad_rows.stride),
                    x.row_stats + of.other_first, x.stride_rows,
                    Place(0, 0, x.place.head, row - of.first, of.first, of.length, of.other_first, of.other_length), x.head,
                    x.j - of.first, x.unit, x.shape),
            Loaded(Window(of.left, of.right, LEFT, True), modifiers, 0.0, 0, 0, x.head, TileBias(0, 0, 0, 0, 0)), bounds,
            x.shape.BLOCK_M, True, True, TAIL, ONE_LOOP, False, False)
    return state
