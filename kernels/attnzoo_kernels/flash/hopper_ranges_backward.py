"""FlashAttention's backward for Hopper over key ranges: the backward of one dense sequence, in which a tile of keys meets the queries of
several ranges.

The loading warp and the consumers go over the ranges that a tile of keys touches, from the last one to the first, and over the queries of
each range from its first tile on. Sums of dQ have no order.
"""

from dataclasses import replace

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import head_steps
from attnzoo_kernels._gluon.backward_dq import add_tile
from attnzoo_kernels._gluon.backward_plan import Tile, mainloop_width, pair_tile
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, KeyTile, decode_keys, word
from attnzoo_kernels._gluon.hopper import product_layout
from attnzoo_kernels._gluon.ranges import UNLIMITED, Table, last_beginning, load_range, touching
from attnzoo_kernels.flash import hopper_backward
from attnzoo_kernels.flash.options import Options


@gluon.jit
def own_table(tensors, numbers, problem, dtype: gl.constexpr, c):
    """OWN: the Table of the ranges by keys; numbers[0] is their count."""
    return Table(tensors[0], numbers[0], gl.where(problem.window_left < 0, UNLIMITED, problem.window_left), problem.window_right)


@gluon.jit
def queries_of(table, entry, key, ROWS: gl.constexpr):
    """(range, begin, full_begin, full_end, end): an entry's range, and the tiles of queries, counted over all queries, that see the KEYS
    keys from `key` on. Those before full_begin and those from full_end on need a mask."""
    of = load_range(table, entry, True)
    shift = of.length - of.other_length
    first = gl.maximum(key - of.first, 0)
    last = gl.minimum(key + KEYS - of.first, of.length) - 1
    begin = gl.maximum(first - shift - of.right, 0)
    end = gl.minimum(of.other_length, last - shift + of.left + 1)
    some = end > begin
    full_begin = of.other_first + gl.maximum(last - shift - of.right, 0)
    full_end = of.other_first + gl.minimum(of.other_length, first - shift + of.left + 1)
    begin = (of.other_first + begin) // ROWS
    end = gl.where(some, (of.other_first + end + ROWS - 1) // ROWS, begin)
    whole = (key >= of.first) & (key + KEYS <= of.first + of.length)
    full_begin = gl.where(whole, gl.minimum(gl.maximum((full_begin + ROWS - 1) // ROWS, begin), end), end)
    full_end = gl.maximum(gl.minimum(full_end // ROWS, end), full_begin)
    return of, begin, full_begin, full_end, end


@gluon.jit
def first_and_last(of, key, ROWS: gl.constexpr):
    """(first, last) query, counted over all queries, that sees each of the HALF keys from `key` on."""
    shift = of.length - of.other_length
    j = gl.arange(0, HALF, gl.SliceLayout(1, product_layout(ROWS))) + (key - of.first)
    low = gl.maximum(j - shift - of.right, 0) + of.other_first
    low = gl.where((j >= 0) & (j < of.length), low, UNLIMITED)
    return low, gl.minimum(j - shift + of.left, of.other_length - 1) + of.other_first


@gluon.jit
def next_key_tile(problem, table, c):
    """TILE. Here full_begin holds the first entry of the tile's walk, and `end` the number of all steps of a query head."""
    index = gl.atomic_add(problem.counter, 1, sem="relaxed")
    _, kv_head, key, _, len_q, _, len_k, dq_tile = decode_keys(index, problem, c)
    first = touching(table, last_beginning(table, key + KEYS), key)
    steps = 0
    entry = first
    while entry >= 0:
        _, begin, _, _, end = queries_of(table, entry, key, c.ROWS)
        steps += end - begin
        entry = touching(table, entry - 1, key)
    more = (index < problem.n_tiles).to(gl.int32)
    return KeyTile(more, 0, kv_head, key, 0, first, 0, steps, len_q, len_k, 0, dq_tile, index), 0, 0


@gluon.jit
def all_steps(table, tile, member):
    """LOAD_STEPS. The state is (entry, next tile of queries, end of the entry's tiles, first key); it begins before the first entry."""
    return 0, tile.end, (tile.full_begin + 1, 0, 0, tile.key)


@gluon.jit
def _next_step(table, state, ROWS: gl.constexpr):
    entry, j, end, key = state
    while j >= end:
        entry = touching(table, entry - 1, key)
        _, j, _, _, end = queries_of(table, entry, key, ROWS)
    return j, (entry, j + 1, end, key)


@gluon.jit
def next_step_of_64(table, state, n):
    """LOAD_NEXT."""
    return _next_step(table, state, 64)


@gluon.jit
def next_step_of_128(table, state, n):
    """LOAD_NEXT."""
    return _next_step(table, state, 128)


@gluon.jit
def mainloop(state, at, bounds, low, high, table, slot, smem, bars, dq_desc, problem, scale, c, ME: gl.constexpr):
    """MAINLOOP: for each query head of a group, the steps of all ranges, in segments with a mask and without."""
    ROWS: gl.constexpr = c.ROWS
    step = at
    for member in range(problem.group):
        entry = word(smem.work, slot, "full_begin")
        while entry >= 0:
            key = word(smem.work, slot, "key")
            dq_tile = word(smem.work, slot, "dq_tile") + member * problem.head_tiles
            of, begin, full_begin, full_end, end = queries_of(table, entry, key, ROWS)
            low, high = first_and_last(of, key + ME * HALF, ROWS)
            state = head_steps(state, at, step - begin, (begin, full_begin, full_end, end), dq_tile, dq_tile, low, high, table, smem, bars,
                               dq_desc, scale, c, ME)
            step += end - begin
            entry = touching(table, entry - 1, word(smem.work, slot, "key"))
    return state, step


@gluon.jit
def add_ranges(dq_desc, dq_semaphore, smem, bars, first, step, seen, table, problem, c):
    """DQ_STEPS: range by range, in the consumers' order."""
    for _ in range(problem.group):
        entry = seen.full_begin
        while entry >= 0:
            _, begin, _, _, end = queries_of(table, entry, seen.key, c.ROWS)
            for j in range(begin, end):
                add_tile(dq_desc, dq_semaphore, smem, bars, first + j, j, step, seen, table, problem.window_right, c)
                step += 1
            entry = touching(table, entry - 1, seen.key)
        first += problem.head_tiles
    return step


HOOKS = (("HAS_LEFT", True), ("HAS_RIGHT", True), ("OWN", own_table), ("TILE", next_key_tile), ("LOAD_STEPS", all_steps),
         ("MAINLOOP", mainloop), ("DQ_STEPS", add_ranges))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, table: Tensor,
                    options: Options, into: tuple[Tensor, Tensor, Tensor] | None = None,
                    tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, as the plain path's launch_backward gives them. table: of the ranges by keys."""
    width = mainloop_width(q.shape[-1], v.shape[-1])
    # as for one sequence: a window's masks and the scores of 128 queries together would spill
    tile = tile or (Tile(64, dq_warp=True) if width == 64 and options.window_left >= 0 else pair_tile(width, ordered=False))
    rule = hopper_backward.Rule((*HOOKS, ("LOAD_NEXT", next_step_of_64 if tile.rows == 64 else next_step_of_128)), (options.sequences,))
    *dense, of_out = (x[None] for x in (q, k, v, out, grad_out))
    into = None if into is None else tuple(x[None] for x in into)
    *grads, _ = hopper_backward.launch_backward(of_out, grad_lse, *dense, stats, None, None,
                                                    replace(options, sequences=None, ranges=False), False, tile, into, rule, own=(table,))
    return tuple(x[0] for x in grads)
