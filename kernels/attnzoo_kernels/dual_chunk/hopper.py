"""Dual Chunk attention's forward for Hopper in Gluon: flash's persistent programs, with other copies of the queries for each stage.

A tile of queries lies in one chunk. It attends to its own chunk's keys, then to those of the chunk before, then to all others, each from
the last key down. Tiles of keys begin at seams, so only the first tile of a relation can need a mask.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, Descriptors, Problem, Rows
from attnzoo_kernels._gluon.forward_consumer import rows_before, write_tile
from attnzoo_kernels._gluon.forward_kernel import Config, run_tiles
from attnzoo_kernels._gluon.forward_launch import SCALARS, ForwardPlan, compiled_together, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_mainloop import mainloop_in_turn, mask_scores
from attnzoo_kernels._gluon.forward_producer import produce_segments
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import constants, product_layout, why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import tile_counter
from attnzoo_kernels._triton.call import Layout, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.dual_chunk.hopper_tiles import load_tile, next_tile, relation_keys, span
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import rotated_copies
from attnzoo_kernels.dual_chunk.tiles import FORWARD_LENGTHS, hopper_forward_tile

Q_SLOTS = gl.constexpr(2)  # the next relation's queries are loaded while those of this one are read


@constants
class OwnConfig:
    VALUE_DIM: gl.constexpr
    SEAMS: gl.constexpr  # the last keys of a relation's first tile may belong to the next chunk
    PARTIAL: gl.constexpr  # some tiles cannot be stored by TMA


class Own(NamedTuple):
    chunk: Any
    near: Any
    batches: Any
    out: Any
    stride_os: Any
    stride_oh: Any


@gluon.jit
def _first(span):
    """FIRST: the first tile of keys holds the diagonal."""
    return True


@gluon.jit
def _ends(tiles, step, span, program, config):
    """ENDS: the segments are the relations intra, successive and inter."""
    own, chunk = span.own, program.own.chunk
    successive_step = step + tiles
    inter_step = successive_step + relation_keys(1, own.chunk, chunk, own.last, own.merged, config.BLOCK_N)[1]
    return successive_step, inter_step, inter_step + relation_keys(2, own.chunk, chunk, own.last, own.merged, config.BLOCK_N)[1]


@gluon.jit
def _place(s, stop, place):
    """PLACE: the `where` that step_mask reads."""
    n, first, span = place
    return n, s == first, span


@gluon.jit
def mainloop(q, tile, span, taken, step, q_step, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """MAINLOOP over the relations of 64 queries, whose copies follow each other in the ring of queries."""
    tiles = relation_keys(0, span.own.chunk, program.own.chunk, span.own.last, span.own.merged, config.BLOCK_N)[1]
    return mainloop_in_turn(tiles, span, step, q_step, 1.0, _first, _ends, _place, ME, program, config)


@gluon.jit
def mask(scores, column, span, program, config):
    """MASK within the chunk, counted from its first key. Columns that are no multiples of BLOCK_N would cost registers, and ptxas would
    then process a thread's two rows one after the other in the mainloop."""
    length = span.len_k - span.own.first_key
    return mask_scores(scores, span.own.position - span.own.first_key, column, length, length, 0, 0, False, True)


@gluon.jit
def step_mask(scores, where, program, config):
    """STEP_MASK under SEAMS: masks the keys of a relation's first tile that belong to the next chunk."""
    n, first, span = where
    if (n > 0) & first:
        keys = gl.where(n == 2, span.own.chunk - 1, gl.where(span.own.merged, span.own.chunk, 1)) * program.own.chunk
        j = gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((j <= (keys - 1) % config.BLOCK_N)[None, :], scores, -float("inf"))
    return scores


@gluon.jit
def stats_rows(tile, span, program, config):
    """STATS_ROWS of a tile: rows before the sequence's first row, and rows after the tile's end, do not exist."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    there = (i >= gl.maximum(-span.row, 0)) & (i < span.len_q - span.row)
    return rows_before(tile, program.problem, config.PACKED) + span.row + i, there


@gluon.jit
def finish(acc, inverse, tile, span, at, epilogue_params, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH. Some tiles are stored without TMA: it would also write rows after a dense tile's end, and it traps on rows before row 0."""
    OPTIONS: gl.constexpr = config.OPTIONS
    out = (acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]).to(program.tiles.out.dtype)
    begin = gl.maximum(-span.row, 0)
    end = span.len_q - span.row
    whole = begin < end
    if OPTIONS.PARTIAL:
        whole = (begin == 0) & (begin < end if config.PACKED else end == ROWS)
    if whole:
        write_tile(program.descs.out, out, at, ME, program)
    elif OPTIONS.PARTIAL:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
        columns = gl.arange(0, config.BLOCK_DV, gl.SliceLayout(0, acc.type.layout))
        batch = tile.sequence
        if config.PACKED:
            batch = 0
        rows = batch.to(gl.int64) * program.problem.seqlen_q + (tile.first_q + span.row)
        pointer = program.own.out + rows * program.own.stride_os + tile.head.to(gl.int64) * program.own.stride_oh
        gl.store(pointer + (r * program.own.stride_os)[:, None] + columns[None, :], out,
                 mask=((r >= begin) & (r < end))[:, None] & (columns < OPTIONS.VALUE_DIM)[None, :])


@gluon.jit(do_not_specialize=[*SCALARS, "stride_os", "stride_oh", "chunk", "near", "batches"],
           do_not_specialize_on_alignment=["lse_ptr", "stats_ptr", "cu_seqlens_q", "cu_seqlens_k"])
