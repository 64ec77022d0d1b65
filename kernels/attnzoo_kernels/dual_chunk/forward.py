"""Dual Chunk attention's forward: a program keeps a tile of queries of one chunk and walks the keys once, with one online softmax.

The walk goes through the stages in order. Queries and keys are read from copies rotated for the stages, so that a stage begins by taking
another copy of the same queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import architecture, on_device_of, strides, tma_readable
from attnzoo_kernels._triton.softmax import add_dot, log_sum_exp, score_dot, softmax_stats, softmax_step
from attnzoo_kernels._triton.tiles import first_lse, load_rows, store_rows, tile_source
from attnzoo_kernels.dual_chunk.chunks import chunk_tile, chunks_apart, key_copy, query_copy, stage_range
from attnzoo_kernels.dual_chunk.operands import sources
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import rotated_copies
from attnzoo_kernels.dual_chunk.tiles import forward_tile


@triton.jit
def key_bounds(stage, index, chunk, first_position, last_position, len_k, stages, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys begin .. end of a stage; those up to full_end fill whole tiles that all queries of the tile see."""
    begin, end = stage_range(stage, index, chunk, 0, len_k)
    full_end = end
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
        full_end = tl.minimum(full_end, first_position + 1)
    end = tl.where((stages >> chunks_apart(stage)) & 1 == 1, end, begin)
    full_end = begin + tl.maximum(tl.minimum(full_end, end) - begin, 0) // BLOCK_N * BLOCK_N
    return begin, full_end, end


@triton.jit
def keys_in_stage(j, position, end, CAUSAL: tl.constexpr):
    """Which keys j [1, N] the queries at `position` [M] see among those before `end`."""
    last = position[:, None] * 0 + (end - 1)
    if CAUSAL:
        last = tl.minimum(last, position[:, None])
    return j <= last


@triton.jit
def _attend(acc, top_score, norm, q, k_rows, v_rows, begin, end, key_batch, batch, kv_head, first_k, position, len_k, stride_ks,
            stride_vs, logit_scale,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
            MASKED: tl.constexpr, GUARD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end of one stage."""
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, key_batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = score_dot(q, k, PRECISION)
        if MASKED:
            j = column + tl.arange(0, BLOCK_N)[None, :]
            scores = tl.where(keys_in_stage(j, position, end, CAUSAL), scores, -float("inf"))
        weights, top_score, norm, rescale = softmax_step(
            scores, top_score, norm, logit_scale if PRECISION == "ieee" else 1.0, MASKED, PRECISION == "ieee")
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        acc = add_dot(weights.to(v.dtype), v, acc * rescale[:, None], PRECISION)
    return acc, top_score, norm


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "stages", "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def dual_chunk_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, stride_qb, stride_qs,
                          stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
                          stride_stats, logit_scale, n_seqs, seqlen_q, seqlen_k, heads, batches, chunk, stages, group,
                          HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
                          PACKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    seq, batch, head, index, row, end_row, first_q, len_q, first_k, len_k = chunk_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, chunk, BLOCK_M, True, PACKED, CAUSAL)
    if row >= end_row:
        return
    kv_head = head // group
    first_position = row + len_k - len_q
    position = first_position + tl.arange(0, BLOCK_M)

    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top_score = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    # TMA reads zeros beyond a dense sequence; pointers and packed neighbours need a guard on tiles that may cross the end
    GUARD: tl.constexpr = PACKED or not TMA
    for stage in range(tl.maximum(2 - tl.maximum(index, 0), 0), 3 if CAUSAL else 5):
        begin, full_end, end = key_bounds(stage, index, chunk, first_position, first_position + end_row - row - 1, len_k, stages, CAUSAL,
                                          BLOCK_N)
        query_batch = query_copy(stage) * batches + batch
        q_rows = tile_source(q_source, query_batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
        # [BLOCK_M, BLOCK_D]; the guard passes q through registers, where it stays
        q = load_rows(q_rows, query_batch, head, first_q, row, end_row, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, True, TMA)
        key_batch = key_copy(stage) * batches + batch
        k_rows = tile_source(k_source, key_batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
        acc, top_score, norm = _attend(
            acc, top_score, norm, q, k_rows, v_rows, begin, full_end, key_batch, batch, kv_head, first_k, position, len_k, stride_ks,
            stride_vs, logit_scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, False, False, CAUSAL, PRECISION, TMA)
        acc, top_score, norm = _attend(
            acc, top_score, norm, q, k_rows, v_rows, full_end, end, key_batch, batch, kv_head, first_k, position, len_k, stride_ks,
            stride_vs, logit_scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, True, GUARD, CAUSAL, PRECISION, TMA)

    divisor = tl.where(norm > 0, norm, 1.0)[:, None]
    acc = tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape)) if PRECISION == "ieee" else acc / divisor
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    store_rows(out_rows, acc, row, end_row, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i
    tl.store(lse_ptr + lse_index, log_sum_exp(top_score, norm, PRECISION == "ieee"), mask=i < end_row)
    top_score, norm_stat = softmax_stats(top_score, norm, PRECISION == "ieee")
    tl.store(stats_ptr + lse_index, top_score, mask=i < end_row)
    tl.store(stats_ptr + stride_stats + lse_index, norm_stat, mask=i < end_row)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (layout of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse_shape = (q.shape[1], q.shape[0]) if options.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    stats = lse.new_empty(2, *lse_shape)
    if lse.numel() > 0:
        with on_device_of(q):
            for part in parts(q, k, extras, options):
                _launch(part.tokens(q), part.tokens(k), part.tokens(v), part.tokens(out), part.rows(lse), part.rows(stats), part.extras,
                        options)
    return out, lse, stats


def _launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stats: Tensor, extras: Extras,
            options: Options) -> None:
    sequences, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    flags = options.constants(q.shape, v.shape, q.dtype)
    tile = forward_tile(architecture(q), flags["BLOCK_D"], flags["BLOCK_DV"], q.element_size())
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True)
    keys = rotated_copies(k, extras, options, seqlen_q, options.key_copies, queries=False)
    v = tma_readable(v)
    operands, tma = sources(tile, flags, queries, keys, v)
    programs = options.chunk_programs(q.shape[-2], sequences, seqlen_q, seqlen_k - seqlen_q, tile.block_m)
    dual_chunk_fwd_kernel[(programs,)](
        *operands, out, lse, stats, *extras[3:], *strides(queries), *strides(keys), *strides(v),
        *strides(out), stats.stride(0), options.logit_scale(q.dtype), *options.scalars(q.shape, k.shape), **flags, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, TMA=tma, **tile.launch_options(tma))
