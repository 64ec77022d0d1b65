"""FlashAttention-2's forward: each program keeps a tile of queries and walks the keys with an online softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.dropout import keep_tile
from attnzoo_kernels._triton.launch import architecture, descriptor, strides, tma_takes
from attnzoo_kernels._triton.masks import key_ranges, keys_seen
from attnzoo_kernels._triton.softmax import LOG2E, log_sum_exp, softmax_stats, softmax_step
from attnzoo_kernels._triton.tiles import first_lse, load_rows, program_tile, store_rows, tile_source
from attnzoo_kernels.flash.options import Options
from attnzoo_kernels.flash.scores import modified_scores
from attnzoo_kernels.flash.tiles import forward_tile


@triton.jit
def _attend(acc, top, norm, q, k_rows, v_rows, begin, end, batch, kv_head, first_k, row, len_q, len_k, stride_ks, stride_vs,
            window_left, window_right, softmax_scale, softcap, slope, seed, offset, dropout_head, keep_below,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr,
            HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
            HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        j = column + tl.arange(0, BLOCK_N)[None, :]
        scale = softmax_scale * LOG2E
        if PRESCALE:
            scores, _ = modified_scores(scores, i, j, len_k - len_q, slope, softmax_scale, softcap,
                                        HAS_SOFTCAP, HAS_ALIBI, PRECISION == "ieee")
            scale = 1.0
        if MASKED:
            scores = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), scores, -float("inf"))
        weights, top, norm, rescale = softmax_step(scores, top, norm, scale, MASKED)
        if HAS_DROPOUT:
            keep = keep_tile(seed, offset, dropout_head, row, column, keep_below, BLOCK_M, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, top, norm


@triton.jit(do_not_specialize=["window_left", "window_right", "keep_below", "n_seqs", "seqlen_q", "seqlen_k", "heads",
                                "stride_stats"], do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def flash_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, sinks, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                     rng_state, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                     stride_ob, stride_os, stride_oh, stride_stats, stride_ab, softmax_scale, softcap, keep_prob, window_left, window_right,
                     keep_below, n_seqs, seqlen_q, seqlen_k, heads, group,
                     HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                     PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
                     HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                     HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, Q_REGISTERS: tl.constexpr):
    seq, batch, head, row, first_q, len_q, first_k, len_k = program_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if row >= len_q:
        return
    kv_head = head // group

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA or Q_REGISTERS, TMA)

    # a sink is a first key of weight one that has no value
    sink = -float("inf")
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        if PACKED:
            sink = tl.where(seq == n_seqs, -float("inf"), sink)
    top = tl.zeros([BLOCK_M], tl.float32) + sink
    norm = tl.where(top == -float("inf"), 0.0, 1.0)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + tl.minimum(seq, n_seqs - 1) * stride_ab + head).to(tl.float32)
    seed = 0
    offset = 0
    if HAS_DROPOUT:
        seed = tl.load(rng_state)
        offset = tl.load(rng_state + 1).to(tl.int32)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # TMA reads zeros beyond a dense sequence; pointers and packed neighbours need a guard on the tile that crosses the end
    GUARD_TAIL: tl.constexpr = PACKED or not TMA
    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    for part in tl.static_range(4):
        if (part == 0 and HAS_LEFT) or part == 1 or (part == 2 and (HAS_RIGHT or not GUARD_TAIL)) or (part == 3 and GUARD_TAIL):
            acc, top, norm = _attend(
                acc, top, norm, q, k_rows, v_rows, bounds[part], bounds[part + 1], batch, kv_head, first_k, row, len_q, len_k,
                stride_ks, stride_vs, window_left, window_right, softmax_scale, softcap, slope, seed, offset, seq * heads + head, keep_below,
                HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, part != 1, part == 3, HAS_LEFT, HAS_RIGHT, PRESCALE,
                HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, PRECISION, TMA)

    acc = acc / (tl.where(norm > 0, norm, 1.0) * keep_prob)[:, None]
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    store_rows(out_rows, acc, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i
    tl.store(lse_ptr + lse_index, log_sum_exp(top, norm), mask=i < len_q)
    top, log_norm = softmax_stats(top, norm)
    tl.store(stats_ptr + lse_index, top, mask=i < len_q)
    tl.store(stats_ptr + stride_stats + lse_index, log_norm, mask=i < len_q)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (layout of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax."""
    sequences, seqlen_q, seqlen_k = options.sizes(q, k)
    heads, flags = q.shape[-2], options.flags(q, v)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, seqlen_q) if options.packed else (sequences, heads, seqlen_q), dtype=torch.float32, device=q.device)
    stats = lse.new_empty(2, *lse.shape)
    if lse.numel() == 0:
        return out, lse, stats
    tile = forward_tile(architecture(q), flags["BLOCK_D"], flags["BLOCK_DV"], q.element_size(), causal=options.window_right >= 0)
    tma = tile.tma and all(tma_takes(x) for x in (q, k, v))
    sources = (q, k, v)
    if tma:
        sources = (descriptor(q, tile.block_m, flags["BLOCK_D"]), descriptor(k, tile.block_n, flags["BLOCK_D"]),
                   descriptor(v, tile.block_n, flags["BLOCK_DV"]))
    flash_fwd_kernel[(options.programs(heads, seqlen_q, sequences, tile.block_m),)](
        *sources, out, lse, stats, sinks, *options.tensors, *strides(q), *strides(k), *strides(v), *strides(out), lse.numel(), *options.scalars(q, k),
        **flags,
        HAS_SINKS=sinks is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TMA=tma,
        Q_REGISTERS=tile.q_registers, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out, lse, stats
