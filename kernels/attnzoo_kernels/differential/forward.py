"""Differential attention's forward: each program keeps a tile of both paths' queries and walks the keys once, with two online softmaxes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import architecture, descriptor, strides, tma_takes
from attnzoo_kernels._triton.masks import key_ranges, keys_seen
from attnzoo_kernels._triton.softmax import add_dot, in_units, log_sum_exp, score_dot, softmax_stats, softmax_step
from attnzoo_kernels._triton.tiles import first_lse, load_rows, program_tile, store_rows, tile_source
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import forward_tile


@triton.jit
def _attend(acc1, top1, norm1, acc2, top2, norm2, q1, q2, k1_rows, k2_rows, v_rows, begin, end, batch, kv_head, first_k, row, len_q, len_k,
            stride_k1s, stride_k2s, stride_vs, window_left, window_right, softmax_scale,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, SHARED_K: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr,
            HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    scale = in_units(softmax_scale, PRECISION == "ieee")
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k1 = load_rows(k1_rows, batch, kv_head, first_k, column, len_k, stride_k1s, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        k2 = k1
        if not SHARED_K:
            k2 = load_rows(k2_rows, batch, kv_head, first_k, column, len_k, stride_k2s, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores1 = score_dot(q1, k1, PRECISION)
        scores2 = score_dot(q2, k2, PRECISION)
        if MASKED:
            j = column + tl.arange(0, BLOCK_N)[None, :]
            seen = keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            scores1 = tl.where(seen, scores1, -float("inf"))
            scores2 = tl.where(seen, scores2, -float("inf"))
        # [BLOCK_N, BLOCK_DV], once for both paths
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        weights1, top1, norm1, rescale1 = softmax_step(scores1, top1, norm1, scale, MASKED, PRECISION == "ieee")
        acc1 = add_dot(weights1.to(v.dtype), v, acc1 * rescale1[:, None], PRECISION)
        weights2, top2, norm2, rescale2 = softmax_step(scores2, top2, norm2, scale, MASKED, PRECISION == "ieee")
        acc2 = add_dot(weights2.to(v.dtype), v, acc2 * rescale2[:, None], PRECISION)
    return acc1, top1, norm1, acc2, top2, norm2


@triton.jit
def _divided(sums, norm, PRECISION: tl.constexpr):
    """sums [M, N] / norm [M, 1], rounded to nearest in float32."""
    if PRECISION == "ieee":
        quotient = tl.div_rn(sums, norm + sums * 0.0)
    else:
        quotient = sums / norm
    return quotient


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_lse", "stride_lb",
                                "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def differential_fwd_kernel(q1_source, q2_source, k1_source, k2_source, v_source, lam_ptr, out_ptr, out2_ptr, lse_ptr, stats_ptr,
                            cu_seqlens_q, cu_seqlens_k, stride_q1b, stride_q1s, stride_q1h, stride_q2b, stride_q2s, stride_q2h,
                            stride_k1b, stride_k1s, stride_k1h, stride_k2b, stride_k2s, stride_k2h, stride_vb, stride_vs, stride_vh,
                            stride_lb, stride_ls, stride_lh, stride_ob, stride_os, stride_oh, stride_lse, softmax_scale, window_left,
                            window_right, n_seqs, seqlen_q, seqlen_k, heads, group,
                            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                            SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                            PRECISION: tl.constexpr, SAVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
                            Q_REGISTERS: tl.constexpr):
    _, batch, head, row, first_q, len_q, first_k, len_k = program_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if row >= len_q:
        return
    kv_head = head // group

    q1_rows = tile_source(q1_source, batch, head, first_q, stride_q1b, stride_q1s, stride_q1h, TMA)
    q2_rows = tile_source(q2_source, batch, head, first_q, stride_q2b, stride_q2s, stride_q2h, TMA)
    k1_rows = tile_source(k1_source, batch, kv_head, first_k, stride_k1b, stride_k1s, stride_k1h, TMA)
    k2_rows = tile_source(k2_source, batch, kv_head, first_k, stride_k2b, stride_k2s, stride_k2h, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_M, BLOCK_D]
    q1 = load_rows(q1_rows, batch, head, first_q, row, len_q, stride_q1s, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA or Q_REGISTERS, TMA)
    q2 = load_rows(q2_rows, batch, head, first_q, row, len_q, stride_q2s, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA or Q_REGISTERS, TMA)

    top1 = tl.full([BLOCK_M], -float("inf"), tl.float32)
    top2 = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm1 = tl.zeros([BLOCK_M], tl.float32)
    norm2 = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # TMA reads zeros beyond a dense sequence; pointers and packed neighbours need a guard on the tile that crosses the end
    GUARD_TAIL: tl.constexpr = PACKED or not TMA
    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    for part in tl.static_range(4):
        if (part == 0 and HAS_LEFT) or part == 1 or (part == 2 and (HAS_RIGHT or not GUARD_TAIL)) or (part == 3 and GUARD_TAIL):
            acc1, top1, norm1, acc2, top2, norm2 = _attend(
                acc1, top1, norm1, acc2, top2, norm2, q1, q2, k1_rows, k2_rows, v_rows, bounds[part], bounds[part + 1], batch, kv_head,
                first_k, row, len_q, len_k, stride_k1s, stride_k2s, stride_vs, window_left, window_right, softmax_scale, HEAD_DIM,
                VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SHARED_K, part != 1, part == 3, HAS_LEFT, HAS_RIGHT, PRECISION, TMA)

    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i
    tl.store(lse_ptr + lse_index, log_sum_exp(top1, norm1, PRECISION == "ieee"), mask=i < len_q)
    tl.store(lse_ptr + stride_lse + lse_index, log_sum_exp(top2, norm2, PRECISION == "ieee"), mask=i < len_q)
    lam_rows = tile_source(lam_ptr, batch, head, first_q, stride_lb, stride_ls, stride_lh, False)
    # behind the last sequence, where no query sees a key, there may be anything
    lam = tl.load(lam_rows + i.to(tl.int64) * stride_ls, mask=(i < len_q) & (len_k > 0), other=0.0)
    acc1 = _divided(acc1, tl.where(norm1 > 0, norm1, 1.0)[:, None], PRECISION)
    acc2 = _divided(acc2, tl.where(norm2 > 0, norm2, 1.0)[:, None], PRECISION)
    out = acc1 - lam[:, None] * acc2
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    store_rows(out_rows, out, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
    if SAVE:
        if PRECISION != "ieee":
            out2_rows = tile_source(out2_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
            store_rows(out2_rows, acc2, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
        top1, norm_stat1 = softmax_stats(top1, norm1, PRECISION == "ieee")
        top2, norm_stat2 = softmax_stats(top2, norm2, PRECISION == "ieee")
        tl.store(stats_ptr + lse_index, top1, mask=i < len_q)
        tl.store(stats_ptr + stride_lse + lse_index, norm_stat1, mask=i < len_q)
        tl.store(stats_ptr + 2 * stride_lse + lse_index, top2, mask=i < len_q)
        tl.store(stats_ptr + 3 * stride_lse + lse_index, norm_stat2, mask=i < len_q)


def launch_forward(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
                   cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, save: bool,
                   options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (layout of q1, value width), both LSEs (2, ...), and for the backward, empty unless `save`: the second path's output, which
    float32 does not need, and the statistics (4, ...) of both softmaxes.
    """
    sequences, seqlen_q, seqlen_k = options.sizes(q1.shape, k1.shape)
    heads, flags = q1.shape[-2], options.constants(q1.shape, v.shape, q1.dtype, shared_k=k2 is None)
    out = torch.empty(*q1.shape[:-1], v.shape[-1], dtype=q1.dtype, device=q1.device)
    out2 = torch.empty_like(out) if save and q1.dtype != torch.float32 else out.new_empty(0)
    rows = (heads, seqlen_q) if options.packed else (sequences, heads, seqlen_q)
    lse = torch.empty(2, *rows, dtype=torch.float32, device=q1.device)
    stats = lse.new_empty(4, *rows) if save else lse.new_empty(0)
    if lse.numel() == 0:
        return out, lse, out2, stats
    tile = forward_tile(architecture(q1), flags["BLOCK_D"], flags["BLOCK_DV"], q1.element_size(), causal=options.causal)
    sources = (q1, q2, k1, k1 if k2 is None else k2, v)
    tensor_strides = [stride for x in sources for stride in strides(x)]
    tma = tile.tma and all(map(tma_takes, sources))
    if tma:
        shapes = ((tile.block_m, "BLOCK_D"), (tile.block_m, "BLOCK_D"), (tile.block_n, "BLOCK_D"), (tile.block_n, "BLOCK_D"),
                  (tile.block_n, "BLOCK_DV"))
        sources = [descriptor(x, block, flags[width]) for x, (block, width) in zip(sources, shapes, strict=True)]
    differential_fwd_kernel[(options.programs(heads, seqlen_q, sequences, tile.block_m),)](
        *sources, lam, out, out2, lse, stats, cu_seqlens_q, cu_seqlens_k, *tensor_strides, *lambda_strides(lam, options.packed),
        *strides(out), lse.stride(0), *options.scalars(q1.shape, k1.shape), **flags, SAVE=save, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        TMA=tma, Q_REGISTERS=tile.q_registers, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out, lse, out2, stats
