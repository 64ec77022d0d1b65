"""Block-sparse forward for Hopper in Gluon: flash's, over lists of kept tiles, which the producer warp reads ahead.

Two consumers of 64 queries each share a tile's list and go from its last entry to its first; entries that need a mask come last in the
list. Where blocks have 64 queries, a program has one consumer with a list of its own, and two or three programs share a multiprocessor.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, Descriptors, Problem, Rows
from attnzoo_kernels._gluon.forward_kernel import Config, run_tiles
from attnzoo_kernels._gluon.forward_launch import SCALARS, ForwardPlan, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_producer import Keys, load_segment, produce_segments
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import Span, Taken, Tile, read_words, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Layout, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.block_sparse.hopper_lists import find_list, list_lengths, listed_tile
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import hopper_forward_tile


class OfList(NamedTuple):
    """`own` of a Tile: what the producer warp knows of a tile's list."""

    length: Any
    begin: Any
    last: Any  # the list's last entry


class ToTake(NamedTuple):
    """`own` of a Taken and of a Span: what a consumer knows of a tile's list. A Span's tiles of keys are positions in the list here."""

    length: Any
    clear: Any  # entries that need no mask
    column: Any  # first key of the list's last entry
    begin: Any


class Lists(NamedTuple):
    """The tensors of `attnzoo_kernels.block_sparse.lists.TileLists`, and their strides."""

    order: Any
    entries: Any
    count: Any
    tiles: Any
    width: Any
    stride_batch: Any
    stride_head: Any


@gluon.jit
def next_tile(index, program, config):
    """NEXT_TILE: the index-th tile in the order of the lists."""
    lists, problem = program.own, program.problem
    batch, head, tile = listed_tile(index, lists.order, lists.tiles, problem.heads, problem.n_tiles)
    number = batch * lists.stride_batch + head * lists.stride_head + tile
    length, clear = list_lengths(lists.count, number)
    begin = find_list(lists.entries, number, lists.width)
    last = gl.load(begin + gl.maximum(length - 1, 0))
    last = gl.where(length > 0, last, 0)  # a tile with an empty list also reads one tile of keys
    row = tile * (config.CONSUMERS * ROWS)
    words = batch, head, row, length, clear, last * config.BLOCK_N, number
    return Tile(index, words, batch, head, row, 0, problem.seqlen_q, 0, problem.seqlen_k, OfList(length, begin, last))


@gluon.jit
def next_entry(j, tile, program, config):
    """NEXT_KEYS, read one step ahead, so that the load of keys does not wait for it."""
    return gl.load(tile.own.begin + gl.maximum(tile.own.length - 2 - j, 0))


@gluon.jit
def load_tile(tile, step, q_step, program, config):
    """LOAD_TILE: one segment, the tiles of keys in the list."""
    keys = Keys(tile.sequence, tile.head // program.problem.group, 0, tile.len_k)
    return load_segment(program.descs.q, program.descs.k, tile, keys, 0, tile.own.last, gl.maximum(tile.own.length, 1), step, q_step,
                        program, config)


@gluon.jit
def read_tile(taken, program, config):
    """READ_TILE: `own` is a ToTake."""
    batch, head, row, length, clear, column, number = read_words(taken, program, config)
    begin = find_list(program.own.entries, number, program.own.width)
    return Taken(batch, head, row, 0, program.problem.seqlen_q, 0, program.problem.seqlen_k, ToTake(length, clear, column, begin))


@gluon.jit
def span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN: all entries of the list."""
    len_k = gl.where(tile.own.length > 0, tile.len_k, 0)  # an empty list is treated as a sequence without keys
    end = gl.maximum(tile.own.length, 1)
    return Span(tile.row + ME * ROWS, tile.len_q, len_k, 0, end, 0, 0, tile.own.clear, end, tile.own)


@gluon.jit
def column(tile, span, FIRST: gl.constexpr, program, config):
    """COLUMN: the first key of a list's tile. For the list's last entry the consumers know it already."""
    at = span.own.column
    if not FIRST:
        at = gl.load(span.own.begin + tile) * config.BLOCK_N
    return at


@gluon.jit(do_not_specialize=[*SCALARS, "stride_lb", "stride_lh", "list_tiles", "list_width"],
           do_not_specialize_on_alignment=["order", "index", "count", "counter"])
def block_sparse_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, order, index, count, counter, stride_stats,
                                   stride_lb, stride_lh, list_tiles, list_width, scale, window_left, window_right, seqlen_q, seqlen_k,
                                   heads, group, n_tiles, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                                   CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                                   MASK_IN_LOOP: gl.constexpr, PREFETCH_TILE: gl.constexpr, ROW_MAX_NOT_NEGATIVE: gl.constexpr):
    run_tiles(Descriptors(q_desc, k_desc, v_desc, out_desc),
              Problem(counter, None, None, None, seqlen_q, seqlen_k, heads, group, None, n_tiles, window_left, window_right),
              Rows(scale, lse_ptr, stats_ptr, stride_stats), Lists(order, index, count, list_tiles, list_width, stride_lb, stride_lh),
              Config(BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, TILE_WORDS=7,
                     HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, BRANCHES=1, MASK_IN_LOOP=MASK_IN_LOOP, EMPTY_ROWS=MASK_IN_LOOP, Q_SLOTS=1,
                     Q_IN_REGISTERS=True, PREFETCH_TILE=PREFETCH_TILE, ROW_MAX_NOT_NEGATIVE=ROW_MAX_NOT_NEGATIVE, PACKED=False,
                     PRODUCE=produce_segments, NEXT_TILE=next_tile, LOAD_TILE=load_tile, NEXT_KEYS=next_entry, READ_TILE=read_tile,
                     SPAN=span, COLUMN=column))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, q: Layout, k: Layout, v: Layout, options: Options,
          tile: ForwardTile | None = None) -> tuple[ForwardPlan, Grid]:
    tile = tile or hopper_forward_tile(tile_width(q[0][-1]), tile_width(v[0][-1]), options.block_q, options.block_k)
    grid = options.grid(q[0], k[0], tile)
    # the diagonal crosses two tiles of keys if these are smaller than a tile of queries
    mask_in_loop = (masks_in_loop(options.window_left, options.window_right, k[0][1] - q[0][1], tile.block_m)
                    or options.causal and tile.block_n < tile.block_m)
    names = ("stride_lb", "stride_lh", "list_tiles", "list_width")
    lists = dict(zip(names, options.scalars(grid, q[0], k[0], by_keys=False), strict=False))
    constants = {"MASK_IN_LOOP": mask_in_loop, "ROW_MAX_NOT_NEGATIVE": tile.row_max_not_negative and not mask_in_loop}
    # without a limit the compiler would give one program the registers that several must share
    registers = {"maxnreg": 256 // tile.programs // 8 * 8} if tile.programs > 1 else {}
    return plan_forward(block_sparse_fwd_hopper_kernel, device, options, tile, q, k, v, lists, constants, registers), grid


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.sequences is not None:
        return "it has no packed sequences"
    if options.block_q % 64 or options.block_k % 64:
        return f"blocks must be multiples of 64 tokens, got {options.block_q} x {options.block_k}"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: Options,
                   tile: ForwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts."""
    out, lse, stats = outputs(q, v.shape[-1])
    plan, grid = _plan(q.device, q.dtype, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        lists = options.lists(mask, grid, q.shape, k.shape, by_keys=False)
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), lse, stats, lists.order, lists.index, lists.count,
                    tile_counter(q.device))
    return out, lse, stats
