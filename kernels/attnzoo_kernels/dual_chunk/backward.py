"""Dual Chunk attention's backward in two kernels, each recomputing the weights: dQ by rows of queries, dK and dV by rows of keys.

One maximum, sum and delta per row serve all stages. Both kernels read the rotated copies that the forward reads. dQ is gathered in the
frame of the stage that is being walked and turned from frame to frame between stages, so that one accumulator holds the sum; keys keep one
position in all causal stages, so that dK turns once. No atomic addition: every gradient repeats bit by bit. The dQ kernel runs first and
leaves each row's statistics for the second one: the forward's maximum and sum, and delta = rowsum(dO * O) - dLSE.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, first_stats_row, transposed_dot
from attnzoo_kernels._triton.launch import architecture, on_device_of, strides, tma_readable
from attnzoo_kernels._triton.softmax import LN2, add_dot, repeat_weights, score_dot
from attnzoo_kernels._triton.tiles import first_lse, load_rows, store_rows, tile_source
from attnzoo_kernels.dual_chunk.chunks import chunk_tile, chunks_apart, key_copy, query_copy, stage_range
from attnzoo_kernels.dual_chunk.forward import key_bounds, keys_in_stage
from attnzoo_kernels.dual_chunk.operands import sources
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import query_factor, rotated_copies, scaled_gradient, stage_position, store_pairs, turn_back
from attnzoo_kernels.dual_chunk.tiles import dkdv_tile, dq_tile


@triton.jit
def _add_dq(dq, exact_delta, q, do, top_score, norm_stat, delta, k_rows, v_rows, begin, end, key_batch, batch, kv_head, first_k,
            position, len_k, stride_ks, stride_vs, logit_scale,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
            MASKED: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end of one stage."""
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, key_batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = score_dot(q, k, PRECISION)
        weights = repeat_weights(
            scores, logit_scale if PRECISION == "ieee" else 1.0, top_score[:, None], norm_stat[:, None], PRECISION == "ieee")
        if MASKED:
            j = column + tl.arange(0, BLOCK_N)[None, :]
            weights = tl.where(keys_in_stage(j, position, end, CAUSAL), weights, 0.0)
        # [BLOCK_M, BLOCK_N]
        dweights = score_dot(do, v, PRECISION)
        if PRECISION == "ieee":
            exact_delta += tl.sum(weights * dweights, 1)
        dscores = weights * (dweights - delta[:, None])
        # [BLOCK_M, BLOCK_D]
        dq = add_dot(dscores.to(k.dtype), k, dq, PRECISION)
    return dq, exact_delta


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "top", "far", "stages", "stride_stats"],
            do_not_specialize_on_alignment=["multiplier", "cu_seqlens_q", "cu_seqlens_k", "stats_ptr", "grad_lse_ptr"])
