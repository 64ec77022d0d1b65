"""FlashAttention's forward for Hopper over key ranges: the persistent programs of flash's forward go over several ranges in place of one
sequence's keys.

A program's tile of queries may lie in several ranges. The producer warp and the consumers go over the same ranges, from the last one to the
first, and over the keys of each range from its last tile down. What a row of the tile does not see is masked. An `entry` is the number of a
range in the table by queries, see `_triton.range_tables`.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, Descriptors, Problem, Rows
from attnzoo_kernels._gluon.forward_kernel import Config, run_tiles
from attnzoo_kernels._gluon.forward_launch import SCALARS, ForwardPlan, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_mainloop import (
    attend_steps,
    await_early_keys,
    await_queries,
    between,
    first_step,
    hand_on,
    last_sums,
    rows_and_columns,
)
from attnzoo_kernels._gluon.forward_producer import Keys, load_piece, start_at, stop
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import await_stage, mbarrier
from attnzoo_kernels._gluon.ranges import Table, last_beginning, load_range, touching
from attnzoo_kernels._gluon.tile_scheduler import Span, Taken, Tile, decode_tile, read_words, tile_counter
from attnzoo_kernels._gluon.tiles import key_tiles
from attnzoo_kernels._triton.call import Layout, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.flash.hopper import LOG2E, add_sink
from attnzoo_kernels.flash.options import Options
from attnzoo_kernels.flash.tiles import hopper_range_tile


class Own(NamedTuple):
    sinks: Any
    table: Any  # Table by queries


class Seen(NamedTuple):
    """What a consumer's rows see of a range. Rows and keys are counted from the range's first ones."""

    row: Any
    len_q: Any
    len_k: Any
    left: Any
    right: Any
    full_begin: Any  # tiles of keys before this one, and from full_end on, need a mask
    full_end: Any
    end: Any  # tiles from this one on are for other consumers; 0 if the rows lie outside of the range


@gluon.jit
def keys_of(row, entry, program, config):
    """(range, begin, end): an entry's range, and the tiles of its keys that a program's rows see. For entry < 0 there is no range, but one
    tile, of which they see nothing."""
    r = load_range(program.own.table, entry, False)
    begin, _, _, end = key_tiles(row - r.first, config.CONSUMERS * ROWS, r.length, r.other_length, r.left, r.right, config.BLOCK_N,
                                 config.HAS_LEFT, True)
    return r, gl.where(entry < 0, 0, begin), gl.where(entry < 0, 1, end)


@gluon.jit
def next_entry(entry, row, program, config):
    """`entry`, or the nearest one before it of which the program's rows see keys; below 0 if there is none."""
    entry = touching(program.own.table, entry, row)
    _, begin, end = keys_of(row, entry, program, config)
    while end <= begin:
        entry = touching(program.own.table, entry - 1, row)
        _, begin, end = keys_of(row, entry, program, config)
    return entry


@gluon.jit
def next_tile(index, program, config):
    """NEXT_TILE: the consumers also get the first entry of the tile's walk and the one after it."""
    problem = program.problem
    BLOCK_M: gl.constexpr = config.CONSUMERS * ROWS
    _, head, tile = decode_tile(index, problem, BLOCK_M, False, True)
    row = tile * BLOCK_M
    entry = next_entry(last_beginning(program.own.table, row + BLOCK_M), row, program, config)
    following = next_entry(entry - 1, row, program, config)
    return Tile(index, (0, head, row, entry, following), 0, head, row, 0, problem.seqlen_q, 0, problem.seqlen_k, entry)


@gluon.jit
def load_sink(tile, span, program, config):
    """EPILOGUE_PARAMS: the head's sink in base 2."""
    return gl.load(program.own.sinks + tile.head) * LOG2E


@gluon.jit
def _entry_before(at, program, config):
    """NEXT of load_piece: the next range that the tile goes over."""
    entry, row = at
    return next_entry(entry - 1, row, program, config)


