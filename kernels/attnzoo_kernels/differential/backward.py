"""Differential attention's backward in two kernels, each recomputing both paths' weights: dQ1 and dQ2 by rows of queries, dK1, dK2 and dV
by rows of keys.

With O2 = P2 V, r = rowsum(dO * O2), dP = dO Vᵀ and lambda by row:

    dS1 = P1 * (dP - rowsum(dO * O) - lambda r)      dS2 = -lambda P2 * (dP - r)      dV = (P1 - lambda P2)ᵀ dO      dlambda = -r

dP is one product for both paths. There is no atomic addition: every gradient repeats bit by bit. The dQ kernel runs first and leaves each
row's statistics for the second one, padded to whole tiles (maxima +inf, the rest 0), so that it reads them without a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, first_stats_row, transposed_dot
from attnzoo_kernels._triton.launch import architecture, descriptor, strides, tma_takes
from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.softmax import add_dot, in_units, repeat_weights, score_dot
from attnzoo_kernels._triton.tiles import first_lse, load_rows, program_tile, store_rows, tile_source
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import Tile, dkdv_tile, dq_tile


@triton.jit
def _add_dq(dq1, dq2, exact_delta, exact_r, q1, q2, do, top1, norm_stat1, top2, norm_stat2, delta, r, k1_rows, k2_rows, v_rows, begin, end,
            batch, kv_head, first_k, row, len_q, len_k, stride_k1s, stride_k2s, stride_vs, window_left, window_right, softmax_scale,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, SHARED_K: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr,
            HAS_RIGHT: tl.constexpr, EXACT_DELTA: tl.constexpr, EXACT_R: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end. dq2 lacks the factor -lambda of its rows."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    scale = in_units(softmax_scale, PRECISION == "ieee")
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k1 = load_rows(k1_rows, batch, kv_head, first_k, column, len_k, stride_k1s, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        k2 = k1
        if not SHARED_K:
            k2 = load_rows(k2_rows, batch, kv_head, first_k, column, len_k, stride_k2s, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores1 = score_dot(q1, k1, PRECISION)
        scores2 = score_dot(q2, k2, PRECISION)
        weights1 = repeat_weights(scores1, scale, top1[:, None], norm_stat1[:, None], PRECISION == "ieee")
        weights2 = repeat_weights(scores2, scale, top2[:, None], norm_stat2[:, None], PRECISION == "ieee")
        if MASKED:
            j = column + tl.arange(0, BLOCK_N)[None, :]
            seen = keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            weights1 = tl.where(seen, weights1, 0.0)
            weights2 = tl.where(seen, weights2, 0.0)
        # [BLOCK_M, BLOCK_N], once for both paths
        dweights = score_dot(do, v, PRECISION)
        if EXACT_DELTA:
            exact_delta += tl.sum(weights1 * dweights, 1)
        if EXACT_R:
            exact_r += tl.sum(weights2 * dweights, 1)
        # [BLOCK_M, BLOCK_D]
        dq1 = add_dot((weights1 * (dweights - delta[:, None])).to(k1.dtype), k1, dq1, PRECISION)
        dq2 = add_dot((weights2 * (dweights - r[:, None])).to(k2.dtype), k2, dq2, PRECISION)
    return dq1, dq2, exact_delta, exact_r


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_stats", "stride_lb",
                                "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k", "stats_ptr", "r_ptr"])
def differential_bwd_dq_kernel(q1_source, q2_source, k1_source, k2_source, v_source, do_source, lam_ptr, out_ptr, out2_ptr, stats_ptr,
                               r_ptr, row_stats_ptr, dq1_ptr, dq2_ptr, cu_seqlens_q, cu_seqlens_k, stride_q1b, stride_q1s, stride_q1h,
                               stride_q2b, stride_q2s, stride_q2h, stride_k1b, stride_k1s, stride_k1h, stride_k2b, stride_k2s, stride_k2h,
                               stride_vb, stride_vs, stride_vh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls, stride_lh,
                               stride_ob, stride_os, stride_oh, stride_dq1b, stride_dq1s, stride_dq1h, stride_dq2b, stride_dq2s,
                               stride_dq2h, stride_stats, stride_rows, softmax_scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k,
                               heads, group,
                               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                               SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                               PRECISION: tl.constexpr, EXACT_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    seq, batch, head, row, first_q, len_q, first_k, len_k = program_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if row >= len_q:
        return
    kv_head = head // group
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i

    q1_rows = tile_source(q1_source, batch, head, first_q, stride_q1b, stride_q1s, stride_q1h, TMA)
    q2_rows = tile_source(q2_source, batch, head, first_q, stride_q2b, stride_q2s, stride_q2h, TMA)
    k1_rows = tile_source(k1_source, batch, kv_head, first_k, stride_k1b, stride_k1s, stride_k1h, TMA)
    k2_rows = tile_source(k2_source, batch, kv_head, first_k, stride_k2b, stride_k2s, stride_k2h, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
    # [BLOCK_M, BLOCK_DV]
    do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, not TMA, TMA)
    lam_rows = tile_source(lam_ptr, batch, head, first_q, stride_lb, stride_ls, stride_lh, False)
    # behind the last sequence, where no query sees a key, there may be anything
    lam = tl.load(lam_rows + i.to(tl.int64) * stride_ls, mask=(i < len_q) & (len_k > 0), other=0.0)
    delta = tl.zeros([BLOCK_M], tl.float32)
    r = tl.zeros([BLOCK_M], tl.float32)
    if PRECISION != "ieee":
        out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
        out = load_rows(out_rows, batch, head, first_q, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV, True, False)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        out2_rows = tile_source(out2_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
        out2 = load_rows(out2_rows, batch, head, first_q, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV, True, False)
        r = tl.sum(out2.to(tl.float32) * do.to(tl.float32), 1)
        delta += lam * r
    top1 = tl.load(stats_ptr + lse_index, mask=i < len_q, other=float("inf"))
    norm_stat1 = tl.load(stats_ptr + stride_stats + lse_index, mask=i < len_q, other=1.0)
    top2 = tl.load(stats_ptr + 2 * stride_stats + lse_index, mask=i < len_q, other=float("inf"))
    norm_stat2 = tl.load(stats_ptr + 3 * stride_stats + lse_index, mask=i < len_q, other=1.0)
    row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK) + i
    if PRECISION == "ieee":
        tl.store(row_stats + 5 * stride_rows, norm_stat1)
        tl.store(row_stats + 6 * stride_rows, norm_stat2)
    else:
        top1 += norm_stat1
        top2 += norm_stat2
    tl.store(row_stats, top1)
    tl.store(row_stats + stride_rows, top2)
    tl.store(row_stats + 2 * stride_rows, lam)
    # [BLOCK_M, BLOCK_D]
    q1 = load_rows(q1_rows, batch, head, first_q, row, len_q, stride_q1s, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)
    q2 = load_rows(q2_rows, batch, head, first_q, row, len_q, stride_q2s, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)

    GUARD_TAIL: tl.constexpr = PACKED or not TMA
    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    exact_delta = tl.zeros([BLOCK_M], tl.float32)
    exact_r = tl.zeros([BLOCK_M], tl.float32)
    # float32 walks the keys twice, first for the statistics: from the weights themselves they cancel where rowsum(dO * O) would not
    for sweep in tl.static_range(2 if PRECISION == "ieee" else 1):
        if sweep == 1:
            delta = exact_delta
            r = exact_r
        dq1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in tl.static_range(4):
            if (part == 0 and HAS_LEFT) or part == 1 or (part == 2 and (HAS_RIGHT or not GUARD_TAIL)) or (part == 3 and GUARD_TAIL):
                dq1, dq2, exact_delta, exact_r = _add_dq(
                    dq1, dq2, exact_delta, exact_r, q1, q2, do, top1, norm_stat1, top2, norm_stat2, delta, r, k1_rows, k2_rows, v_rows,
                    bounds[part], bounds[part + 1], batch, kv_head, first_k, row, len_q, len_k, stride_k1s, stride_k2s, stride_vs,
                    window_left, window_right, softmax_scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SHARED_K,
                    part != 1, part == 3, HAS_LEFT, HAS_RIGHT, PRECISION == "ieee" and sweep == 0,
                    (EXACT_R or PRECISION == "ieee") and sweep == 0, PRECISION, TMA)
    # what was read behind the sequence's end must not reach the second kernel
    tl.store(row_stats + 3 * stride_rows, tl.where(i < len_q, delta, 0.0))
    tl.store(row_stats + 4 * stride_rows, tl.where(i < len_q, r, 0.0))
    dq1_rows = tile_source(dq1_ptr, batch, head, first_q, stride_dq1b, stride_dq1s, stride_dq1h, False)
    dq2_rows = tile_source(dq2_ptr, batch, head, first_q, stride_dq2b, stride_dq2s, stride_dq2h, False)
    store_rows(dq1_rows, dq1 * softmax_scale, row, len_q, stride_dq1s, HEAD_DIM, BLOCK_M, BLOCK_D)
    store_rows(dq2_rows, dq2 * (-lam * softmax_scale)[:, None], row, len_q, stride_dq2s, HEAD_DIM, BLOCK_M, BLOCK_D)
    if EXACT_R:
        tl.store(r_ptr + lse_index, exact_r, mask=i < len_q)


@triton.jit
def _add_dkdv(dk1, dk2, dv, k1, k2, v, q1_rows, q2_rows, do_rows, row_stats, stride_rows, begin, end, batch, head, first_q, column, len_q,
              len_k, stride_q1s, stride_q2s, stride_dos, window_left, window_right, softmax_scale,
              HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, SHARED_K: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr,
              HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the queries begin .. end; tiles are transposed, keys by queries. SHARED_K sums both paths' dK in dk1."""
    j = column + tl.arange(0, BLOCK_N)[:, None]
    scale = in_units(softmax_scale, PRECISION == "ieee")
    for row in tl.range(begin, end, BLOCK_M):
        # [BLOCK_M, BLOCK_D]
        q1 = load_rows(q1_rows, batch, head, first_q, row, len_q, stride_q1s, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA)
        q2 = load_rows(q2_rows, batch, head, first_q, row, len_q, stride_q2s, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, GUARD, TMA)
        stats = row_stats + row + tl.arange(0, BLOCK_M)
        top1 = tl.load(stats)[None, :]
        top2 = tl.load(stats + stride_rows)[None, :]
        lam = tl.load(stats + 2 * stride_rows)[None, :]
        delta = tl.load(stats + 3 * stride_rows)[None, :]
        r = tl.load(stats + 4 * stride_rows)[None, :]
        norm_stat1 = 1.0
        norm_stat2 = 1.0
        if PRECISION == "ieee":
            norm_stat1 = tl.load(stats + 5 * stride_rows)[None, :]
            norm_stat2 = tl.load(stats + 6 * stride_rows)[None, :]
        # [BLOCK_N, BLOCK_M]
        scores1 = transposed_dot(k1, q1, PRECISION)
        scores2 = transposed_dot(k2, q2, PRECISION)
        weights1 = repeat_weights(scores1, scale, top1, norm_stat1, PRECISION == "ieee")
        weights2 = repeat_weights(scores2, scale, top2, norm_stat2, PRECISION == "ieee") * lam
        if MASKED:
            i = row + tl.arange(0, BLOCK_M)[None, :]
            seen = queries_seeing(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            weights1 = tl.where(seen, weights1, 0.0)
            weights2 = tl.where(seen, weights2, 0.0)
        # [BLOCK_N, BLOCK_DV]; the difference is rounded once
        dv = add_dot((weights1 - weights2).to(do.dtype), do, dv, PRECISION)
        # [BLOCK_N, BLOCK_M], once for both paths
        dweights = transposed_dot(v, do, PRECISION)
        # [BLOCK_N, BLOCK_D]
        dk1 = add_dot((weights1 * (dweights - delta)).to(q1.dtype), q1, dk1, PRECISION)
        dscores2 = (weights2 * (r - dweights)).to(q2.dtype)
        if SHARED_K:
            dk1 = add_dot(dscores2, q2, dk1, PRECISION)
        else:
            dk2 = add_dot(dscores2, q2, dk2, PRECISION)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_dkdv_kernel(q1_source, q2_source, k1_source, k2_source, v_source, do_source, row_stats_ptr, dk1_ptr, dk2_ptr, dv_ptr,
                                 cu_seqlens_q, cu_seqlens_k, stride_q1b, stride_q1s, stride_q1h, stride_q2b, stride_q2s, stride_q2h,
                                 stride_k1b, stride_k1s, stride_k1h, stride_k2b, stride_k2s, stride_k2h, stride_vb, stride_vs, stride_vh,
                                 stride_dob, stride_dos, stride_doh, stride_dk1b, stride_dk1s, stride_dk1h, stride_dk2b, stride_dk2s,
                                 stride_dk2h, stride_dvb, stride_dvs, stride_dvh, stride_rows, softmax_scale, window_left, window_right,
                                 n_seqs, seqlen_q, seqlen_k, heads, group,
                                 HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                 SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                                 PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr,
                                 TMA: tl.constexpr):
    kv_heads = heads // group
    seq, batch, kv_head, column, first_k, len_k, first_q, len_q = program_tile(
        cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, kv_heads, BLOCK_N, PACKED, False)
    if column >= len_k:
        return
    k1_rows = tile_source(k1_source, batch, kv_head, first_k, stride_k1b, stride_k1s, stride_k1h, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_N, BLOCK_D]
    k1 = load_rows(k1_rows, batch, kv_head, first_k, column, len_k, stride_k1s, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)
    k2 = k1
    if not SHARED_K:
        k2_rows = tile_source(k2_source, batch, kv_head, first_k, stride_k2b, stride_k2s, stride_k2h, TMA)
        k2 = load_rows(k2_rows, batch, kv_head, first_k, column, len_k, stride_k2s, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)
    # [BLOCK_N, BLOCK_DV]
    v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, not TMA, TMA)

    dk1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # a number where it is not used
    dk2 = 0.0 if SHARED_K else tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    GUARD_TAIL: tl.constexpr = PACKED or not TMA
    bounds = query_ranges(column, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    for member in range(group):
        head = kv_head * group + member
        q1_rows = tile_source(q1_source, batch, head, first_q, stride_q1b, stride_q1s, stride_q1h, TMA)
        q2_rows = tile_source(q2_source, batch, head, first_q, stride_q2b, stride_q2s, stride_q2h, TMA)
        do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
        row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK)
        for part in tl.static_range(4):
            if (part == 0 and HAS_RIGHT) or part == 1 or (part == 2 and HAS_LEFT) or (part == 3 and GUARD_TAIL):
                dk1, dk2, dv = _add_dkdv(
                    dk1, dk2, dv, k1, k2, v, q1_rows, q2_rows, do_rows, row_stats, stride_rows, bounds[part], bounds[part + 1], batch, head,
                    first_q, column, len_q, len_k, stride_q1s, stride_q2s, stride_dos, window_left, window_right, softmax_scale, HEAD_DIM,
                    VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SHARED_K, part != 1, part == 3, HAS_LEFT, HAS_RIGHT, PRECISION, TMA)
    dk1_rows = tile_source(dk1_ptr, batch, kv_head, first_k, stride_dk1b, stride_dk1s, stride_dk1h, False)
    dv_rows = tile_source(dv_ptr, batch, kv_head, first_k, stride_dvb, stride_dvs, stride_dvh, False)
    store_rows(dk1_rows, dk1 * softmax_scale, column, len_k, stride_dk1s, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_rows, dv, column, len_k, stride_dvs, VALUE_DIM, BLOCK_N, BLOCK_DV)
    if not SHARED_K:
        dk2_rows = tile_source(dk2_ptr, batch, kv_head, first_k, stride_dk2b, stride_dk2s, stride_dk2h, False)
        store_rows(dk2_rows, dk2 * softmax_scale, column, len_k, stride_dk2s, HEAD_DIM, BLOCK_N, BLOCK_D)


