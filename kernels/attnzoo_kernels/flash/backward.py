"""FlashAttention-2's backward in two kernels, each recomputing the weights from the LSE: dQ by rows of queries, dK and dV by rows of keys.

Two more products than one fused loop, and in return no atomic addition: every gradient repeats bit by bit. The dQ kernel runs first and
leaves delta = rowsum(dO * O) - dLSE for the second one, and with it the LSE in base 2, both with rows up to a whole tile (LSE +inf, delta 0),
so that the second one reads them without a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.dropout import keep_tile
from attnzoo_kernels._triton.launch import architecture, block_width, descriptor, strides, tma_takes
from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.softmax import LOG2E, base2_lse
from attnzoo_kernels._triton.tiles import find_tile, load_rows, store_rows, tile_source
from attnzoo_kernels.dropout import keep_threshold
from attnzoo_kernels.flash.scores import modified_scores
from attnzoo_kernels.flash.tiles import dkdv_tile, dq_tile


STATS_BLOCK = tl.constexpr(128)


@triton.jit
def first_row_of_stats(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED: tl.constexpr):
    """Where a sequence's row statistics begin: sequences lie at multiples of STATS_BLOCK, packed ones by find_tile's slots."""
    if PACKED:
        slots = seqlen_q // STATS_BLOCK + n_seqs + 1
        row = (head.to(tl.int64) * slots + first_q // STATS_BLOCK + seq) * STATS_BLOCK
    else:
        row = (seq * heads + head).to(tl.int64) * (tl.cdiv(seqlen_q, STATS_BLOCK) * STATS_BLOCK)
    return row


@triton.jit
def _dq_step(dq, q, do, lse, delta, k_source, v_source, begin, end, batch, kv_head, first_k, row, len_q, len_k, stride_ks, stride_vs,
             window_left, window_right, softmax_scale, softcap, slope, seed, offset, dropout_head, keep_below, keep_prob,
             HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
             HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_source, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED and (PACKED or not TMA), TMA)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_source, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, MASKED and (PACKED or not TMA), TMA)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        j = column + tl.arange(0, BLOCK_N)[None, :]
        slope_of_cap = 1.0
        scale = softmax_scale * LOG2E
        if PRESCALE:
            scores, slope_of_cap = modified_scores(scores, i, j, len_k - len_q, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI,
                                                   PRECISION == "ieee")
            scale = 1.0
        weights = tl.exp2(scores * scale - lse[:, None])
        if MASKED:
            weights = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), weights, 0.0)
        # [BLOCK_M, BLOCK_N]
        dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if HAS_DROPOUT:
            keep = keep_tile(seed, offset, dropout_head, row, column, keep_below, BLOCK_M, BLOCK_N)
            dweights = tl.where(keep, dweights / keep_prob, 0.0)
        dscores = weights * (dweights - delta[:, None])
        if HAS_SOFTCAP:
            dscores *= slope_of_cap
        # [BLOCK_M, BLOCK_D]
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["window_left", "window_right", "keep_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "delta_ptr", "grad_lse_ptr"])
def flash_bwd_dq_kernel(q_source, k_source, v_source, out_source, do_source, grad_lse_ptr, lse_ptr, delta_ptr, row_stats, dq_ptr, cu_seqlens_q,
                        cu_seqlens_k, alibi_slopes, rng_state, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
                        stride_vs, stride_vh, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs,
                        stride_dqh, stride_stats, stride_ab, softmax_scale, softcap, keep_prob, window_left, window_right, keep_below, n_seqs, seqlen_q,
                        seqlen_k, heads, group,
                        HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                        HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
                        HAS_DROPOUT: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    if PACKED:
        slots = seqlen_q // BLOCK_M + n_seqs + 1
        head = tl.program_id(0) // slots
        seq, tile, first_q, len_q = find_tile(cu_seqlens_q, tl.program_id(0) % slots, n_seqs, seqlen_q, BLOCK_M)
        first_k = tl.load(cu_seqlens_k + seq)
        len_k = tl.load(cu_seqlens_k + tl.minimum(seq + 1, n_seqs)) - first_k
        batch = 0
        tiles = tl.cdiv(len_q, BLOCK_M)
        if tile >= tiles:
            return
        row_of_lse = head.to(tl.int64) * seqlen_q + first_q
    else:
        tiles = tl.cdiv(seqlen_q, BLOCK_M)
        tile = tl.program_id(0) % tiles
        head = tl.program_id(0) // tiles % heads
        batch = tl.program_id(0) // tiles // heads
        seq, first_q, first_k, len_q, len_k = batch, 0, 0, seqlen_q, seqlen_k
        row_of_lse = (batch * heads + head).to(tl.int64) * seqlen_q
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    row = tile * BLOCK_M
    kv_head = head // group
    i = row + tl.arange(0, BLOCK_M)

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    out_rows = tile_source(out_source, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
    # [BLOCK_M, BLOCK_DV]
    do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, True, TMA)
    out = load_rows(out_rows, batch, head, first_q, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV, True, False)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + row_of_lse + i, mask=i < len_q, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row_of_lse + i, delta, mask=i < len_q)
    lse = base2_lse(tl.load(lse_ptr + row_of_lse + i, mask=i < len_q, other=float("inf")))
    stats = row_stats + first_row_of_stats(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED) + i
    tl.store(stats, lse)
    tl.store(stats + stride_stats, delta)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)

    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + tl.minimum(seq, n_seqs - 1) * stride_ab + head).to(tl.float32)
    seed = 0
    offset = 0
    if HAS_DROPOUT:
        seed = tl.load(rng_state)
        offset = tl.load(rng_state + 1).to(tl.int32)
    dropout_head = seq * heads + head

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, full_begin, full_end, end = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    bounds = (begin, full_begin, full_end, end)
    for part in tl.static_range(3):
        if part == 1 or SPLIT:
            if part > 0 or HAS_LEFT:
                dq = _dq_step(
                    dq, q, do, lse, delta, k_rows, v_rows, bounds[part] if SPLIT else begin, bounds[part + 1] if SPLIT else end, batch, kv_head,
                    first_k, row, len_q, len_k, stride_ks, stride_vs, window_left, window_right, softmax_scale, softcap, slope, seed, offset,
                    dropout_head, keep_below, keep_prob, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED,
                    part != 1 or not SPLIT, HAS_LEFT, HAS_RIGHT, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, PRECISION, TMA)
    dq_rows = tile_source(dq_ptr, batch, head, first_q, stride_dqb, stride_dqs, stride_dqh, False)
    store_rows(dq_rows, dq * softmax_scale, row, len_q, stride_dqs, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_step(dk, dv, k, v, q_source, do_source, stats, stride_stats, begin, end, batch, head, first_q, column, len_q, len_k, stride_qs,
               stride_dos, window_left, window_right, softmax_scale, softcap, slope, seed, offset, dropout_head, keep_below, keep_prob,
               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
               HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the queries begin .. end; tiles are transposed, keys by queries."""
    j = column + tl.arange(0, BLOCK_N)[:, None]
    for row in tl.range(begin, end, BLOCK_M):
        # [BLOCK_M, BLOCK_D]
        q = load_rows(q_source, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED and (PACKED or not TMA), TMA)
        # [BLOCK_M, BLOCK_DV]
        do = load_rows(do_source, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, MASKED and (PACKED or not TMA), TMA)
        lse = tl.load(stats + row + tl.arange(0, BLOCK_M))
        delta = tl.load(stats + stride_stats + row + tl.arange(0, BLOCK_M))
        i = row + tl.arange(0, BLOCK_M)[None, :]
        # [BLOCK_N, BLOCK_M]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        slope_of_cap = 1.0
        scale = softmax_scale * LOG2E
        if PRESCALE:
            scores, slope_of_cap = modified_scores(scores, i, j, len_k - len_q, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI,
                                                   PRECISION == "ieee")
            scale = 1.0
        weights = tl.exp2(scores * scale - lse[None, :])
        if MASKED and (HAS_LEFT or HAS_RIGHT):
            weights = tl.where(queries_seeing(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), weights, 0.0)
        # [BLOCK_N, BLOCK_M]
        dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        kept = weights
        if HAS_DROPOUT:
            keep = tl.trans(keep_tile(seed, offset, dropout_head, row, column, keep_below, BLOCK_M, BLOCK_N))
            kept = tl.where(keep, weights, 0.0)
            dweights = tl.where(keep, dweights / keep_prob, 0.0)
        # [BLOCK_N, BLOCK_DV]
        dv = tl.dot(kept.to(do.dtype), do, dv, input_precision=PRECISION)
        dscores = weights * (dweights - delta[None, :])
        if HAS_SOFTCAP:
            dscores *= slope_of_cap
        # [BLOCK_N, BLOCK_D]
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["window_left", "window_right", "keep_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def flash_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k,
                          alibi_slopes, rng_state, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
                          stride_vh, stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs,
                          stride_dvh, stride_stats, stride_ab, softmax_scale, softcap, keep_prob, window_left, window_right, keep_below, n_seqs, seqlen_q,
                          seqlen_k, heads, group,
                          HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                          HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
                          HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    kv_heads = heads // group
    if PACKED:
        slots = seqlen_k // BLOCK_N + n_seqs + 1
        kv_head = tl.program_id(0) // slots
        seq, tile, first_k, len_k = find_tile(cu_seqlens_k, tl.program_id(0) % slots, n_seqs, seqlen_k, BLOCK_N)
        first_q = tl.load(cu_seqlens_q + seq)
        len_q = tl.load(cu_seqlens_q + tl.minimum(seq + 1, n_seqs)) - first_q
        batch = 0
        if tile >= tl.cdiv(len_k, BLOCK_N):
            return
    else:
        tiles = tl.cdiv(seqlen_k, BLOCK_N)
        tile = tl.program_id(0) % tiles
        kv_head = tl.program_id(0) // tiles % kv_heads
        batch = tl.program_id(0) // tiles // kv_heads
        seq, first_q, first_k, len_q, len_k = batch, 0, 0, seqlen_q, seqlen_k
    column = tile * BLOCK_N

    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_N, BLOCK_D]
    k = load_rows(k_rows, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, not TMA, TMA)
    # [BLOCK_N, BLOCK_DV]
    v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, not TMA, TMA)
    seed = 0
    offset = 0
    if HAS_DROPOUT:
        seed = tl.load(rng_state)
        offset = tl.load(rng_state + 1).to(tl.int32)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    begin, full_begin, full_end, end = query_ranges(column, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    # rows behind the last query have LSE +inf; TMA reads them as zeros, pointers and packed neighbours need the guard of a masked tile
    NEEDS_TAIL: tl.constexpr = HAS_LEFT or PACKED or not TMA
    if not NEEDS_TAIL:
        full_end = tl.maximum(end, full_begin)
    bounds = (begin, full_begin, full_end, end)
    for member in range(group):
        head = kv_head * group + member
        q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
        do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
        stats = row_stats + first_row_of_stats(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + tl.minimum(seq, n_seqs - 1) * stride_ab + head).to(tl.float32)
        dropout_head = seq * heads + head
        for part in tl.static_range(3):
            if (part == 0 and HAS_RIGHT and SPLIT) or part == 1 or (part == 2 and NEEDS_TAIL and SPLIT):
                dk, dv = _dkdv_step(
                    dk, dv, k, v, q_rows, do_rows, stats, stride_stats, bounds[part] if SPLIT else begin, bounds[part + 1] if SPLIT else end,
                    batch, head, first_q, column, len_q, len_k, stride_qs, stride_dos, window_left, window_right, softmax_scale, softcap,
                    slope, seed, offset, dropout_head, keep_below, keep_prob, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                    PACKED, part != 1 or not SPLIT, HAS_LEFT, HAS_RIGHT, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, PRECISION, TMA)
    dk_rows = tile_source(dk_ptr, batch, kv_head, first_k, stride_dkb, stride_dks, stride_dkh, False)
    dv_rows = tile_source(dv_ptr, batch, kv_head, first_k, stride_dvb, stride_dvs, stride_dvh, False)
    store_rows(dk_rows, dk * softmax_scale, column, len_k, stride_dks, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_rows, dv / keep_prob, column, len_k, stride_dvs, VALUE_DIM, BLOCK_N, BLOCK_DV)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                    softmax_scale: float, window_left: int, window_right: int, softcap: float, dropout_p: float,
                    only: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and delta (like lse) for the gradients of output and LSE; arguments as the public function's, checked there."""
    packed = cu_seqlens_q is not None
    heads, head_dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    kv_heads = k.shape[-2]
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()  # autograd may hand over an expanded gradient, which no kernel can read row by row
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    if packed:
        n_seqs, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        stats_blocks = seqlen_q // STATS_BLOCK.value + n_seqs + 1
    else:
        n_seqs, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        stats_blocks = n_seqs * triton.cdiv(seqlen_q, STATS_BLOCK.value)
    row_stats = torch.empty(2, heads * stats_blocks * STATS_BLOCK.value, dtype=torch.float32, device=q.device)
    block_d, block_dv = block_width(head_dim), block_width(value_dim)
    arch = architecture(q)
    keep_below = keep_threshold(dropout_p)
    stride_ab = alibi_slopes.shape[-1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0
    scalars = (row_stats.stride(0), stride_ab, softmax_scale, softcap, keep_below / 65536, window_left, window_right, keep_below, n_seqs, seqlen_q, seqlen_k,
               heads, heads // kv_heads)
    aligned = seqlen_q > 0 and seqlen_k > 0 and all(tma_takes(x) for x in (q, k, v, grad_out))
    flags = dict(HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_DV=block_dv, PACKED=packed, HAS_LEFT=window_left >= 0,
                 HAS_RIGHT=window_right >= 0, PRESCALE=softcap > 0 or alibi_slopes is not None or softmax_scale <= 0,
                 HAS_SOFTCAP=softcap > 0, HAS_ALIBI=alibi_slopes is not None, HAS_DROPOUT=dropout_p > 0,
                 PRECISION="ieee" if q.dtype == torch.float32 else "tf32")

    tile = dq_tile(arch, block_d, block_dv, q.element_size(), causal=window_right >= 0, dropout=dropout_p > 0, softcap=softcap > 0)
    tma = tile.tma and aligned
    sources = (q, k, v, out, grad_out)
    if tma:
        sources = (descriptor(q, tile.block_m, block_d), descriptor(k, tile.block_n, block_d), descriptor(v, tile.block_n, block_dv), out,
                   descriptor(grad_out, tile.block_m, block_dv))
    programs = heads * (seqlen_q // tile.block_m + n_seqs + 1 if packed else n_seqs * triton.cdiv(seqlen_q, tile.block_m))
    if delta.numel() and only != "dkdv":
        flash_bwd_dq_kernel[(programs,)](
            *sources, grad_lse, lse, delta, row_stats, dq, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *strides(q), *strides(k), *strides(v),
            *strides(out), *strides(grad_out), *strides(dq), *scalars, **flags, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            HAS_GRAD_LSE=grad_lse is not None, TMA=tma, SPLIT=tile.split or packed, num_warps=tile.num_warps, num_stages=tile.num_stages,
            maxnreg=tile.max_registers)

    tile = dkdv_tile(arch, block_d, block_dv, q.element_size(), causal=window_right >= 0, dropout=dropout_p > 0, softcap=softcap > 0)
    tma = tile.tma and aligned
    sources = (q, k, v, grad_out)
    if tma:
        sources = (descriptor(q, tile.block_m, block_d), descriptor(k, tile.block_n, block_d), descriptor(v, tile.block_n, block_dv),
                   descriptor(grad_out, tile.block_m, block_dv))
    programs = kv_heads * (seqlen_k // tile.block_n + n_seqs + 1 if packed else n_seqs * triton.cdiv(seqlen_k, tile.block_n))
    if k.numel() and only != "dq":
        flash_bwd_dkdv_kernel[(programs,)](
            *sources, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *strides(q), *strides(k), *strides(v),
            *strides(grad_out), *strides(dk), *strides(dv), *scalars, **flags, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TMA=tma,
            SPLIT=tile.split or packed or not tma or window_right < 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
            maxnreg=tile.max_registers)
    return dq, dk, dv, delta
