"""FlashAttention-2's forward: each program keeps a tile of queries and walks the keys with an online softmax."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.dropout import keep_tile
from attnzoo_kernels._triton.launch import architecture, block_width, descriptor, strides, tma_takes
from attnzoo_kernels._triton.masks import keys_seen, key_ranges
from attnzoo_kernels._triton.softmax import LOG2E, log_sum_exp, softmax_step
from attnzoo_kernels._triton.tiles import find_tile, load_rows, store_rows, tile_source
from attnzoo_kernels.dropout import keep_threshold
from attnzoo_kernels.flash.scores import modified_scores
from attnzoo_kernels.flash.tiles import forward_tile


@triton.jit
def _attend(acc, top, norm, q, k_source, v_source, begin, end, batch, kv_head, first_k, row, len_q, len_k, stride_ks, stride_vs,
            window_left, window_right, softmax_scale, softcap, slope, seed, offset, dropout_head, keep_below,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
            HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    for column in tl.range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_source, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED and (PACKED or not TMA), TMA)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        j = column + tl.arange(0, BLOCK_N)[None, :]
        scale = softmax_scale * LOG2E
        if PRESCALE:
            scores, _ = modified_scores(scores, i, j, len_k - len_q, slope, softmax_scale, softcap, HAS_SOFTCAP, HAS_ALIBI, PRECISION == "ieee")
            scale = 1.0
        if MASKED:
            scores = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), scores, -float("inf"))
        weights, top, norm, rescale = softmax_step(scores, top, norm, scale, MASKED)
        if HAS_DROPOUT:
            keep = keep_tile(seed, offset, dropout_head, row, column, keep_below, BLOCK_M, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_source, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, MASKED and (PACKED or not TMA), TMA)
        # [BLOCK_M, BLOCK_DV]
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, top, norm


@triton.jit(do_not_specialize=["window_left", "window_right", "keep_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr"])
def flash_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state,
                     stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                     stride_ob, stride_os, stride_oh, stride_ab, softmax_scale, softcap, keep_prob, window_left, window_right, keep_below,
                     n_seqs, seqlen_q, seqlen_k, heads, group,
                     HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                     PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
                     PRECISION: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    # tiles of one head follow each other, so that the heads of a group share keys in L2; heavy (late) causal tiles come first
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
    else:
        tiles = tl.cdiv(seqlen_q, BLOCK_M)
        tile = tl.program_id(0) % tiles
        head = tl.program_id(0) // tiles % heads
        batch = tl.program_id(0) // tiles // heads
        seq, first_q, first_k, len_q, len_k = batch, 0, 0, seqlen_q, seqlen_k
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    row = tile * BLOCK_M
    kv_head = head // group
    i = row + tl.arange(0, BLOCK_M)

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)

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
    dropout_head = seq * heads + head

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    begin, full_begin, full_end, end = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    bounds = (begin, full_begin, full_end, end)
    for part in tl.static_range(3):
        if part == 1 or SPLIT:
            if part > 0 or HAS_LEFT:
                acc, top, norm = _attend(
                    acc, top, norm, q, k_rows, v_rows, bounds[part] if SPLIT else begin, bounds[part + 1] if SPLIT else end, batch, kv_head,
                    first_k, row, len_q, len_k, stride_ks, stride_vs, window_left, window_right, softmax_scale, softcap, slope, seed, offset,
                    dropout_head, keep_below, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, part != 1 or not SPLIT,
                    HAS_LEFT, HAS_RIGHT, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, PRECISION, TMA)

    acc = acc / (tl.where(norm > 0, norm, 1.0) * keep_prob)[:, None]
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    store_rows(out_rows, acc, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
    if PACKED:
        lse_rows = lse_ptr + head.to(tl.int64) * seqlen_q + first_q
    else:
        lse_rows = lse_ptr + (batch * heads + head).to(tl.int64) * seqlen_q
    tl.store(lse_rows + i, log_sum_exp(top, norm), mask=i < len_q)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
                   sinks: Tensor | None, rng_state: Tensor | None, softmax_scale: float, window_left: int, window_right: int,
                   softcap: float, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Output (layout of q, value width) and LSE; arguments as the public function's, checked there."""
    packed = cu_seqlens_q is not None
    heads, head_dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    out = torch.empty(*q.shape[:-1], value_dim, dtype=q.dtype, device=q.device)
    if packed:
        n_seqs, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        lse = torch.empty(heads, seqlen_q, dtype=torch.float32, device=q.device)
    else:
        n_seqs, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        lse = torch.empty(n_seqs, heads, seqlen_q, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    block_d, block_dv = block_width(head_dim), block_width(value_dim)
    tile = forward_tile(architecture(q), block_d, block_dv, q.element_size(), causal=window_right >= 0, dropout=dropout_p > 0,
                        softcap=softcap > 0)
    tma = tile.tma and seqlen_k > 0 and all(tma_takes(x) for x in (q, k, v))
    sources = (q, k, v)
    if tma:
        sources = descriptor(q, tile.block_m, block_d), descriptor(k, tile.block_n, block_d), descriptor(v, tile.block_n, block_dv)
    programs = heads * (seqlen_q // tile.block_m + n_seqs + 1 if packed else n_seqs * triton.cdiv(seqlen_q, tile.block_m))
    keep_below = keep_threshold(dropout_p)
    flash_fwd_kernel[(programs,)](
        *sources, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, *strides(q), *strides(k), *strides(v), *strides(out),
        alibi_slopes.shape[-1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        softmax_scale, softcap, keep_below / 65536, window_left, window_right, keep_below, n_seqs, seqlen_q, seqlen_k, heads,
        heads // k.shape[-2], HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, PACKED=packed, HAS_LEFT=window_left >= 0, HAS_RIGHT=window_right >= 0,
        PRESCALE=softcap > 0 or alibi_slopes is not None or softmax_scale <= 0, HAS_SOFTCAP=softcap > 0, HAS_ALIBI=alibi_slopes is not None,
        HAS_SINKS=sinks is not None, HAS_DROPOUT=dropout_p > 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", TMA=tma, SPLIT=tile.split or packed,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers)
    return out, lse