def dual_chunk_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, counter,
                                 stride_os, stride_oh, stride_stats, n_seqs, seqlen_q, seqlen_k, heads, head_group, chunk, near, group,
                                 batches, n_tiles, VALUE_DIM: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
                                 STAGES: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, PACKED: gl.constexpr,
                                 K_BEFORE_PV: gl.constexpr, SEAMS: gl.constexpr, PARTIAL: gl.constexpr):
    run_tiles(Descriptors(q_desc, k_desc, v_desc, out_desc),
              Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, None, None),
              Rows(1.0, lse_ptr, stats_ptr, stride_stats), Own(chunk, near, batches, out_ptr, stride_os, stride_oh),
              Config(BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, PACKED=PACKED,
                     BRANCHES=1, MASK_IN_LOOP=SEAMS, Q_SLOTS=Q_SLOTS, Q_UNGUARDED=True, INDEX_EARLY=True, K_BEFORE_PV=K_BEFORE_PV,
                     OPTIONS=OwnConfig(VALUE_DIM=VALUE_DIM, SEAMS=SEAMS, PARTIAL=PARTIAL), PRODUCE=produce_segments, NEXT_TILE=next_tile,
                     LOAD_TILE=load_tile, SPAN=span, MAINLOOP=mainloop, MASK=mask, STEP_MASK=step_mask, STATS_ROWS=stats_rows,
                     FINISH=finish))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, queries: Layout, keys: Layout, v: Layout, out: Layout, stride_stats: int,
          options: Options, tile: ForwardTile | None) -> ForwardPlan:
    """The plan for a call's mean length. Its first launch also compiles the kernels for all other lengths."""
    sequences, seqlen_q, _ = options.sizes(out[0], v[0])
    widths = tile_width(queries[0][-1]), tile_width(v[0][-1])
    lengths = (seqlen_q // max(sequences, 1) if options.packed else seqlen_q, *FORWARD_LENGTHS)
    tiles = [hopper_forward_tile(*widths, length, options.chunk) for length in lengths] if tile is None else [tile]
    return compiled_together(lambda tile: _plan_of_tile(tile, device, queries, v, out, stride_stats, options), *tiles)


def _plan_of_tile(tile: ForwardTile, device: torch.device, queries: Layout, v: Layout, out: Layout, stride_stats: int,
                  options: Options) -> ForwardPlan:
    chunk, group, block = options.chunk, out[0][-2] // v[0][-2], tile.block_m
    sequences, seqlen_q, seqlen_k = options.sizes(out[0], v[0])
    if options.packed:
        tiles = seqlen_q // block + seqlen_q // chunk + 3 * (sequences + 1)
    else:
        tiles = sequences * dense_tiles(seqlen_q, seqlen_k, chunk, block)
    scalars = {
        "stride_os": out[1][-3], "stride_oh": out[1][-2], "stride_stats": stride_stats, "chunk": chunk, "near": options.near,
        # an itemsize of 1 for 16-bit numbers lets the heads fill twice L2_GROUP: half or more than that is slower
        "head_group": heads_in_l2(seqlen_k, tile_width(queries[0][-1]) + tile_width(v[0][-1]), 1) * group,
        "batches": queries[0][0] // 3, "n_tiles": out[0][-2] * tiles,
    }
    constants = {
        "VALUE_DIM": v[0][-1], "SEAMS": chunk % tile.block_n != 0,
        # only compiled where there are any, as the offsets of plain stores take a dozen registers all through the mainloop; rows behind the
        # last packed sequence see no key, and their first tile begins before them
        "PARTIAL": options.packed or chunk % block != 0 or (seqlen_k - seqlen_q) % block != 0,
    }
    rows = (out[0][:-1] + queries[0][-1:], ())  # the queries' shape, of which there are three copies
    return plan_forward(dual_chunk_fwd_hopper_kernel, device, options, tile, rows, v, v, scalars, constants)


def dense_tiles(seqlen_q: int, seqlen_k: int, chunk: int, block: int) -> int:
    """Tiles of one head's queries, whose first lies at position seqlen_k - seqlen_q."""
    per_chunk = -(-chunk // block)

    def tile(position: int) -> int:
        return position // chunk * per_chunk + position % chunk // block

    return tile(seqlen_k - 1) - tile(seqlen_k - seqlen_q) + 1


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if not options.causal or options.stages != 7:
        return "causal must be True and stages must be all three"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options,
                   tile: ForwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts."""
    out, lse, stats = outputs(q, v.shape[-1])
    with on_device_of(q):
        for part in parts(q, k, extras, options):
            _launch(*map(part.tokens, (q, k, v, out)), part.rows(lse), part.rows(stats), part.extras, options, tile)
    return out, lse, stats


def _launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stats: Tensor, extras: Extras, options: Options,
            tile: ForwardTile | None) -> None:
    _, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True, near=options.near)
    keys = rotated_copies(k, extras, options, seqlen_q, 1, queries=False)
    plan = _plan(q.device, q.dtype, *map(layout, (queries, keys, v, out)), stats.stride(0), options, tile)
    run(plan, queries, keys, v, out, lse, stats, *extras[3:], tile_counter(q.device))


def run(plan: ForwardPlan, queries: Tensor, keys: Tensor, v: Tensor, out: Tensor, *rest) -> None:
    """Packed copies of keys end where a sequence does; those of queries have a dimension more than such a descriptor."""
    plan.launch(plan._replace(packed=False).queries(queries), plan.keys(keys[0] if plan.packed else keys), plan.values(v), plan.output(out),
                out, *rest)
