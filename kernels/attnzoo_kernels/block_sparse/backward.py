"""Block-sparse backward in two kernels: dQ walks the forward's lists, dK and dV walk the queries listed for each tile of keys.

No atomic addition: every gradient repeats bit by bit. The dQ kernel runs first and leaves each row's statistics for the second one, as
FlashAttention's does: delta = rowsum(dO * O) - dLSE, and the forward's maximum and sum, padded to whole tiles (maximum +inf, delta 0).
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, first_stats_row, transposed_dot
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, descriptor, on_device_of, tma_takes_layout
from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.softmax import add_dot, repeat_weights, score_dot
from attnzoo_kernels._triton.tiles import first_lse, load_rows, store_rows, tile_source
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import Tile, dkdv_tile, dq_tile
from attnzoo_kernels.block_sparse.walk import blocks_kept, find_list, list_ranges, listed_tile, masked_position
from attnzoo_kernels.flash.options import Layout, layout, strides


@triton.jit
def _add_dq(dq, exact_delta, q, do, top, norm_stat, delta, k_rows, v_rows, entries, bits, begin, end, spans, batch, kv_head, first_k, row,
            len_q, len_k, stride_ks, stride_vs, window_left, window_right, scale,
            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PART_Q: tl.constexpr,
            PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr):
    """Walk the list's positions begin .. end, or under MASKED that many of the spans."""
    position = masked_position(begin, spans, PACKED) if MASKED else begin
    tile = tl.load(entries + position)
    for n in tl.range(begin, end):
        column = tile * BLOCK_N
        next_position = masked_position(n + 1, spans, PACKED) if MASKED else n + 1
        tile = tl.load(entries + next_position)
        # [BLOCK_N, BLOCK_D]
        k = load_rows(k_rows, batch, kv_head, first_k, column, len_k, stride_ks, HEAD_DIM, BLOCK_N, BLOCK_D, GUARD, TMA)
        # [BLOCK_N, BLOCK_DV]
        v = load_rows(v_rows, batch, kv_head, first_k, column, len_k, stride_vs, VALUE_DIM, BLOCK_N, BLOCK_DV, GUARD, TMA)
        # [BLOCK_M, BLOCK_N]
        scores = score_dot(q, k, PRECISION)
        weights = repeat_weights(scores, scale, top[:, None], norm_stat[:, None], PRECISION == "ieee")
        if MASKED:
            m = tl.arange(0, BLOCK_M)[:, None]
            j = tl.arange(0, BLOCK_N)[None, :]
            seen = keys_seen(row + m, column + j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            if PART_Q < BLOCK_M or PART_K < BLOCK_N:
                seen = seen & blocks_kept(tl.load(bits + position), m, j, BLOCK_M, BLOCK_N, PART_Q, PART_K)
            weights = tl.where(seen, weights, 0.0)
        # [BLOCK_M, BLOCK_N]
        dweights = score_dot(do, v, PRECISION)
        if PRECISION == "ieee":
            exact_delta += tl.sum(weights * dweights, 1)
        dscores = weights * (dweights - delta[:, None])
        # [BLOCK_M, BLOCK_D]
        dq = add_dot(dscores.to(k.dtype), k, dq, PRECISION)
        position = next_position
    return dq, exact_delta


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_stats", "stride_lb",
                               "stride_lh", "list_tiles", "list_width"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order", "index", "count", "bits", "grad_lse_ptr"])
def block_sparse_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, row_stats_ptr, dq_ptr,
                               cu_seqlens_q, cu_seqlens_k, order, index, count, bits, stride_qb, stride_qs, stride_qh, stride_kb,
                               stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh, stride_dob,
                               stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh, stride_stats, stride_rows, stride_lb, stride_lh,
                               list_tiles, list_width, softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads,
                               group,
                               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                               PART_Q: tl.constexpr, PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                               HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               HAS_GRAD_LSE: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    seq, batch, head, row, first_q, len_q, first_k, len_k = listed_tile(
        order, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if row >= len_q:
        return
    kv_head = head // group
    if PRECISION == "ieee":
        scale = softmax_scale
    list_number, list_first = find_list(seq, head, row // BLOCK_M, n_seqs, list_tiles, list_width, stride_lb, stride_lh)
    i = row + tl.arange(0, BLOCK_M)
    lse_index = first_lse(batch, head, first_q, seqlen_q, heads, PACKED) + i

    q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
    k_rows = tile_source(k_source, batch, kv_head, first_k, stride_kb, stride_ks, stride_kh, TMA)
    v_rows = tile_source(v_source, batch, kv_head, first_k, stride_vb, stride_vs, stride_vh, TMA)
    do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
    out_rows = tile_source(out_ptr, batch, head, first_q, stride_ob, stride_os, stride_oh, False)
    # [BLOCK_M, BLOCK_DV]; the guard passes dO through registers, where it stays: the shared memory saved lets a second program in
    do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, True, TMA)
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

    bounds = key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, True)
    clear, masked = tl.load(count + 2 * list_number), tl.load(count + 2 * list_number + 1)
    clear_begin, clear_end, n_masked, spans = list_ranges(index + list_first, clear, masked, bounds, BLOCK_N, PACKED)
    exact_delta = delta
    # float32 walks the keys twice: delta from the weights themselves cancels where rowsum(dO * O), summed in another order, would not
    for sweep in tl.static_range(2 if PRECISION == "ieee" else 1):
        if sweep == 1:
            delta = exact_delta - grad_lse
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        exact_delta = tl.zeros([BLOCK_M], tl.float32)
        for part in tl.static_range(2):
            dq, exact_delta = _add_dq(
                dq, exact_delta, q, do, top, norm_stat, delta, k_rows, v_rows, index + list_first,
                bits + list_first if PART_Q < BLOCK_M or PART_K < BLOCK_N else bits, clear_begin if part == 0 else 0,
                clear_end if part == 0 else n_masked, spans, batch, kv_head, first_k, row, len_q, len_k, stride_ks, stride_vs, window_left,
                window_right, scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, PART_Q, PART_K, PACKED, HAS_LEFT, HAS_RIGHT, PRECISION,
                BLOCK_M, BLOCK_N, part == 1, part == 1 and (PACKED or not TMA), TMA)
    tl.store(row_stats + stride_rows, delta)
    dq_rows = tile_source(dq_ptr, batch, head, first_q, stride_dqb, stride_dqs, stride_dqh, False)
    store_rows(dq_rows, dq * softmax_scale, row, len_q, stride_dqs, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _seen_by(row, column, bits, position, len_q, len_k, window_left, window_right, PART_Q: tl.constexpr, PART_K: tl.constexpr,
             HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which keys the queries see, transposed, [BLOCK_N, BLOCK_M]."""
    m = tl.arange(0, BLOCK_M)[None, :]
    j = tl.arange(0, BLOCK_N)[:, None]
    seen = queries_seeing(row + m, column + j, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    if PART_Q < BLOCK_M or PART_K < BLOCK_N:
        seen = seen & blocks_kept(tl.load(bits + position), m, j, BLOCK_M, BLOCK_N, PART_Q, PART_K)
    return seen


@triton.jit
def _add_dkdv(dk, dv, k, v, q_rows, do_rows, row_stats, stride_rows, entries, bits, begin, end, spans, batch, head, first_q, column, len_q,
              len_k, stride_qs, stride_dos, window_left, window_right, scale,
              HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PART_Q: tl.constexpr,
              PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr, JOINT: tl.constexpr,
              TMA: tl.constexpr):
    """Walk one head's listed queries, as _add_dq walks keys; tiles are transposed, keys by queries.

    JOINT: in one walk those that need no mask, up to the position spans[4], and those that do: two loops' registers would spill.
    """
    position = masked_position(begin, spans, PACKED) if MASKED and not JOINT else begin
    tile = tl.load(entries + position)
    for n in tl.range(begin, end):
        row = tile * BLOCK_M
        next_position = masked_position(n + 1, spans, PACKED) if MASKED and not JOINT else n + 1
        tile = tl.load(entries + next_position)
        # [BLOCK_M, BLOCK_D]
        q = load_rows(q_rows, batch, head, first_q, row, len_q, stride_qs, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA)
        # [BLOCK_M, BLOCK_DV]
        do = load_rows(do_rows, batch, head, first_q, row, len_q, stride_dos, VALUE_DIM, BLOCK_M, BLOCK_DV, GUARD, TMA)
        lanes = tl.arange(0, BLOCK_M)
        top = tl.load(row_stats + row + lanes)
        delta = tl.load(row_stats + stride_rows + row + lanes)
        norm_stat = 1.0
        if PRECISION == "ieee":
            norm_stat = tl.load(row_stats + 2 * stride_rows + row + lanes)[None, :]
        # [BLOCK_N, BLOCK_M]
        scores = transposed_dot(k, q, PRECISION)
        weights = repeat_weights(scores, scale, top[None, :], norm_stat, PRECISION == "ieee")
        if MASKED and JOINT:
            if n >= spans[4]:
                seen = _seen_by(row, column, bits, position, len_q, len_k, window_left, window_right, PART_Q, PART_K, HAS_LEFT, HAS_RIGHT,
                                BLOCK_M, BLOCK_N)
                weights = tl.where(seen, weights, 0.0)
        elif MASKED:
            seen = _seen_by(row, column, bits, position, len_q, len_k, window_left, window_right, PART_Q, PART_K, HAS_LEFT, HAS_RIGHT,
                            BLOCK_M, BLOCK_N)
            weights = tl.where(seen, weights, 0.0)
        # [BLOCK_N, BLOCK_M]
        dweights = transposed_dot(v, do, PRECISION)
        # [BLOCK_N, BLOCK_DV]
        dv = add_dot(weights.to(do.dtype), do, dv, PRECISION)
        dscores = weights * (dweights - delta[None, :])
        # [BLOCK_N, BLOCK_D]
        dk = add_dot(dscores.to(q.dtype), q, dk, PRECISION)
        position = next_position
    return dk, dv


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_lb", "stride_lh",
                               "list_tiles", "list_width"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order", "index", "count", "bits"])
def block_sparse_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, order,
                                 index, count, bits, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
                                 stride_vs, stride_vh, stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb,
                                 stride_dvs, stride_dvh, stride_rows, stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale,
                                 window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group,
                                 HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                                 PART_Q: tl.constexpr, PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                                 HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                                 STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    seq, batch, kv_head, column, first_k, len_k, first_q, len_q = listed_tile(
        order, cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False)
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
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    JOINT: tl.constexpr = TMA and not PACKED
    bounds = query_ranges(column, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, True)
    for member in range(group):
        head = kv_head * group + member
        q_rows = tile_source(q_source, batch, head, first_q, stride_qb, stride_qs, stride_qh, TMA)
        do_rows = tile_source(do_source, batch, head, first_q, stride_dob, stride_dos, stride_doh, TMA)
        row_stats = row_stats_ptr + first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK)
        list_number, list_first = find_list(seq, head, column // BLOCK_N, n_seqs, list_tiles, list_width, stride_lb, stride_lh)
        clear, masked = tl.load(count + 2 * list_number), tl.load(count + 2 * list_number + 1)
        clear_begin, clear_end, n_masked, spans = list_ranges(index + list_first, clear, masked, bounds, BLOCK_M, PACKED)
        for part in tl.static_range(1 if JOINT else 2):
            dk, dv = _add_dkdv(
                dk, dv, k, v, q_rows, do_rows, row_stats, stride_rows, index + list_first,
                bits + list_first if PART_Q < BLOCK_M or PART_K < BLOCK_N else bits, clear_begin if part == 0 else 0,
                clear + masked if JOINT else clear_end if part == 0 else n_masked, spans, batch, head, first_q, column, len_q, len_k,
                stride_qs, stride_dos, window_left, window_right, scale, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, PART_Q, PART_K, PACKED,
                HAS_LEFT, HAS_RIGHT, PRECISION, BLOCK_M, BLOCK_N, JOINT or part == 1, part == 1 and (PACKED or not TMA), JOINT, TMA)
    dk_rows = tile_source(dk_ptr, batch, kv_head, first_k, stride_dkb, stride_dks, stride_dkh, False)
    dv_rows = tile_source(dv_ptr, batch, kv_head, first_k, stride_dvb, stride_dvs, stride_dvh, False)
    store_rows(dk_rows, dk * softmax_scale, column, len_k, stride_dks, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_rows, dv, column, len_k, stride_dvs, VALUE_DIM, BLOCK_N, BLOCK_DV)


def _descriptors(tile: Tile, constants: dict, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple:
    width, value_width = constants["BLOCK_D"], constants["BLOCK_DV"]
    return (descriptor(q, tile.block_m, width), descriptor(k, tile.block_n, width), descriptor(v, tile.block_n, value_width),
            descriptor(grad_out, tile.block_m, value_width))


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, q: Layout, k: Layout, v: Layout, out: Layout,
             grad_out: Layout, dq: Layout, stats_stride: int, options: Options) -> tuple[Launch, Tile, Grid]:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    tile = dq_tile(architecture(device), *options.widths(q[0], v[0]), dtype.itemsize, options.block_k)
    grid = options.grid(q[0], k[0], tile)
    tma = tile.tma and aligned and all(tma_takes_layout(*x, dtype.itemsize) for x in (q, k, v, grad_out))
    constants = options.constants(grid, q[0], v[0], dtype) | {"HAS_GRAD_LSE": has_grad_lse, "STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*(stride for x in (q, k, v, out, grad_out, dq) for stride in strides(x)), math.prod(q[0][:-1]), stats_stride,
               *options.scalars(grid, q[0], k[0], by_keys=False))
    programs = options.programs(q[0][-2], seqlen_q, sequences, tile.block_m)
    return Launch(block_sparse_bwd_dq_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages), tile, grid


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout, dk: Layout,
               dv: Layout, stats_stride: int, options: Options) -> tuple[Launch, Tile, Grid]:
    sequences, _, seqlen_k = options.sizes(q[0], k[0])
    tile = dkdv_tile(architecture(device), *options.widths(q[0], v[0]), dtype.itemsize, options.block_q)
    grid = options.grid(q[0], k[0], tile)
    tma = tile.tma and aligned and all(tma_takes_layout(*x, dtype.itemsize) for x in (q, k, v, grad_out))
    constants = options.constants(grid, q[0], v[0], dtype) | {"STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*(stride for x in (q, k, v, grad_out, dk, dv) for stride in strides(x)), stats_stride,
               *options.scalars(grid, q[0], k[0], by_keys=True))
    programs = options.programs(k[0][-2], seqlen_k, sequences, tile.block_n)
    return Launch(block_sparse_bwd_dkdv_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages), tile, grid


def launch_dq(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
              cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """dQ and the row statistics that launch_dkdv reads."""
    sequences, seqlen_q, _ = options.sizes(q.shape, k.shape)
    dq = q.new_empty(q.shape)
    rows = options.programs(q.shape[-2], seqlen_q, sequences, STATS_BLOCK) * STATS_BLOCK
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, rows)
    if stats.numel() == 0:
        return dq, row_stats
    launch, tile, grid = _dq_plan(q.device, q.dtype, are_aligned(q, k, v, out, grad_out), grad_lse is not None,
                                  *map(layout, (q, k, v, out, grad_out, dq)), rows, options)
    lists = options.lists(mask, grid, q.shape, k.shape, by_keys=False)
    if launch.constants["TMA"]:
        q, k, v, grad_out = _descriptors(tile, launch.constants, q, k, v, grad_out)
    launch(q, k, v, out, grad_out, grad_lse, stats, row_stats, dq, cu_seqlens_q, cu_seqlens_k, *lists.tensors)
    return dq, row_stats


def launch_dkdv(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_stats: Tensor, mask: Tensor, cu_seqlens_q: Tensor | None,
                cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """dK and dV from the row statistics of launch_dq."""
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if k.numel() == 0:
        return dk, dv
    launch, tile, grid = _dkdv_plan(q.device, q.dtype, are_aligned(q, k, v, grad_out), *map(layout, (q, k, v, grad_out, dk, dv)),
                                    row_stats.shape[1], options)
    lists = options.lists(mask, grid, q.shape, k.shape, by_keys=True)
    if launch.constants["TMA"]:
        q, k, v, grad_out = _descriptors(tile, launch.constants, q, k, v, grad_out)
    launch(q, k, v, grad_out, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k, *lists.tensors)
    return dk, dv


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV for the gradients of output and LSE."""
    if grad_out.shape[-1] > 1 and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()  # autograd may hand over an expanded gradient, which no kernel can read row by row
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    with on_device_of(q):
        dq, row_stats = launch_dq(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, options)
        return dq, *launch_dkdv(grad_out, q, k, v, row_stats, mask, cu_seqlens_q, cu_seqlens_k, options)