def _sources(tile: Tile, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, grad_out: Tensor,
             flags: dict) -> tuple[bool, list, list]:
    """Whether the tensors are read by TMA, what the kernel then takes for them, and their strides."""
    tensors = [q1, q2, k1, k1 if k2 is None else k2, v, grad_out]
    tensor_strides = [stride for x in tensors for stride in strides(x)]
    if not (tile.tma and all(map(tma_takes, tensors))):
        return False, tensors, tensor_strides
    rows = [tile.block_m] * 2 + [tile.block_n] * 3 + [tile.block_m]
    widths = [flags["BLOCK_D"]] * 4 + [flags["BLOCK_DV"]] * 2
    return True, [descriptor(*of) for of in zip(tensors, rows, widths, strict=True)], tensor_strides


def launch_dq(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor, out2: Tensor,
              stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, exact_r: bool,
              options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ1, dQ2, the row statistics that launch_dkdv reads, and r without the rounding of O2, like an LSE (empty unless exact_r)."""
    sequences, seqlen_q, _ = options.sizes(q1.shape, k1.shape)
    heads, flags = q1.shape[-2], options.constants(q1.shape, v.shape, q1.dtype, shared_k=k2 is None)
    dq1, dq2 = q1.new_empty(q1.shape), q2.new_empty(q2.shape)
    r = torch.empty_like(stats[0]) if exact_r else stats.new_empty(0)
    kinds, rows = 7 if q1.dtype == torch.float32 else 5, options.programs(heads, seqlen_q, sequences, STATS_BLOCK) * STATS_BLOCK
    row_stats = stats.new_empty(kinds, rows)
    if stats.numel() == 0:
        return dq1, dq2, row_stats, r
    tile = dq_tile(architecture(q1), flags["BLOCK_D"], flags["BLOCK_DV"], q1.element_size(), causal=options.causal)
    tma, sources, tensor_strides = _sources(tile, q1, q2, k1, k2, v, grad_out, flags)
    differential_bwd_dq_kernel[(options.programs(heads, seqlen_q, sequences, tile.block_m),)](
        *sources, lam, out, out2, stats, r, row_stats, dq1, dq2, cu_seqlens_q, cu_seqlens_k, *tensor_strides,
        *lambda_strides(lam, options.packed), *strides(out), *strides(dq1), *strides(dq2), stats.stride(0), row_stats.stride(0),
        *options.scalars(q1.shape, k1.shape), **flags,
        EXACT_R=exact_r, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STATS_BLOCK=STATS_BLOCK, TMA=tma, num_warps=tile.num_warps,
        num_stages=tile.num_stages)
    return dq1, dq2, row_stats, r


def launch_dkdv(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, row_stats: Tensor,
                cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dK1 (of both paths where they share K), dK2 (else empty) and dV from the row statistics of launch_dq."""
    sequences, _, seqlen_k = options.sizes(q1.shape, k1.shape)
    kv_heads, flags = k1.shape[-2], options.constants(q1.shape, v.shape, q1.dtype, shared_k=k2 is None)
    dk1, dv = k1.new_empty(k1.shape), v.new_empty(v.shape)
    dk2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    if k1.numel() == 0:
        return dk1, dk2, dv
    tile = dkdv_tile(architecture(q1), flags["BLOCK_D"], flags["BLOCK_DV"], q1.element_size(), causal=options.causal)
    tma, sources, tensor_strides = _sources(tile, q1, q2, k1, k2, v, grad_out, flags)
    differential_bwd_dkdv_kernel[(options.programs(kv_heads, seqlen_k, sequences, tile.block_n),)](
        *sources, row_stats, dk1, dk2, dv, cu_seqlens_q, cu_seqlens_k, *tensor_strides, *strides(dk1), *strides(dk1 if k2 is None else dk2),
        *strides(dv), row_stats.stride(0), *options.scalars(q1.shape, k1.shape), **flags, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STATS_BLOCK=STATS_BLOCK, TMA=tma, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return dk1, dk2, dv


def reduce_like(rows: Tensor, lam: Tensor, packed: bool) -> Tensor:
    """Sum (batch, heads, seqlen) or (heads, total) to lambda's shape, in a fixed order."""
    if lam.dim() > 1:
        return rows.transpose(-1, -2).contiguous()
    by_head = rows.sum(-1 if packed else (0, 2), dtype=torch.float64)
    return (by_head if lam.dim() == 1 else by_head.sum()).to(lam.dtype)


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool,
                    options: Options) -> tuple[Tensor, ...]:
    """dQ1, dQ2, dK1, dK2 (empty where K is shared), dV and dlambda (empty unless needs_dlam)."""
    if grad_out.shape[-1] > 1 and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()  # autograd may hand over an expanded gradient, which no kernel can read row by row
    dq1, dq2, row_stats, r = launch_dq(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam,
                                        options)
    dk1, dk2, dv = launch_dkdv(grad_out, q1, q2, k1, k2, v, row_stats, cu_seqlens_q, cu_seqlens_k, options)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return dq1, dq2, dk1, dk2, dv, dlam
