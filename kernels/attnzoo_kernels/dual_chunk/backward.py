"""Dual Chunk attention's backward, as in `_triton.backward`, over the rotated copies that the forward reads.

One maximum, sum and delta per row serve all relations. dQ is summed in the frame (rotary position) of the current relation and rotated to
the next frame between relations, so one accumulator is enough. Keys have the same position in all causal relations, so dK is rotated once.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, add_members, backward_dq, dkdv_step, dq_step, load_row_stats
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row, tma_readable, tma_takes_layout
from attnzoo_kernels._triton.mainloop import RowStats, load_query_rows, range_loop
from attnzoo_kernels._triton.softmax import LN2
from attnzoo_kernels._triton.tiles import Operand, Shape, head_rows, load_own, load_rows, own_rows, store_own
from attnzoo_kernels.dual_chunk.chunks import chunk_tile, chunks_apart, query_copy, relation_range
from attnzoo_kernels.dual_chunk.hooks import Chunked, first_relation, relation_loops, seen
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import query_factor, rotated_copies, scaled_gradient, stage_position, store_pairs, turn_back
from attnzoo_kernels.dual_chunk.tiles import dkdv_tile, dq_tile


class Rotation(NamedTuple):
    """What rotating gradients back needs: tables of angles, largest positions, and the queries' multipliers."""

    cos: Any
    sin: Any
    top: Any
    far: Any
    multiplier: Any
    stride_multiplier: Any


@triton.jit
def _dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dq_step(state, x, own, at, position, edge, MASKED, GUARD, seen)


@triton.jit
def _dq_loops(state, x, own):
    dq, exact_delta = state
    inside = tl.minimum(own.position + tl.arange(0, x.shape.BLOCK_M) - own.index * own.chunk, own.chunk - 1)
    for relation in range(first_relation(own), 3 if own.CAUSAL else 5):
        dq, exact_delta = relation_loops(_dq_step, (dq, exact_delta), x, own, relation, False)
        # rotate from this relation's position to the next one's, and at the end to zero
        turn = stage_position(query_copy(relation), inside, own.chunk, own.rotation.top, own.rotation.far)
        turn -= tl.where(relation == (2 if own.CAUSAL else 4), 0,
                         stage_position(query_copy(relation + 1), inside, own.chunk, own.rotation.top, own.rotation.far))
        dq = turn_back(dq, own.rotation.cos, own.rotation.sin, turn, own.ROTARY_DIM, x.shape.BLOCK_M, x.shape.BLOCK_D)
    return dq, exact_delta


@triton.jit
def _store_dq(rows, dq, softmax_scale, place, own, shape):
    """FINISH of dQ: applies the factor of the queries, and stores dQ."""
    factor = query_factor(own.rotation.multiplier, place.batch, place.first, place.row, place.length, own.rotation.stride_multiplier,
                          softmax_scale, own.HAS_MULTIPLIER, shape.BLOCK_M)
    a, b = tl.split(scaled_gradient(dq, factor[:, None]).reshape(shape.BLOCK_M, shape.BLOCK_D // 2, 2))
    store_pairs(rows.source, a, b, place.row, place.length, rows.stride, shape.HEAD_DIM, own.ROTARY_DIM, shape.BLOCK_M,
                shape.BLOCK_D, own.INTERLEAVED)


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "top", "far", "stages", "stride_stats"],
            do_not_specialize_on_alignment=["multiplier", "cu_seqlens_q", "cu_seqlens_k", "stats_ptr", "grad_lse_ptr"])
def dual_chunk_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, row_stats_ptr, dq_ptr, cos, sin,
                             multiplier, cu_seqlens_q, cu_seqlens_k, q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
                             stride_stats, stride_rows, stride_mb, softmax_scale, logit_scale, top, far, n_seqs, seqlen_q, seqlen_k, heads,
                             batches, chunk, stages, group, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
                             BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
                             ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
                             STATS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    place, index, len_q = chunk_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, chunk, BLOCK_M, True, PACKED,
                                     CAUSAL)
    # the sequence's last tile pads its last block of statistics
    stats_end = tl.where(place.length == len_q, tl.cdiv(len_q, STATS_BLOCK) * STATS_BLOCK, place.length)
    backward_dq(place, Operand(q_source, *q_strides), Operand(k_source, *k_strides), Operand(v_source, *v_strides),
                Operand(out_ptr, *o_strides), Operand(do_source, *do_strides), Operand(dq_ptr, *dq_strides), grad_lse_ptr, stats_ptr, None,
                row_stats_ptr, stride_stats, stride_rows, logit_scale if PRECISION == "ieee" else 1.0, softmax_scale,
                Chunked(Operand(q_source, *q_strides), Operand(k_source, *k_strides), batches,
                        index, chunk, stages, place.row + place.other_length - len_q, group, CAUSAL, ROTARY_DIM, INTERLEAVED,
                        HAS_MULTIPLIER, Rotation(cos, sin, top, far, multiplier, stride_mb)), n_seqs, seqlen_q, heads, group,
                Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dq_loops, HAS_GRAD_LSE, False,
                STATS_BLOCK, _store_dq, stats_end)