@gluon.jit
def produce(program, config):
    """PRODUCE: like produce_prefetched, over the keys of all ranges of a tile."""
    problem = program.problem
    step = 0
    taken = 0
    tile = start_at(gl.program_id(0), -1, program, config)
    while tile.index < problem.n_tiles:
        kv_head = tile.head // problem.group
        row = tile.row
        entry = tile.own
        more = 1
        while more != 0:
            r, begin, end = keys_of(row, entry, program, config)
            keys = Keys(0, kv_head, r.other_first, r.other_length)
            tile, step, taken, entry = load_piece(tile, keys, begin, end, step, taken, program, config, _entry_before, (entry, row))
            more = (entry >= 0).to(gl.int32)
    stop(tile.index, taken, program)


@gluon.jit
def read_tile(taken, program, config):
    """READ_TILE: `own` is (first entry, next entry)."""
    sequence, head, row, entry, following = read_words(taken, program, config)
    return Taken(sequence, head, row, 0, program.problem.seqlen_q, 0, program.problem.seqlen_k, (entry, following))


@gluon.jit
def span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN: its tiles of keys mean nothing. The mainloop goes over all tiles that are loaded, and finds out which these are."""
    return Span(tile.row + ME * ROWS, tile.len_q, tile.len_k, 0, 1, 0, 0, 1, 1, ())


@gluon.jit
def seen_of(row, r, config):
    """The Seen of the consumer's rows from `row` on."""
    _, full_begin, full_end, end = key_tiles(row - r.first, ROWS, r.length, r.other_length, r.left, r.right, config.BLOCK_N,
                                             config.HAS_LEFT, True)
    last = r.first + r.length
    whole = (row >= r.first) & (row + ROWS <= last)
    some = (row + ROWS > r.first) & (row < last)
    return Seen(row - r.first, r.length, r.other_length, r.left, r.right, full_begin, gl.where(whole, full_end, 0),
                gl.where(some, end, 0))


@gluon.jit
def enter(entry, tile, span, program, config):
    """(begin, end, Seen) of an entry's range: the tiles of its keys that the program loads, and what a consumer's rows see of it."""
    r, begin, end = keys_of(tile.row, entry, program, config)
    return begin, end, seen_of(span.row, r, config)


@gluon.jit
def mask(scores, column, seen, program, config):
    """MASK: rows outside of the range see nothing."""
    i, j = rows_and_columns(scores, seen.row, column)
    shift = seen.len_k - seen.len_q
    last = gl.minimum(i + (shift + seen.right), seen.len_k - 1)
    last = gl.where((i >= 0) & (i < seen.len_q), last, -1)
    return between(scores, i, j, shift - seen.left, last, config.HAS_LEFT)


@gluon.jit
def needs_mask(tile, seen, config):
    """Whether a tile of the range's keys needs a mask."""
    masked = tile >= seen.full_end
    if config.HAS_LEFT:
        masked = masked | (tile < seen.full_begin)
    return masked


@gluon.jit
def step_mask(scores, where, program, config):
    """STEP_MASK: where is (tile of the range's keys, Seen)."""
    tile, seen = where
    if needs_mask(tile, seen, config):
        scores = config.MASK(scores, tile * config.BLOCK_N, seen, program, config)
    return scores


@gluon.jit
def _place(s, stop, place):
    """PLACE of attend_steps: (tile of the range's keys, Seen) of step s."""
    begin, seen = place
    return begin + stop - 1 - s, seen


@gluon.jit
def unmasked_from(stop, where, program, config):
    """UNMASKED_FROM without a window: the tiles of keys before full_end need no mask."""
    begin, seen = where
    return stop + begin - seen.full_end


