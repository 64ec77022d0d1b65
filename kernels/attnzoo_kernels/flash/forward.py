"""FlashAttention-2's forward: each program keeps a tile of queries and walks the keys with an online softmax."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.dropout import drop_pairs, keep_tile
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.masks import key_ranges, keys_seen
from attnzoo_kernels._triton.softmax import add_dot, in_units, log_sum_exp, rescaled, score_dot, softmax_stats, softmax_weights
from attnzoo_kernels._triton.tiles import first_lse, in_registers, load_rows, program_tile, store_rows, tile_source
from attnzoo_kernels.dropout import drop_threshold
from attnzoo_kernels.flash.options import Layout, Options, layout, strides, tma_kind
from attnzoo_kernels.flash.scores import alibi, score_unit, scores_in_unit
from attnzoo_kernels.flash.tiles import Tile, forward_tile


@triton.jit
def _attend(acc, top, norm, q, k_rows, v_rows, begin, end, full_begin, full_end, batch, kv_head, first_k, row, len_q, len_k, stride_ks,
            stride_vs, window_left, window_right, scale, softcap, slope, seed, offset, dropout_head, drop_below, HEAD_DIM: tl.constexpr,
            VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            MASK: tl.constexpr, GUARD: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
            HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr, HARDWARE_TANH: tl.constexpr,
            HAS_DROPOUT: tl.constexpr, DROP_PAIRS: tl.constexpr, BY_WARP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):
    """Walk the keys begin .. end. MASK: "none", "all", or "edges": tiles outside full_begin .. full_end."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    unit = score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee")
    SUMS_LAST: tl.constexpr = HAS_DROPOUT and BLOCK_DV > 64  # 128 causal 8192 459 for 445, but 64 321 for 331
    for column in tl.range(begin, end, BLOCK_N, num_stages=1 if GUARD or MASK == "all" and not (HAS_LEFT or HAS_RIGHT) else None):
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD and not TMA, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = score_dot(q, k, PRECISION)
        j = column + tl.arange(0, BLOCK_N)[None, :]
        if PRESCALE or HAS_SOFTCAP or HAS_ALIBI:
            bias = 0.0
            if HAS_ALIBI:
                bias, by_query = alibi(i, j, len_k - len_q, column, slope, unit, ONE_SIDED, PRECISION == "ieee")
            scores, _ = scores_in_unit(scores, bias, scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee", HARDWARE_TANH)
        if MASK == "all":
            scores = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), scores, -float("inf"))
        elif MASK == "edges":
            if (column < full_begin) | (column >= full_end):
                scores = tl.where(keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT), scores, -float("inf"))
        # under ALiBi and a maximum that lags ptxas 12.8 lets the products wait for each other
        weights, new_top, rescale = softmax_weights(scores, top, unit, MASK != "none", PRECISION == "ieee", not HAS_ALIBI,
                                                    by_query.reshape(BLOCK_M) if HAS_ALIBI and ONE_SIDED else None)
        if not SUMS_LAST:
            norm = norm * rescale + tl.sum(weights, 1)
        kept = weights
        if HAS_DROPOUT:
            if DROP_PAIRS:
                kept = drop_pairs(kept.to(q.dtype), seed, offset, dropout_head, row, column, drop_below, BLOCK_M, BLOCK_N)
            else:
                kept = tl.where(keep_tile(seed, offset, dropout_head, row, column, drop_below, BLOCK_M, BLOCK_N), kept, 0.0)
        acc = rescaled(acc, rescale, new_top, top, BY_WARP)  # before the wait for the values
        top = new_top
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        if SUMS_LAST:
            norm = norm * rescale + tl.sum(weights, 1)
        # [BLOCK_M, BLOCK_DV]
        acc = add_dot(kept.to(v.dtype), v, acc, PRECISION)
    return acc, top, norm


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together",
                                "stride_stats"],
            do_not_specialize_on_alignment=["sinks", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state"])
def flash_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, sinks, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
                     stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob,
                     stride_os, stride_oh, stride_stats, stride_ab, softmax_scale, scale, softcap, keep_prob, window_left, window_right,
                     drop_below, n_seqs, seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                     BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                     PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr,
                     HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, DROP_PAIRS: tl.constexpr,
                     BY_WARP: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
                     Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr, ONE_LOOP: tl.constexpr):
    seq, batch, head, row, first_q, len_q, first_k, len_k = program_tile(
        cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
        together if HAS_RIGHT and not HAS_LEFT else None)
    if PACKED:
        if row >= len_q:
            return
    kv_head = head // group
    if PRECISION == "ieee":
        scale = softmax_scale

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, not TMA or Q_SELECT, TMA)
    if TMA and Q_REGISTERS and not Q_SELECT:
        q = in_registers(q)

    # a sink is a first key of weight one that has no value
    sink = -float("inf")
    if HAS_SINKS:
        sink = in_units(tl.load(sinks + head).to(tl.float32), PRECISION == "ieee")
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
    GUARD_TAIL: tl.constexpr = not TMA
    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, GUARD_TAIL)
    for part in tl.static_range(4):
        if part == 0 and (HAS_LEFT or ONE_LOOP) or part == 1 and not ONE_LOOP \
                or part == 2 and not ONE_LOOP and (HAS_RIGHT or not GUARD_TAIL) or part == 3 and GUARD_TAIL:
            acc, top, norm = _attend(
                acc, top, norm, q, k_rows, v_rows, bounds[part], bounds[3 if ONE_LOOP and part == 0 else part + 1], bounds[1], bounds[2],
                batch, kv_head, first_k, row, len_q, len_k, stride_ks, stride_vs, window_left, window_right, scale, softcap, slope, seed,
                offset, seq * heads + head, drop_below, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                "none" if part == 1 else "edges" if ONE_LOOP and part == 0 else "all", part == 3, HAS_LEFT, HAS_RIGHT, PRESCALE,
                HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH, HAS_DROPOUT, DROP_PAIRS, BY_WARP, PRECISION, TMA)

    divisor = (tl.where(norm > 0, norm, 1.0) * keep_prob)[:, None]
    acc = tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape)) if PRECISION == "ieee" else acc * (1.0 / divisor)
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    store_rows(out_rows, acc, row, len_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i
    tl.store(lse_ptr + lse_index, log_sum_exp(top, norm, PRECISION == "ieee"), mask=i < len_q)
    top, norm_stat = softmax_stats(top, norm, PRECISION == "ieee")
    tl.store(stats_ptr + lse_index, top, mask=i < len_q)
    tl.store(stats_ptr + stride_stats + lse_index, norm_stat, mask=i < len_q)


def drop_pairs_hold(dropout_p: float, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether drop_pairs may be taken."""
    return (dtype != torch.float32 and architecture(device) >= 90 and torch.version.cuda is not None
            and 0x80 <= drop_threshold(dropout_p) <= 0x7F80)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_sinks: bool, q: Layout, k: Layout, v: Layout,
          options: Options) -> Launch:
    constants = options.constants(q[0], v[0], dtype, device)
    arch, width, value_width = architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"]
    short, long = (forward_tile(arch, width, value_width, dtype.itemsize, causal=options.window_right >= 0, window=options.window_left >= 0,
                                packed=options.sequences is not None, heavy=options.softcap > 0 or options.dropout_p > 0, long=long)
                   for long in (False, options.sequences is None))
    tile, other = (long, short) if options.sequences is None and k[0][1] > 4096 else (short, long)
    launch = _launch(device, dtype, aligned, has_sinks, q, k, v, options, tile)
    if other != tile:
        launch.other = _launch(device, dtype, aligned, has_sinks, q, k, v, options, other)
    return launch


def _launch(device: torch.device, dtype: torch.dtype, aligned: bool, has_sinks: bool, q: Layout, k: Layout, v: Layout, options: Options,
            tile: Tile) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tma = tma_kind(tile.tma and aligned, (q, k, v), dtype.itemsize, options.sequences is not None)
    rows = math.prod(q[0][:-1])
    heads, value_dim = q[0][-2], v[0][-1]
    stride_out = (0 if len(q[0]) == 3 else seqlen_q * heads * value_dim, heads * value_dim, value_dim)
    # by Hopper's products, whose threads hold two rows of 64; ALiBi and dropout lose by it
    by_warp = tma > 0 and architecture(device) == 90 and options.slopes_stride is None and options.dropout_p == 0
    constants |= {"DROP_PAIRS": drop_pairs_hold(options.dropout_p, dtype, device), "BY_WARP": by_warp, "HAS_SINKS": has_sinks,
                  "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma, "Q_REGISTERS": tile.q_registers,
                  "Q_SELECT": tile.q_select, "ONE_LOOP": tile.one_loop}
    scalars = (*strides(q), *strides(k), *strides(v), *stride_out, rows, *options.scalars(q[0], k[0]),
               options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], tile.block_m, device, dtype))
    programs = options.programs(heads, seqlen_q, sequences, tile.block_m)
    width, value_width = constants["BLOCK_D"], constants["BLOCK_DV"]
    packed = options.sequences is not None
    blocks = {0: (tile.block_m, width, packed), 1: (tile.block_n, width, packed), 2: (tile.block_n, value_width, packed)}
    return Launch(flash_fwd_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, blocks if tma else {})


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   alibi_slopes: Tensor | None, sinks: Tensor | None, rng_state: Tensor | None,
                   options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (layout of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, *lse_shape, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse, stats
    launch = _plan(q.device, q.dtype, are_aligned(q, k, v), sinks is not None, layout(q), layout(k), layout(v), options)
    with on_device_of(out):
        launch(q, k, v, out, lse, stats, sinks, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    return out, lse, stats