class KeyChunk(NamedTuple):
    """What a query head's steps in one relation need: the Operand of the copies with `batches` batch rows each, the first row of the next
    chunk (seam), the relation's rows as _query_bounds gives them, and the first row that sees each key."""

    queries: Any
    batches: Any
    seam: Any
    chunk: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    first_seen: Any  # [BLOCK_N]
    CAUSAL: Any
    ONE_LOOP: Any


class QueryRange(NamedTuple):
    """What the steps over queries need: the Operand of the copies with `batches` batch rows each, and the first rows of the next two chunks
    (seam and seam + chunk)."""

    queries: Any
    batches: Any
    seam: Any
    chunk: Any
    end: Any  # rows from here on get weight zero: under ONE_LOOP by padding, else by _load_stats
    first_seen: Any  # [BLOCK_N], the first row that sees each key
    ONE_LOOP: Any


@triton.jit
def _seen_from(x, own, i, j, position):
    """MASK of dK/dV."""
    return i >= own.first_seen[:, None]


@triton.jit
def _load_copy(x, own, at, GUARD: tl.constexpr):
    """LOAD_Q: the copy of the queries that is rotated for their relation to this tile's keys."""
    copy = (at >= own.seam).to(tl.int32) + (at >= own.seam + own.chunk).to(tl.int32)
    rows = head_rows(own.queries, copy * own.batches + x.place.batch, x.head, x.place.other_first, x.place.other_length, x.shape.TMA)
    return load_query_rows(x, rows, at, GUARD)


@triton.jit
def _load_stats(x, own, at):
    """LOAD_STATS: rows from own.end on get weight zero."""
    stats = load_row_stats(x.row_stats, x.stride_rows, at, x.shape.BLOCK_M, x.shape.PRECISION)
    if not own.ONE_LOOP:
        inside = at + tl.arange(0, x.shape.BLOCK_M) < own.end
        stats = RowStats(tl.where(inside, stats.lse_log2, float("inf")), tl.where(inside, stats.row_sum, 1.0),
                         tl.where(inside, stats.delta, 0.0))
    return stats


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dkdv_step(state, x, own, at, position, edge, MASKED, GUARD, _seen_from, FROM_STATS=x.shape.PRECISION != "ieee",
                     LOAD_Q=_load_copy, LOAD_STATS=_load_stats)


@triton.jit
def _dkdv_loops(state, x, own):
    GUARD: tl.constexpr = x.shape.PACKED or not x.shape.TMA
    for part in tl.static_range(3):
        # one masked loop is faster than two: with two, ptxas waits for every matrix product before the next
        if (part == 0 and own.CAUSAL and not own.ONE_LOOP) or part == 1 or (part == 2 and (GUARD or not own.ONE_LOOP)):
            state = range_loop(
                _dkdv_step, state, x,
                QueryRange(own.queries, own.batches, own.seam, own.chunk,
                           own.full_begin if part == 0 else own.full_end if part == 1 else own.end, own.first_seen, own.ONE_LOOP),
                own.begin if part == 0 else own.full_begin if part == 1 else own.full_end,
                own.full_begin if part == 0 else own.full_end if part == 1 else own.end, 0, 0, x.shape.BLOCK_M,
                "all" if own.CAUSAL and (own.ONE_LOOP or part != 1) else "none", part != 1 and GUARD, None)
    return state