@gluon.jit
def mainloop(q, tile, span, taken, step, q_step, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """MAINLOOP over the ranges of 64 queries. It releases the tiles of keys before the first one that they see, and goes over all later
    ones."""
    scale = program.rows.scale
    entry, following = tile.own
    begin, end, seen = enter(entry, tile, span, program, config)
    while (seen.end <= begin) & (following >= 0):
        step = hand_on(program.bars, step, end - begin, config)
        begin, end, seen = enter(following, tile, span, program, config)
        following = next_entry(following - 1, tile.row, program, config)
    first = gl.minimum(gl.maximum(seen.end, begin + 1), end)
    step = hand_on(program.bars, step, end - first, config)
    end = first
    if not config.Q_IN_REGISTERS:
        at = await_queries(taken, ME, program, config)
        q = program.tiles.q.index(at)
    slot = await_stage(program.bars.k_full, step, config.STAGES)
    p, acc, row_max, row_sum = first_step(q, slot, needs_mask(end - 1, seen, config), (end - 1) * config.BLOCK_N, seen, scale, program,
                                         config)
    step += 1
    end -= 1
    more = 1
    while more != 0:
        stop = step + end - begin
        await_early_keys(step, stop, program, config)
        unmasked = stop
        if config.UNMASKED_FROM is not None:
            unmasked = gl.minimum(gl.maximum(config.UNMASKED_FROM(stop, (begin, seen), program, config), step), stop)
        p, acc, row_max, row_sum = attend_steps(q, p, acc, row_max, row_sum, step, unmasked, stop, stop, _place, (begin, seen),
                                                config.UNMASKED_FROM is not None, False, True, None, scale, program, config)
        step = stop
        more = 0
        if following >= 0:
            begin, end, seen = enter(following, tile, span, program, config)
            following = next_entry(following - 1, tile.row, program, config)  # found before it is needed, so that nothing waits for it
            more = 1
    if not config.Q_IN_REGISTERS:
        mbarrier.arrive(program.bars.q_empty.index(at), count=1)
    acc_pending, row_max, row_sum = last_sums(p, acc, row_max, row_sum, step, scale, program, config)
    return acc_pending, row_max, row_sum, step, q_step


@gluon.jit(do_not_specialize=[*SCALARS, "n_ranges"], do_not_specialize_on_alignment=["table", "counter", "sinks"])
def flash_ranges_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, table, counter, sinks, stride_stats, scale,
                                   window_left, window_right, n_ranges, seqlen_q, seqlen_k, heads, group, head_group, n_tiles,
                                   BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
                                   REGISTERS: gl.constexpr, Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr,
                                   K_BEFORE_PV: gl.constexpr, HAS_LEFT: gl.constexpr, PREFETCH_TILE: gl.constexpr,
                                   HAS_SINKS: gl.constexpr):
    problem = Problem(counter, None, None, 1, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, None, None)
    run_tiles(Descriptors(q_desc, k_desc, v_desc, out_desc), problem, Rows(scale, lse_ptr, stats_ptr, stride_stats),
              Own(sinks, Table(table, n_ranges, window_left, window_right)),
              Config(BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, TILE_WORDS=5, PACKED=True,
                     HAS_LEFT=HAS_LEFT, HAS_RIGHT=True, BRANCHES=1, MASK_IN_LOOP=True, EMPTY_ROWS=True, Q_SLOTS=Q_SLOTS,
                     Q_IN_REGISTERS=Q_SLOTS == 1, JOINT_RELEASE=JOINT_RELEASE, K_BEFORE_PV=K_BEFORE_PV, PREFETCH_TILE=PREFETCH_TILE,
                     PRODUCE=produce, NEXT_TILE=next_tile, READ_TILE=read_tile, SPAN=span, EPILOGUE_PARAMS=load_sink if HAS_SINKS else None,
                     MAINLOOP=mainloop, ADD_SINK=add_sink if HAS_SINKS else None, MASK=mask, STEP_MASK=step_mask,
                     UNMASKED_FROM=None if HAS_LEFT else unmasked_from))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_sinks: bool, q: Layout, k: Layout, v: Layout, options: Options,
          tile: ForwardTile | None = None) -> ForwardPlan:
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    tile = tile or hopper_range_tile(width, value_width, window=options.window_left >= 0)
    scalars = {"n_ranges": options.sequences, "head_group": heads_in_l2(k[0][0], width + value_width) * (q[0][-2] // k[0][-2])}
    return plan_forward(flash_ranges_fwd_hopper_kernel, device, options, tile, q, k, v, scalars, {"HAS_SINKS": has_sinks})


def launch_forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sinks: Tensor | None, options: Options,
                   tile: ForwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them. table: of the ranges by queries."""
    out, lse, stats = outputs(q, v.shape[-1])
    plan = _plan(q.device, q.dtype, sinks is not None, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), lse, stats, table, tile_counter(q.device), sinks)
    return out, lse, stats
