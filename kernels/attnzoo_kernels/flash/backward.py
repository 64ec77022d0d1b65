"""FlashAttention-2's backward in two kernels, each recomputing the weights: dQ by rows of queries, dK and dV by rows of keys.

Two more products than one fused loop, and in return no atomic addition: every gradient repeats bit by bit. The dQ kernel runs first and
leaves each row's statistics for the second one: delta = rowsum(dO * O) - dLSE, and the forward's maximum and sum, padded to whole tiles
(maximum +inf, delta 0), so that the second one reads them without a mask.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, first_stats_row, transposed_dot
from attnzoo_kernels._triton.dropout import keep_tile
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.softmax import add_dot, repeat_weights, score_dot
from attnzoo_kernels._triton.tiles import first_lse, in_registers, load_rows, program_tile, store_rows, tile_source
from attnzoo_kernels.flash.options import Layout, Options, layout, strides, tma_kind
from attnzoo_kernels.flash.scores import alibi, score_unit, scores_in_unit
from attnzoo_kernels.flash.tiles import Tile, dkdv_tile, dq_tile


@triton.jit
def _add_dq(dq, exact_delta, q, do, top, norm_stat, delta, k_rows, v_rows, begin, end, batch, kv_head, first_k, row, len_q, len_k,
            stride_ks, stride_vs, window_left, window_right, scale, softcap, slope, seed, offset, dropout_head, drop_below, keep_prob,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
            PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr,
            HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, EXACT_DELTA: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    unit = score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee")
    for column in range(begin, end, BLOCK_N):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = score_dot(q, k, PRECISION)
        j = column + tl.arange(0, BLOCK_N)[None, :]
        cap_derivative = 1.0
        less = top[:, None]
        if PRESCALE or HAS_SOFTCAP or HAS_ALIBI:
            bias = 0.0
            if HAS_ALIBI:
                bias, by_query = alibi(i, j, len_k - len_q, row, slope, unit, ONE_SIDED, PRECISION == "ieee")
                if ONE_SIDED:
                    less += by_query
            scores, cap_derivative = scores_in_unit(scores, bias, scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee",
                                                    HARDWARE_TANH)
        weights = repeat_weights(scores, unit, less, norm_stat[:, None], PRECISION == "ieee")
        if MASKED:
            weights = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), weights, 0.0)
        # [BLOCK_M, BLOCK_N]
        dweights = score_dot(do, v, PRECISION)
        if HAS_DROPOUT:
            keep = keep_tile(seed, offset, dropout_head, row, column, drop_below, BLOCK_M, BLOCK_N)
            dweights = tl.where(keep, dweights / keep_prob, 0.0)
        if EXACT_DELTA:
            exact_delta += tl.sum(weights * dweights, 1)
        dscores = weights * (dweights - delta[:, None])
        if HAS_SOFTCAP:
            dscores *= cap_derivative
        # [BLOCK_M, BLOCK_D]
        dq = add_dot(dscores.to(k.dtype), k, dq, PRECISION)
    return dq, exact_delta


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together",
                                "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state", "stats_ptr", "grad_lse_ptr"])
def flash_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, delta_ptr, row_stats_ptr, dq_ptr,
                        cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks,
                        stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
                        stride_dqb, stride_dqs, stride_dqh, stride_stats, stride_rows, stride_ab, softmax_scale, scale, softcap, keep_prob,
                        window_left, window_right, drop_below, n_seqs, seqlen_q, seqlen_k, heads, group, together,
                        HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                        PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
                        HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr, HARDWARE_TANH: tl.constexpr,
                        HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, EXACT_DELTA: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    seq, batch, head, row, first_q, len_q, first_k, len_k = program_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
        together if HAS_RIGHT and not HAS_LEFT else None)
    if row >= len_q:
        return
    kv_head = head // group
    if PRECISION == "ieee":
        scale = softmax_scale
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    GUARD_TAIL: tl.constexpr = not TMA
    # [BLOCK_M, BLOCK_DV]
    do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, not TMA, TMA)
    out = load_rows(out_rows, batch, head, first_q, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV, True, False)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    grad_lse = tl.zeros([BLOCK_M], tl.float32)
    if HAS_GRAD_LSE:
        grad_lse = tl.load(grad_lse_ptr + lse_index, mask=i < len_q, other=0.0).to(tl.float32)
        delta -= grad_lse
    top = tl.load(stats_ptr + lse_index, mask=i < len_q, other=float("inf"))
    norm_stat = tl.load(stats_ptr + stride_stats + lse_index, mask=i < len_q, other=1.0)
    row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK) + i
    if PRECISION == "ieee":
        tl.store(row_stats + 2 * stride_rows, norm_stat)
    else:
        top += norm_stat
    tl.store(row_stats, top)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA, TMA)
    if TMA:
        do = in_registers(do)  # the shared memory saved lets a second program in

    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + tl.minimum(seq, n_seqs - 1) * stride_ab + head).to(tl.float32)
    seed = 0
    offset = 0
    if HAS_DROPOUT:
        seed = tl.load(rng_state)
        offset = tl.load(rng_state + 1).to(tl.int32)

    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    # float32 walks the keys twice: delta from the weights themselves cancels where rowsum(dO * O), summed in another order, would not
    exact_delta = tl.zeros([BLOCK_M], tl.float32)
    for sweep in tl.static_range(2 if PRECISION == "ieee" else 1):
        if sweep == 1:
            delta = exact_delta - grad_lse
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        exact_delta = tl.zeros([BLOCK_M], tl.float32)
        for part in tl.static_range(4):
            if (part == 0 and HAS_LEFT) or part == 1 or (part == 2 and (HAS_RIGHT or not GUARD_TAIL)) or (part == 3 and GUARD_TAIL):
                dq, exact_delta = _add_dq(
                    dq, exact_delta, q, do, top, norm_stat, delta, k_rows, v_rows, bounds[part], bounds[part + 1], batch, kv_head,
                    first_k, row, len_q, len_k, stride_ks, stride_vs, window_left, window_right, scale, softcap, slope, seed, offset,
                    seq * heads + head, drop_below, keep_prob, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, part != 1,
                    part == 3, HAS_LEFT, HAS_RIGHT, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH, HAS_DROPOUT,
                    EXACT_DELTA or PRECISION == "ieee", PRECISION, TMA)
    tl.store(row_stats + stride_rows, delta)
    dq_rows = tile_source(dq_ptr, batch, head, first_q, stride_dqb, stride_dqs, stride_dqh, False)
    store_rows(dq_rows, dq * softmax_scale, row, len_q, stride_dqs, HEAD_DIM, BLOCK_M, BLOCK_D)
    if EXACT_DELTA:
        tl.store(delta_ptr + lse_index, exact_delta - grad_lse, mask=i < len_q)


@triton.jit
def _add_dkdv(dk, dv, k, v, q_rows, do_rows, row_stats, stride_rows, begin, end, full_begin, full_end, batch, head, first_q, column, len_q,
              len_k, stride_qs, stride_dos, window_left, window_right, scale, softcap, slope, seed, offset, dropout_head, drop_below,
              keep_prob, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr,
              HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr,
              HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
              FROM_STATS: tl.constexpr):
    """Walk the queries begin .. end; tiles are transposed, keys by queries. MASK as in the forward."""
    j = column + tl.arange(0, BLOCK_N)[:, None]
    unit = score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee")
    for row in range(begin, end, BLOCK_M):
        # [BLOCK_M, BLOCK_D]
        q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, GUARD, TMA)
        top = tl.load(row_stats + row + tl.arange(0, BLOCK_M))
        delta = tl.load(row_stats + stride_rows + row + tl.arange(0, BLOCK_M))
        norm_stat = 1.0
        if PRECISION == "ieee":
            norm_stat = tl.load(row_stats + 2 * stride_rows + row + tl.arange(0, BLOCK_M))[None, :]
        i = row + tl.arange(0, BLOCK_M)[None, :]
        # [BLOCK_N, BLOCK_M]
        if FROM_STATS:
            scores = tl.dot(k, tl.trans(q), tl.broadcast_to((top * (-1 / unit))[None, :], [BLOCK_N, BLOCK_M]))
        else:
            scores = transposed_dot(k, q, PRECISION)
        cap_derivative = 1.0
        less = top[None, :]
        if PRESCALE or HAS_SOFTCAP or HAS_ALIBI:
            bias = 0.0
            if HAS_ALIBI:
                bias, by_query = alibi(i, j, len_k - len_q, column, slope, unit, ONE_SIDED, PRECISION == "ieee")
                if ONE_SIDED:
                    less += by_query
            scores, cap_derivative = scores_in_unit(scores, bias, scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee",
                                                    HARDWARE_TANH)
        weights = tl.exp2(scores * unit) if FROM_STATS else repeat_weights(scores, unit, less, norm_stat, PRECISION == "ieee")
        if MASK == "all":
            weights = tl.where(queries_seeing(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), weights, 0.0)
        elif MASK == "edges":
            if (row < full_begin) | (row >= full_end):
                weights = tl.where(queries_seeing(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), weights, 0.0)
        # [BLOCK_N, BLOCK_M]
        if FROM_STATS:
            dweights = tl.dot(v, tl.trans(do), tl.broadcast_to(-delta[None, :], [BLOCK_N, BLOCK_M]))
        else:
            dweights = transposed_dot(v, do, PRECISION)
        kept = weights
        if HAS_DROPOUT:
            keep = tl.trans(keep_tile(seed, offset, dropout_head, row, column, drop_below, BLOCK_M, BLOCK_N))
            kept = tl.where(keep, weights, 0.0)
            dweights = tl.where(keep, dweights / keep_prob, 0.0)
        # [BLOCK_N, BLOCK_DV]
        dv = add_dot(kept.to(do.dtype), do, dv, PRECISION)
        dscores = weights * (dweights if FROM_STATS else dweights - delta[None, :])
        if HAS_SOFTCAP:
            dscores *= cap_derivative
        # [BLOCK_N, BLOCK_D]
        dk = add_dot(dscores.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state"])
def flash_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                          rng_state, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                          stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
                          stride_rows, stride_ab, softmax_scale, scale, softcap, keep_prob, window_left, window_right, drop_below, n_seqs,
                          seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                          BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                          HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
                          ONE_SIDED: tl.constexpr, HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr,
                          ONE_LOOP: tl.constexpr, FROM_STATS: tl.constexpr):
    kv_heads = heads // group
    seq, batch, kv_head, column, first_k, len_k, first_q, len_q = program_tile(
        cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, kv_heads, BLOCK_N, PACKED, False,
        together if HAS_RIGHT and not HAS_LEFT else None)
    if column >= len_k:
        return
    if PRECISION == "ieee":
        scale = softmax_scale
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
    GUARD_TAIL: tl.constexpr = not TMA
    bounds = query_ranges(column, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    for member in range(group):
        head = kv_head * group + member
        q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
        do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
        row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + tl.minimum(seq, n_seqs - 1) * stride_ab + head).to(tl.float32)
        for part in tl.static_range(4):
            if part == 0 and (HAS_RIGHT or ONE_LOOP) or part == 1 and not ONE_LOOP or part == 2 and HAS_LEFT and not ONE_LOOP \
                    or part == 3 and GUARD_TAIL:
                dk, dv = _add_dkdv(
                    dk, dv, k, v, q_rows, do_rows, row_stats, stride_rows, bounds[part],
                    bounds[3 if ONE_LOOP and part == 0 else part + 1], bounds[1], bounds[2], batch, head, first_q, column,
                    len_q, len_k, stride_qs, stride_dos, window_left, window_right, scale, softcap, slope, seed, offset,
                    seq * heads + head, drop_below, keep_prob, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                    "none" if part == 1 else "edges" if ONE_LOOP and part == 0 else "all", part == 3, HAS_LEFT, HAS_RIGHT, PRESCALE,
                    HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH, HAS_DROPOUT, PRECISION, TMA, FROM_STATS)
    dk_rows = tile_source(dk_ptr, batch, kv_head, first_k, stride_dkb, stride_dks, stride_dkh, False)
    dv_rows = tile_source(dv_ptr, batch, kv_head, first_k, stride_dvb, stride_dvs, stride_dvh, False)
    store_rows(dk_rows, dk * softmax_scale, column, len_k, stride_dks, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_rows, dv / keep_prob if HAS_DROPOUT else dv, column, len_k, stride_dvs, VALUE_DIM, BLOCK_N, BLOCK_DV)


def _blocks(tile: Tile, constants: dict, grad_out: int) -> dict[int, tuple]:
    """Tiles of q, k, v and, at its position, grad_out where TMA reads them."""
    width, value_width = constants["BLOCK_D"], constants["BLOCK_DV"]
    of_queries, of_keys = tile.block_m, tile.block_n
    blocks = {0: (of_queries, width), 1: (of_keys, width), 2: (of_keys, value_width), grad_out: (of_queries, value_width)}
    return {n: (*block, constants["PACKED"]) for n, block in blocks.items()} if constants["TMA"] else {}


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, exact_delta: bool, q: Layout, k: Layout,
             v: Layout, out: Layout, grad_out: Layout, dq: Layout, stats_stride: int, options: Options) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tile = dq_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize, causal=options.window_right >= 0)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.sequences is not None)
    constants |= {"HAS_GRAD_LSE": has_grad_lse, "EXACT_DELTA": exact_delta, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
                  "STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*(stride for x in (q, k, v, out, grad_out, dq) for stride in strides(x)), math.prod(q[0][:-1]), stats_stride,
               *options.scalars(q[0], k[0]),
               options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], tile.block_m, device, dtype))
    programs = options.programs(q[0][-2], seqlen_q, sequences, tile.block_m)
    return Launch(flash_bwd_dq_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, _blocks(tile, constants, 4))


# what stands between the products and the row statistics
_BETWEEN = ("PRESCALE", "HAS_SOFTCAP", "HAS_ALIBI", "HAS_DROPOUT")


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout, dk: Layout,
               dv: Layout, stats_stride: int, options: Options) -> Launch:
    sequences, _, seqlen_k = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tile = dkdv_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize, causal=options.window_right >= 0,
                     packed=options.sequences is not None, heavy=options.softcap > 0 or options.dropout_p > 0)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.sequences is not None)
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STATS_BLOCK": STATS_BLOCK, "TMA": tma, "ONE_LOOP": tile.one_loop,
                  "FROM_STATS": tile.from_stats and dtype != torch.float32 and not any(constants[name] for name in _BETWEEN)}
    scalars = (*(stride for x in (q, k, v, grad_out, dk, dv) for stride in strides(x)), stats_stride, *options.scalars(q[0], k[0]),
               1 if options.sequences is not None  # where the rule of dQ is 1 to 5 % slower
               else options.heads_together(k[0], q[0], (q[0][-1] + v[0][-1]) * (q[0][-2] // k[0][-2]), tile.block_n, device, dtype))
    programs = options.programs(k[0][-2], seqlen_k, sequences, tile.block_n)
    return Launch(flash_bwd_dkdv_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, _blocks(tile, constants, 3))


def launch_dq(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
              cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
              exact_delta: bool, options: Options, dq: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, the row statistics that launch_dkdv reads, and delta without the rounding of O, like the LSE (empty unless exact_delta)."""
    sequences, seqlen_q, _ = options.sizes(q.shape, k.shape)
    dq = q.new_empty(q.shape) if dq is None else dq
    delta = torch.empty_like(stats[0]) if exact_delta else stats.new_empty(0)
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, options.programs(q.shape[-2], seqlen_q, sequences,
                                                                                       STATS_BLOCK) * STATS_BLOCK)
    if stats.numel() == 0:
        return dq, row_stats, delta
    launch = _dq_plan(q.device, q.dtype, are_aligned(q, k, v, out, grad_out), grad_lse is not None, exact_delta, layout(q), layout(k),
                      layout(v), layout(out), layout(grad_out), layout(dq), row_stats.shape[1], options)
    launch(q, k, v, out, grad_out, grad_lse, stats, delta, row_stats, dq, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    return dq, row_stats, delta


def launch_dkdv(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_stats: Tensor, cu_seqlens_q: Tensor | None,
                cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                options: Options, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """dK and dV from the row statistics of launch_dq."""
    dk, dv = into or (k.new_empty(k.shape), v.new_empty(v.shape))
    if k.numel() == 0:
        return dk, dv
    launch = _dkdv_plan(q.device, q.dtype, are_aligned(q, k, v, grad_out), layout(q), layout(k), layout(v), layout(grad_out),
                        layout(dk), layout(dv), row_stats.shape[1], options)
    launch(q, k, v, grad_out, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    return dk, dv


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                    exact_delta: bool, options: Options,
                    into: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and delta (empty unless exact_delta) for the gradients of output and LSE.

    into: where the first three go, 16-byte aligned.
    """
    if grad_out.shape[-1] > 1 and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()  # autograd may hand over an expanded gradient, which no kernel can read row by row
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    extras = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    with on_device_of(q):
        dq, row_stats, delta = launch_dq(grad_out, grad_lse, q, k, v, out, stats, *extras, exact_delta, options, into and into[0])
        dk, dv = launch_dkdv(grad_out, q, k, v, row_stats, *extras, options, into and into[1:])
    return dq, dk, dv, delta