def dual_chunk_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, row_stats_ptr, dq_ptr, cos, sin,
                             multiplier, cu_seqlens_q, cu_seqlens_k, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
                             stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
                             stride_dqb, stride_dqs, stride_dqh, stride_stats, stride_rows, stride_mb, softmax_scale, logit_scale, top,
                             far, n_seqs, seqlen_q, seqlen_k, heads, batches, chunk, stages, group,
                             HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
                             PACKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, ROTARY_DIM: tl.constexpr,
                             INTERLEAVED: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
                             STATS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    seq, batch, head, index, row, end_row, first_q, len_q, first_k, len_k = chunk_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, chunk, BLOCK_M, True, PACKED, CAUSAL)
    if row >= end_row:
        return
    kv_head = head // group
    i = row + tl.arange(0, BLOCK_M)
    first_position = row + len_k - len_q
    position = first_position + tl.arange(0, BLOCK_M)
    inside = tl.minimum(position - index * chunk, chunk - 1)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i

    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    # [BLOCK_M, BLOCK_DV]; the guard passes dO through registers, where it stays: the shared memory saved lets a second program in
    do = load_rows(do_rows, batch, head, first_q, row, end_row, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, True, TMA)
    out = load_rows(out_rows, batch, head, first_q, row, end_row, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV, True, False)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    grad_lse = tl.zeros([BLOCK_M], tl.float32)
    if HAS_GRAD_LSE:
        grad_lse = tl.load(grad_lse_ptr + lse_index, mask=i < end_row, other=0.0).to(tl.float32)
        delta -= grad_lse
    top_score = tl.load(stats_ptr + lse_index, mask=i < end_row, other=float("inf"))
    norm_stat = tl.load(stats_ptr + stride_stats + lse_index, mask=i < end_row, other=1.0)
    row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK) + i
    # the sequence's last tile pads its last block
    kept = (i < end_row) | ((end_row == len_q) & (i < tl.cdiv(len_q, STATS_BLOCK) * STATS_BLOCK))
    if PRECISION == "ieee":
        tl.store(row_stats + 2 * stride_rows, norm_stat, mask=kept)
    else:
        top_score += norm_stat
    tl.store(row_stats, top_score, mask=kept)

    GUARD: tl.constexpr = PACKED or not TMA
    # float32 walks the keys twice: delta from the weights themselves cancels where rowsum(dO * O), summed in another order, would not
    for sweep in tl.static_range(2 if PRECISION == "ieee" else 1):
        if sweep == 1:
            delta = exact_delta - grad_lse  # noqa: F821, static_range unrolls the first sweep before it
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        exact_delta = tl.zeros([BLOCK_M], tl.float32)
        for stage in range(tl.maximum(2 - tl.maximum(index, 0), 0), 3 if CAUSAL else 5):
            begin, full_end, end = key_bounds(stage, index, chunk, first_position, first_position + end_row - row - 1, len_k, stages,
                                              CAUSAL, BLOCK_N)
            query_batch = query_copy(stage) * batches + batch
            q_rows = tile_source(q_source, query_batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
            # [BLOCK_M, BLOCK_D]
            q = load_rows(q_rows, query_batch, head, first_q, row, end_row, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)
            key_batch = key_copy(stage) * batches + batch
            k_rows = tile_source(k_source, key_batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
            dq, exact_delta = _add_dq(
                dq, exact_delta, q, do, top_score, norm_stat, delta, k_rows, v_rows, begin, full_end, key_batch, batch, kv_head,
                first_k, position, len_k, stride_ks, stride_vs, logit_scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, False,
                False, CAUSAL, PRECISION, TMA)
            dq, exact_delta = _add_dq(
                dq, exact_delta, q, do, top_score, norm_stat, delta, k_rows, v_rows, full_end, end, key_batch, batch, kv_head, first_k,
                position, len_k, stride_ks, stride_vs, logit_scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, True, GUARD,
                CAUSAL, PRECISION, TMA)
            # from this stage's position to the next one's, in the end to zero
            turn = stage_position(query_copy(stage), inside, chunk, top, far)
            if CAUSAL:
                turn -= tl.where(stage == 2, 0, stage_position(query_copy(stage + 1), inside, chunk, top, far))
            else:
                turn -= tl.where(stage == 4, 0, stage_position(query_copy(stage + 1), inside, chunk, top, far))
            dq = turn_back(dq, cos, sin, turn, ROTARY_DIM, BLOCK_M, BLOCK_D)
    tl.store(row_stats + stride_rows, delta, mask=kept)
    factor = query_factor(multiplier, batch, first_q, row, end_row, stride_mb, softmax_scale, HAS_MULTIPLIER, BLOCK_M)
    a, b = tl.split(scaled_gradient(dq, factor[:, None]).reshape(BLOCK_M, BLOCK_D // 2, 2))
    dq_rows = tile_source(dq_ptr, batch, head, first_q, stride_dqb, stride_dqs, stride_dqh, False)
    store_pairs(dq_rows, a, b, row, end_row, stride_dqs, HEAD_DIM, ROTARY_DIM, BLOCK_M, BLOCK_D, INTERLEAVED)


@triton.jit
def _row_stats(row_stats, stride_rows, i, end, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """Maximum, delta and, in float32, sum of rows i; under GUARD those from `end` on have weight zero."""
    norm_stat = 1.0
    if GUARD:
        top_score = tl.load(row_stats + i, mask=i < end, other=float("inf"))
        delta = tl.load(row_stats + stride_rows + i, mask=i < end, other=0.0)
        if PRECISION == "ieee":
            norm_stat = tl.load(row_stats + 2 * stride_rows + i, mask=i < end, other=1.0)
    else:
        top_score = tl.load(row_stats + i)
        delta = tl.load(row_stats + stride_rows + i)
        if PRECISION == "ieee":
            norm_stat = tl.load(row_stats + 2 * stride_rows + i)
    return top_score, delta, norm_stat


@triton.jit
def _add_dkdv(dk, dv, k, v, q_source, do_rows, row_stats, stride_rows, begin, end, seam, chunk, batches, batch, head, first_q, keys,
              len_q, stride_qb, stride_qs, stride_qh, stride_dos, logit_scale,
              HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
              MASKED: tl.constexpr, GUARD: tl.constexpr, ONE_WALK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
              TMA: tl.constexpr):
    """Walk the queries begin .. end; tiles are transposed. seam: the first row of the next chunk; keys: the first row that sees each key,
    [BLOCK_N]. Rows from `end` on get weight zero, by padding under ONE_WALK, else by the mask."""
    # an empty range may begin far behind the sequence, but under ONE_WALK
    next_stats = _row_stats(row_stats, stride_rows, begin + tl.arange(0, BLOCK_M), end, not ONE_WALK, PRECISION)
    for row in tl.range(begin, end, BLOCK_M):
        query_batch = ((row >= seam).to(tl.int32) + (row >= seam + chunk).to(tl.int32)) * batches + batch
        q_rows = tile_source(q_source, query_batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
        # [BLOCK_M, BLOCK_D]
        q = load_rows(q_rows, query_batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, GUARD, TMA)
        i = row + tl.arange(0, BLOCK_M)
        top_score, delta, norm_stat = next_stats
        next_stats = _row_stats(row_stats, stride_rows, i + BLOCK_M, end, not ONE_WALK, PRECISION)
        # [BLOCK_N, BLOCK_M]
        if PRECISION == "ieee":
            scores = transposed_dot(k, q, PRECISION)
            weights = repeat_weights(scores, logit_scale, top_score[None, :], norm_stat[None, :], True)
            if MASKED and CAUSAL:
                weights = tl.where(i[None, :] >= keys[:, None], weights, 0.0)
            dscores = weights * (transposed_dot(v, do, PRECISION) - delta[None, :])
        else:
            # products start from what would be subtracted from them: half of the statistics' registers are free meanwhile
            nothing = tl.zeros([keys.shape[0], BLOCK_M], tl.float32)
            weights = tl.exp2(tl.dot(k, tl.trans(q), nothing - top_score[None, :]))
            if MASKED and CAUSAL:
                weights = tl.where(i[None, :] >= keys[:, None], weights, 0.0)
            dscores = weights * tl.dot(v, tl.trans(do), nothing - delta[None, :])
        # [BLOCK_N, BLOCK_DV]
        dv = add_dot(weights.to(do.dtype), do, dv, PRECISION)
        # [BLOCK_N, BLOCK_D]
        dk = add_dot(dscores.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _query_bounds(step, index, chunk, column, last_key, offset, len_k, stages, CAUSAL: tl.constexpr, ONE_WALK: tl.constexpr,
                  GUARD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows begin .. end of the queries in the step-th of the five stages as the keys' chunk sees them, under ONE_WALK from the third on.

    Tiles from full_begin to full_end lie inside the sequence and see all keys of the tile, the latter not under ONE_WALK.
    """
    begin, end = stage_range(step, index, chunk, offset, len_k)
    if CAUSAL:
        begin = tl.maximum(begin, column)
    if ONE_WALK:
        end = tl.where(step == 2, len_k, end)
    else:
        end = tl.where((stages >> chunks_apart(step)) & 1 == 1, end, begin)
    end = tl.maximum(end, begin)
    begin -= offset
    end -= offset
    full_begin = begin
    full_end = end
    if ONE_WALK:
        begin = begin // BLOCK_M * BLOCK_M  # it is a multiple; the compiler knows it now
        full_begin = begin
    elif CAUSAL:
        full_begin = tl.minimum(begin + tl.cdiv(tl.maximum(last_key - offset - begin, 0), BLOCK_M) * BLOCK_M, end)
    if GUARD or not ONE_WALK:
        full_end = full_begin + tl.maximum(end - full_begin, 0) // BLOCK_M * BLOCK_M
    return begin, full_begin, full_end, end


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "top", "far", "stages"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def dual_chunk_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cos, sin, cu_seqlens_q,
                               cu_seqlens_k, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
                               stride_vh, stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb,
                               stride_dvs, stride_dvh, stride_rows, logit_scale, top, far, n_seqs, seqlen_q, seqlen_k, heads, batches,
                               chunk, stages, group,
                               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
                               PACKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, ROTARY_DIM: tl.constexpr,
                               INTERLEAVED: tl.constexpr, ONE_WALK: tl.constexpr, STATS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
                               BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    kv_heads = heads // group
    seq, batch, kv_head, index, column, end_column, first_k, len_k, first_q, len_q = chunk_tile(
        cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, kv_heads, chunk, BLOCK_N, False, PACKED, False)
    if column >= end_column:
        return
    offset = len_k - len_q
    inside = tl.minimum(column + tl.arange(0, BLOCK_N) - index * chunk, chunk - 1)
    keys = column + tl.arange(0, BLOCK_N) - offset
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_N, BLOCK_DV]
    v = load_rows(v_rows, batch, kv_head, first_k, column, end_column, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, not TMA, TMA)
    if CAUSAL:
        k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, batch, kv_head, first_k, column, end_column, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    GUARD: tl.constexpr = PACKED or not TMA
    # under ONE_WALK no tile of queries straddles a seam: those of the keys' own chunk and of all behind make one walk
    for step in range(2 if CAUSAL else 0, 3 if ONE_WALK else 5):
        begin, full_begin, full_end, end = _query_bounds(
            step, index, chunk, column, end_column - 1, offset, len_k, stages, CAUSAL, ONE_WALK, GUARD, BLOCK_M)
        if not CAUSAL:
            key_batch = query_copy(step) * batches + batch
            k_rows = tile_source(k_source, key_batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
            k = load_rows(k_rows, key_batch, kv_head, first_k, column, end_column, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)
        for member in range(group):
            head = kv_head * group + member
            do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
            row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK)
            for part in tl.static_range(3):
                # one masked loop is faster than two: with two, ptxas waits for every matrix product before the next
                if (part == 0 and CAUSAL and not ONE_WALK) or part == 1 or (part == 2 and (GUARD or not ONE_WALK)):
                    part_begin = begin if part == 0 else full_begin if part == 1 else full_end
                    part_end = full_begin if part == 0 else full_end if part == 1 else end
                    dk, dv = _add_dkdv(
                        dk, dv, k, v, q_source, do_rows, row_stats, stride_rows, part_begin, part_end, (index + 1) * chunk - offset,
                        chunk, batches, batch, head, first_q, keys, len_q, stride_qb, stride_qs, stride_qh, stride_dos, logit_scale,
                        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, ONE_WALK or part != 1, part != 1 and GUARD, ONE_WALK, CAUSAL,
                        PRECISION, TMA)
        if not CAUSAL:
            # from the keys' position in this step to that in the next one
            turn = stage_position(query_copy(step), inside, chunk, top, far)
            turn -= stage_position(query_copy(step + 1), inside, chunk, top, far)
            dk = turn_back(dk, cos, sin, turn, ROTARY_DIM, BLOCK_N, BLOCK_D)
    dk = turn_back(dk, cos, sin, inside, ROTARY_DIM, BLOCK_N, BLOCK_D)
    a, b = tl.split((dk * (logit_scale if PRECISION == "ieee" else LN2)).reshape(BLOCK_N, BLOCK_D // 2, 2))
    dk_rows = tile_source(dk_ptr, batch, kv_head, first_k, stride_dkb, stride_dks, stride_dkh, False)
    store_pairs(dk_rows, a, b, column, end_column, stride_dks, HEAD_DIM, ROTARY_DIM, BLOCK_N, BLOCK_D, INTERLEAVED)
    dv_rows = tile_source(dv_ptr, batch, kv_head, first_k, stride_dvb, stride_dvs, stride_dvh, False)
    store_rows(dv_rows, dv, column, end_column, stride_dvs, VALUE_DIM, BLOCK_N, BLOCK_DV)


def launch_dq(grad_out: Tensor, grad_lse: Tensor | None, queries: Tensor, keys: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              stats: Tensor, row_stats: Tensor, dq: Tensor, extras: Extras, options: Options) -> None:
    """Write dq and the row statistics that launch_dkdv reads; `queries` and `keys` are the rotated copies of q and k."""
    if stats.numel() == 0:
        return
    sequences, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    flags = options.constants(q.shape, out.shape, q.dtype)
    tile = dq_tile(architecture(q), flags["BLOCK_D"], flags["BLOCK_DV"], q.element_size())
    operands, tma = sources(tile, flags, queries, keys, v, grad_out)
    programs = options.chunk_programs(q.shape[-2], sequences, seqlen_q, seqlen_k - seqlen_q, tile.block_m)
    rotation = options.rotation_constants(q.shape[-1])
    dual_chunk_bwd_dq_kernel[(programs,)](
        *operands[:3], out, operands[3], grad_lse, stats, row_stats, dq, *extras, *strides(queries), *strides(keys), *strides(v),
        *strides(out), *strides(grad_out), *strides(dq), stats.stride(0), row_stats.stride(0), options.multiplier_stride or 0,
        options.softmax_scale, options.logit_scale(q.dtype), options.top, options.far, *options.scalars(q.shape, k.shape),
        **flags | rotation,
        HAS_MULTIPLIER=options.has_multiplier, HAS_GRAD_LSE=grad_lse is not None, STATS_BLOCK=STATS_BLOCK,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TMA=tma, **tile.launch_options(tma))


def launch_dkdv(grad_out: Tensor, queries: Tensor, keys: Tensor, q: Tensor, k: Tensor, v: Tensor, row_stats: Tensor, dk: Tensor,
                dv: Tensor, extras: Extras, options: Options) -> None:
    """Write dk and dv from launch_dq's row statistics."""
    if k.numel() == 0:
        return
    sequences, _, seqlen_k = options.sizes(q.shape, k.shape)
    flags = options.constants(q.shape, dv.shape, q.dtype)
    tile = dkdv_tile(architecture(q), flags["BLOCK_D"], flags["BLOCK_DV"], q.element_size())
    operands, tma = sources(tile, flags, queries, keys, v, grad_out)
    programs = options.chunk_programs(k.shape[-2], sequences, seqlen_k, 0, tile.block_n)
    dual_chunk_bwd_dkdv_kernel[(programs,)](
        *operands, row_stats, dk, dv, *extras[:2], *extras[3:], *strides(queries),
        *strides(keys), *strides(v), *strides(grad_out), *strides(dk), *strides(dv), row_stats.stride(0), options.logit_scale(q.dtype),
        options.top, options.far, *options.scalars(q.shape, k.shape), **flags | options.rotation_constants(q.shape[-1]),
        ONE_WALK=options.tiles_end_at_seams(q.shape, k.shape, tile.block_m, tile.block_n), STATS_BLOCK=STATS_BLOCK, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, TMA=tma, **tile.launch_options(tma))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    extras: Extras, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV for the gradients of output and LSE."""
    if grad_out.shape[-1] > 1 and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()  # autograd may hand over an expanded gradient, which no kernel can read row by row
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
    # the walk reads a tile ahead
    blocks = options.programs(q.shape[-2], seqlen_q, sequences, STATS_BLOCK) + 1
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, blocks * STATS_BLOCK)
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True)
    keys = rotated_copies(k, extras, options, seqlen_q, options.key_copies, queries=False)
    v, grad_out = tma_readable(v), tma_readable(grad_out)
    launch_dq(grad_out, grad_lse, queries, keys, q, k, v, out, stats, row_stats, dq, extras, options)
    launch_dkdv(grad_out, queries, keys, q, k, v, row_stats, dk, dv, extras, options)