@triton.jit
def _query_bounds(relation, index, chunk, column, last_key, offset, len_k, relations, CAUSAL: tl.constexpr, ONE_LOOP: tl.constexpr,
                  GUARD: tl.constexpr, BLOCK_M: tl.constexpr):
    """(begin, full_begin, full_end, end): the rows of queries in one of the five relations to the keys' chunk. Under ONE_LOOP, relation 2
    stands for all rows from there on.

    Tiles from full_begin to full_end lie inside the sequence and, unless ONE_LOOP, see all keys of the tile.
    """
    begin, end = relation_range(relation, index, chunk, offset, len_k)
    if CAUSAL:
        begin = tl.maximum(begin, column)
    if ONE_LOOP:
        end = tl.where(relation == 2, len_k, end)
    else:
        end = tl.where((relations >> chunks_apart(relation)) & 1 == 1, end, begin)
    end = tl.maximum(end, begin)
    begin -= offset
    end -= offset
    full_begin = begin
    full_end = end
    if ONE_LOOP:
        begin = begin // BLOCK_M * BLOCK_M  # a multiple already; this tells the compiler
        full_begin = begin
    elif CAUSAL:
        full_begin = tl.minimum(begin + tl.cdiv(tl.maximum(last_key - offset - begin, 0), BLOCK_M) * BLOCK_M, end)
    if GUARD or not ONE_LOOP:
        full_end = full_begin + tl.maximum(end - full_begin, 0) // BLOCK_M * BLOCK_M
    return begin, full_begin, full_end, end


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "top", "far", "stages"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def dual_chunk_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cos, sin, cu_seqlens_q, cu_seqlens_k,
                               q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, stride_rows, logit_scale, top, far,
                               n_seqs, seqlen_q, seqlen_k, heads, batches, chunk, stages, group, HEAD_DIM: tl.constexpr,
                               BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
                               CAUSAL: tl.constexpr, PRECISION: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
                               ONE_LOOP: tl.constexpr, STATS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               TMA: tl.constexpr):
    place, index, len_k = chunk_tile(cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, chunk, BLOCK_N, False, PACKED,
                                     False)
    if place.row >= place.length:
        return
    offset = len_k - place.other_length
    inside = tl.minimum(place.row + tl.arange(0, BLOCK_N) - index * chunk, chunk - 1)
    first_seen = place.row + tl.arange(0, BLOCK_N) - offset
    # [BLOCK_N, BLOCK_DV]
    v = load_own(Operand(v_source, *v_strides), place, VALUE_DIM, BLOCK_N, BLOCK_DV, TMA)
    if CAUSAL:
        # [BLOCK_N, BLOCK_D]
        k = load_own(Operand(k_source, *k_strides), place, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # under ONE_LOOP no tile of queries straddles a seam: those of the keys' own chunk and of all behind are one loop
    for relation in range(2 if CAUSAL else 0, 3 if ONE_LOOP else 5):
        begin, full_begin, full_end, end = _query_bounds(
            relation, index, chunk, place.row, place.length - 1, offset, len_k, stages, CAUSAL, ONE_LOOP, PACKED or not TMA, BLOCK_M)
        if not CAUSAL:
            k_rows = head_rows(Operand(k_source, *k_strides), query_copy(relation) * batches + place.batch,
                               place.head, place.first, place.length, TMA)
            k = load_rows(k_rows, place.row, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)
        dk, dv = add_members(
            (dk, dv), k, v, place, Operand(q_source, *q_strides),
            Operand(do_source, *do_strides), row_stats_ptr, stride_rows, logit_scale if PRECISION == "ieee" else 1.0,
            KeyChunk(Operand(q_source, *q_strides), batches, (index + 1) * chunk - offset, chunk, begin, full_begin,
                     full_end, end, first_seen, CAUSAL, ONE_LOOP),
            n_seqs, seqlen_q, heads, group, group, Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA),
            _dkdv_loops, STATS_BLOCK)
        if not CAUSAL:
            # from the keys' position in this relation to that in the next one
            turn = stage_position(query_copy(relation), inside, chunk, top, far)
            turn -= stage_position(query_copy(relation + 1), inside, chunk, top, far)
            dk = turn_back(dk, cos, sin, turn, ROTARY_DIM, BLOCK_N, BLOCK_D)
    dk = turn_back(dk, cos, sin, inside, ROTARY_DIM, BLOCK_N, BLOCK_D)
    a, b = tl.split((dk * (logit_scale if PRECISION == "ieee" else LN2)).reshape(BLOCK_N, BLOCK_D // 2, 2))
    dk_rows = own_rows(Operand(dk_ptr, *dk_strides), place, False)
    store_pairs(dk_rows.source, a, b, place.row, place.length, dk_strides[1], HEAD_DIM, ROTARY_DIM, BLOCK_N, BLOCK_D, INTERLEAVED)
    store_own(Operand(dv_ptr, *dv_strides), dv, place, VALUE_DIM, BLOCK_N, BLOCK_DV)


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, q: torch.Size, k: torch.Size,
             sources: tuple[Layout, ...], out: Layout, dq: Layout, stats_stride: int, rows_stride: int, options: Options) -> Launch:
    sequences, seqlen_q, seqlen_k = options.sizes(q, k)
    constants = options.constants(q, out[0], dtype) | options.rotation_constants(q[-1])
    tile = dq_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    tma = tile.tma and aligned and all(tma_takes_layout(*x, dtype.itemsize) for x in sources)
    constants |= {"HAS_MULTIPLIER": options.has_multiplier, "HAS_GRAD_LSE": has_grad_lse, "STATS_BLOCK": STATS_BLOCK,
                  "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": int(tma)}
    scalars = (*operand_strides(*sources[:3], out, sources[3], dq), stats_stride, rows_stride, options.multiplier_stride or 0,
               options.softmax_scale, options.logit_scale(dtype), options.top, options.far, *options.scalars(q, k))
    return Launch(dual_chunk_bwd_dq_kernel, options.chunk_programs(q[-2], sequences, seqlen_q, seqlen_k - seqlen_q, tile.block_m), scalars,
                  constants, tile.num_warps, tile.num_stages, read_blocks(tile, constants, 4),
                  tile.launch_options(tma))


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: torch.Size, k: torch.Size, sources: tuple[Layout, ...],
               dk: Layout, dv: Layout, rows_stride: int, options: Options) -> Launch:
    sequences, _, seqlen_k = options.sizes(q, k)
    constants = options.constants(q, dv[0], dtype) | options.rotation_constants(q[-1])
    tile = dkdv_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    tma = tile.tma and aligned and all(tma_takes_layout(*x, dtype.itemsize) for x in sources)
    constants |= {"ONE_LOOP": options.tiles_end_at_seams(q, k, tile.block_m, tile.block_n), "STATS_BLOCK": STATS_BLOCK,
                  "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": int(tma)}
    scalars = (*operand_strides(*sources, dk, dv), rows_stride, options.logit_scale(dtype), options.top, options.far,
               *options.scalars(q, k))
    return Launch(dual_chunk_bwd_dkdv_kernel, options.chunk_programs(k[-2], sequences, seqlen_k, 0, tile.block_n), scalars, constants,
                  tile.num_warps, tile.num_stages, read_blocks(tile, constants, 3), tile.launch_options(tma))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    extras: Extras, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV for the gradients of output and LSE."""
    grad_out = row_by_row(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    with on_device_of(q):
        for part in parts(q, k, extras, options):
            _launch_part(*map(part.tokens, (grad_out, q, k, v, out, dq, dk, dv)), *map(part.rows, (grad_lse, stats)),
                         part.extras, options)
    return dq, dk, dv


def _launch_part(grad_out, q, k, v, out, dq, dk, dv, grad_lse, stats, extras, options) -> None:
    sequences, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    # a tile of queries that begins at a seam may end behind the last block
    blocks = options.programs(q.shape[-2], seqlen_q, sequences, STATS_BLOCK) + 1
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, blocks * STATS_BLOCK)
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True)
    keys = rotated_copies(k, extras, options, seqlen_q, options.key_copies, queries=False)
    v, grad_out = tma_readable(v), tma_readable(grad_out)
    sources = (queries, keys, v, grad_out)
    layouts = tuple(map(layout, sources))
    if stats.numel() > 0:
        launch = _dq_plan(q.device, q.dtype, are_aligned(*sources, out, dq, *extras[:2]),
                          grad_lse is not None, q.shape, k.shape, layouts, layout(out),
                          layout(dq), stats.stride(0), row_stats.stride(0), options)
        launch(queries, keys, v, out, grad_out, grad_lse, stats, row_stats, dq, *extras)
    if k.numel() > 0:
        launch = _dkdv_plan(q.device, q.dtype, are_aligned(*sources, dk, dv, *extras[:2]), q.shape, k.shape, layouts, layout(dk),
                            layout(dv),
                            row_stats.stride(0), options)
        launch(*sources, row_stats, dk, dv, *extras[:2], *extras[3:])
