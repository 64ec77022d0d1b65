"""Differential attention's backward in two kernels, as `_triton.backward` has it, each for both branches.

With O2 = P2 V, r = rowsum(dO * O2), dP = dO Vᵀ and lambda by row:

    dS1 = P1 * (dP - rowsum(dO * O) - lambda r)      dS2 = -lambda P2 * (dP - r)      dV = (P1 - lambda P2)ᵀ dO      dlambda = -r

dP is one product for both branches. The row statistics are those of `_triton.backward` for each branch, with r as the second branch's
delta, and lambda.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import (
    STATS_BLOCK,
    add_dq,
    backward_dkdv,
    first_stats_row,
    load_queries,
    load_row_stats,
    load_stats,
    pass_on_softmax,
    repeated,
    repeated_transposed,
    row_delta,
    transposed_dot,
)
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, tma_kind
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row
from attnzoo_kernels._triton.mainloop import (
    QueryTile,
    RowStats,
    key_loops,
    load_gradients,
    load_query_rows,
    load_values,
    query_loops,
    window_seen,
    window_seen_transposed,
)
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.softmax import add_dot, in_units, score_dot
from attnzoo_kernels._triton.tiles import Operand, Shape, load_own, other_rows, own_rows, program_tile, row_places, store_own
from attnzoo_kernels.differential.hooks import Branch2, Branch2Keys, load_both_keys, load_branch, load_lambda
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import dkdv_tile, dq_tile


@triton.jit
def _dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    """Adds a tile of keys to dQ1 and dQ2 and to both exact deltas. dQ2 is summed without the factor -lambda of its rows."""
    dq1, dq2, exact_delta, exact_r = state
    k1, k2 = load_both_keys(x, own, at, GUARD)
    v = load_values(x, at, GUARD)
    weights1, _ = repeated(x.q, k1, x.stats, x, own, at, position, edge, MASKED, window_seen)
    weights2, _ = repeated(own.q, k2, own.stats, x, own, at, position, edge, MASKED, window_seen)
    # [BLOCK_M, BLOCK_N], once for both branches
    dweights = score_dot(x.do, v, x.shape.PRECISION)
    dq1, exact_delta = add_dq(dq1, exact_delta, weights1, dweights, 1.0, k1, x.stats, x, x.EXACT_DELTA and x.shape.PRECISION == "ieee")
    dq2, exact_r = add_dq(dq2, exact_r, weights2, dweights, 1.0, k2, own.stats, x, x.EXACT_DELTA)
    return dq1, dq2, exact_delta, exact_r


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_stats", "stride_lb",
                                "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k", "stats_ptr", "r_ptr"])
def differential_bwd_dq_kernel(q1_source, q2_source, k1_source, k2_source, v_source, do_source, lam_ptr, out_ptr, out2_ptr, stats_ptr,
                               r_ptr, row_stats_ptr, dq1_ptr, dq2_ptr, cu_seqlens_q, cu_seqlens_k, q1_strides, q2_strides, k1_strides,
                               k2_strides, v_strides, do_strides, stride_lb, stride_ls, stride_lh, o_strides, dq1_strides, dq2_strides,
                               stride_stats, stride_rows, softmax_scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads,
                               group, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                               SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                               PRECISION: tl.constexpr, EXACT_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if place.row >= place.length:
        return
    EXACT: tl.constexpr = PRECISION == "ieee"
    BRANCH_STATS: tl.constexpr = 3 if EXACT else 2
    i, lse_at, inside = row_places(place, place.head, seqlen_q, heads, BLOCK_M, PACKED)
    # [BLOCK_M, BLOCK_DV]
    do = load_own(Operand(do_source, *do_strides), place, VALUE_DIM, BLOCK_M, BLOCK_DV, TMA)
    lam = load_lambda(Operand(lam_ptr, stride_lb, stride_ls, stride_lh), place, i)
    delta = tl.zeros([BLOCK_M], tl.float32)
    r = tl.zeros([BLOCK_M], tl.float32)
    if not EXACT:
        delta = row_delta(own_rows(Operand(out_ptr, *o_strides), place, False), do, place.row, VALUE_DIM)
        r = row_delta(own_rows(Operand(out2_ptr, *o_strides), place, False), do, place.row, VALUE_DIM)
        delta += lam * r
    row_stats = row_stats_ptr + i + first_stats_row(place.head, place.sequence, place.first, n_seqs, seqlen_q, heads, PACKED, STATS_BLOCK)
    row_stats2 = row_stats + BRANCH_STATS * stride_rows
    lse1, sum1 = pass_on_softmax(stats_ptr, stride_stats, lse_at, row_stats, stride_rows, inside, None, PRECISION)
    lse2, sum2 = pass_on_softmax(stats_ptr + 2 * stride_stats, stride_stats, lse_at, row_stats2, stride_rows, inside, None, PRECISION)
    tl.store(row_stats2 + BRANCH_STATS * stride_rows, lam)
    q1, k1_rows = load_branch(Operand(q1_source, *q1_strides),
                              Operand(k1_source, *k1_strides), place, group, HEAD_DIM, BLOCK_M, BLOCK_D,
                              not TMA, TMA)
    q2, k2_rows = load_branch(Operand(q2_source, *q2_strides),
                              Operand(k2_source, *k2_strides), place, group, HEAD_DIM, BLOCK_M, BLOCK_D,
                              not TMA, TMA)

    exact_delta = tl.zeros([BLOCK_M], tl.float32)
    exact_r = tl.zeros([BLOCK_M], tl.float32)
    zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # float32 goes over the keys twice, first for delta and r: summed from the weights, they make the row sums of dS cancel exactly
    for sweep in tl.static_range(2 if EXACT else 1):
        if sweep == 1:
            delta = exact_delta
            r = exact_r
        dq1, dq2, exact_delta, exact_r = key_loops(
            _dq_step, (zeros, zeros, exact_delta, exact_r),
            QueryTile(q1, do, RowStats(lse1, sum1, delta), k1_rows,
                      other_rows(Operand(v_source, *v_strides), place, place.head // group, TMA),
                      place, i[:, None], in_units(softmax_scale, EXACT),
                      Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA),
                      (EXACT_R or EXACT) and sweep == 0),
            Branch2(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), q2, k2_rows, RowStats(lse2, sum2, r), SHARED_K, False),
            False, False)
    # values that were read past the sequence's end must not reach the second kernel
    tl.store(row_stats + stride_rows, tl.where(inside, delta, 0.0))
    tl.store(row_stats2 + stride_rows, tl.where(inside, r, 0.0))
    store_own(Operand(dq1_ptr, *dq1_strides), dq1 * softmax_scale, place, HEAD_DIM, BLOCK_M, BLOCK_D)
    store_own(Operand(dq2_ptr, *dq2_strides), dq2 * (-lam * softmax_scale)[:, None], place, HEAD_DIM, BLOCK_M, BLOCK_D)
    if EXACT_R:
        tl.store(r_ptr + lse_at, exact_r, mask=inside)


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    """Adds a tile of queries to dK1, dV and dK2. With SHARED_K, dK of both branches is summed in dk1."""
    dk1, dv, dk2 = state
    PRECISION: tl.constexpr = x.shape.PRECISION
    BRANCH_STATS: tl.constexpr = 3 if PRECISION == "ieee" else 2
    q1 = load_queries(x, own, at, GUARD)
    q2 = load_query_rows(x, own.queries, at, GUARD)
    do = load_gradients(x, at, GUARD)
    row_stats2 = x.row_stats + BRANCH_STATS * x.stride_rows
    stats1 = load_stats(x, own, at)
    stats2 = load_row_stats(row_stats2, x.stride_rows, at, x.shape.BLOCK_M, PRECISION)
    lam = tl.load(row_stats2 + BRANCH_STATS * x.stride_rows + at + tl.arange(0, x.shape.BLOCK_M))[None, :]
    # [BLOCK_N, BLOCK_M]
    weights1, _ = repeated_transposed(x.k, q1, stats1, x, own, at, position, edge, MASKED, window_seen_transposed)
    weights2, _ = repeated_transposed(x.k if own.SHARED_K else own.k, q2, stats2, x, own, at, position, edge, MASKED,
                                      window_seen_transposed)
    weights2 *= lam
    # [BLOCK_N, BLOCK_DV]; the difference is rounded once
    dv = add_dot((weights1 - weights2).to(do.dtype), do, dv, PRECISION)
    # [BLOCK_N, BLOCK_M], once for both branches
    dweights = transposed_dot(x.v, do, PRECISION)
    # [BLOCK_N, BLOCK_D]
    dk1 = add_dot((weights1 * (dweights - stats1.delta[None, :])).to(q1.dtype), q1, dk1, PRECISION)
    dscores2 = (weights2 * (stats2.delta[None, :] - dweights)).to(q2.dtype)
    if own.SHARED_K:
        dk1 = add_dot(dscores2, q2, dk1, PRECISION)
    else:
        dk2 = add_dot(dscores2, q2, dk2, PRECISION)
    return dk1, dv, dk2


@triton.jit
def _dkdv_loops(state, x, own):
    return query_loops(_dkdv_step, state, x, Branch2Keys(own.window, own.k, other_rows(own.queries, x.place, x.head, x.shape.TMA),
                                                         own.SHARED_K), False)


@triton.jit
def _store_dk2(dk2, softmax_scale, own, place, shape):
    """FINISH: stores dK2, the third sum."""
    store_own(own.gradient, dk2 * softmax_scale, place, shape.HEAD_DIM, shape.BLOCK_N, shape.BLOCK_D)


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_dkdv_kernel(q1_source, q2_source, k1_source, k2_source, v_source, do_source, row_stats_ptr, dk1_ptr, dk2_ptr, dv_ptr,
                                 cu_seqlens_q, cu_seqlens_k, q1_strides, q2_strides, k1_strides, k2_strides, v_strides, do_strides,
                                 dk1_strides, dk2_strides, dv_strides, stride_rows, softmax_scale, window_left, window_right, n_seqs,
                                 seqlen_q, seqlen_k, heads, group, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                                 BLOCK_DV: tl.constexpr, SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                                 HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                                 STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    place = program_tile(cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False)
    if place.row >= place.length:
        return
    k2 = 0.0
    dk2 = 0.0
    if not SHARED_K:
        # [BLOCK_N, BLOCK_D]
        k2 = load_own(Operand(k2_source, *k2_strides), place, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        dk2 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    backward_dkdv(
        place, Operand(q1_source, *q1_strides), Operand(k1_source, *k1_strides), Operand(v_source, *v_strides),
        Operand(do_source, *do_strides), Operand(dk1_ptr, *dk1_strides), Operand(dv_ptr, *dv_strides), row_stats_ptr, stride_rows,
        in_units(softmax_scale, PRECISION == "ieee"), softmax_scale, 1.0,
        Branch2Keys(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), k2,
                    Operand(q2_source, *q2_strides), SHARED_K,
                    Operand(dk2_ptr, *dk2_strides)), n_seqs, seqlen_q, heads, group,
        Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dkdv_loops, STATS_BLOCK, dk2,
        None if SHARED_K else _store_dk2)


def _blocks(tile, constants: dict) -> dict[int, tuple]:
    """The `blocks` of a Launch whose first tensors are q1, q2, k1, k2, v and dO. Empty unless TMA reads them."""
    rows = [tile.block_m] * 2 + [tile.block_n] * 3 + [tile.block_m]
    widths = [constants["BLOCK_D"]] * 4 + [constants["BLOCK_DV"]] * 2
    return {n: (*box, constants["PACKED"]) for n, box in enumerate(zip(rows, widths, strict=True))} if constants["TMA"] else {}


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, shared_k: bool, exact_r: bool, sources: tuple[Layout, ...],
             out: Layout, dq1: Layout, dq2: Layout, lam: tuple[int, int, int], stats_stride: int, rows_stride: int,
             options: Options) -> Launch:
    q1, k1, v = sources[0], sources[2], sources[4]
    sequences, seqlen_q, _ = options.sizes(q1[0], k1[0])
    constants = options.constants(q1[0], v[0], dtype, shared_k=shared_k)
    tile = dq_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    constants |= {"EXACT_R": exact_r, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STATS_BLOCK": STATS_BLOCK,
                  "TMA": tma_kind(tile.tma and aligned, sources, dtype.itemsize, options.packed)}
    scalars = (*operand_strides(*sources), *lam, *operand_strides(out, dq1, dq2), stats_stride, rows_stride, *options.scalars(q1[0], k1[0]))
    return Launch(differential_bwd_dq_kernel, options.programs(q1[0][-2], seqlen_q, sequences, tile.block_m), scalars, constants,
                  tile.num_warps, tile.num_stages, _blocks(tile, constants))


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, shared_k: bool, sources: tuple[Layout, ...], dk1: Layout,
               dk2: Layout, dv: Layout, rows_stride: int, options: Options) -> Launch:
    q1, k1, v = sources[0], sources[2], sources[4]
    sequences, _, seqlen_k = options.sizes(q1[0], k1[0])
    constants = options.constants(q1[0], v[0], dtype, shared_k=shared_k)
    tile = dkdv_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STATS_BLOCK": STATS_BLOCK,
                  "TMA": tma_kind(tile.tma and aligned, sources, dtype.itemsize, options.packed)}
    scalars = (*operand_strides(*sources, dk1, dk2, dv), rows_stride, *options.scalars(q1[0], k1[0]))
    return Launch(differential_bwd_dkdv_kernel, options.programs(k1[0][-2], seqlen_k, sequences, tile.block_n), scalars, constants,
                  tile.num_warps, tile.num_stages, _blocks(tile, constants))


def launch_dq(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor, out2: Tensor,
              stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, exact_r: bool,
              options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ1, dQ2, the row statistics that launch_dkdv reads, r). r is shaped like an LSE and free of O2's rounding error; it is empty unless
    exact_r."""
    sequences, seqlen_q, _ = options.sizes(q1.shape, k1.shape)
    dq1, dq2 = q1.new_empty(q1.shape), q2.new_empty(q2.shape)
    r = torch.empty_like(stats[0]) if exact_r else stats.new_empty(0)
    rows = options.programs(q1.shape[-2], seqlen_q, sequences, STATS_BLOCK) * STATS_BLOCK
    row_stats = stats.new_empty(7 if q1.dtype == torch.float32 else 5, rows)
    if stats.numel() == 0:
        return dq1, dq2, row_stats, r
    sources = (q1, q2, k1, k1 if k2 is None else k2, v, grad_out)
    launch = _dq_plan(q1.device, q1.dtype, are_aligned(*sources, out, out2), k2 is None, exact_r, tuple(map(layout, sources)), layout(out),
                      layout(dq1), layout(dq2), lambda_strides(lam, options.packed), stats.stride(0), rows, options)
    launch(*sources, lam, out, out2, stats, r, row_stats, dq1, dq2, cu_seqlens_q, cu_seqlens_k)
    return dq1, dq2, row_stats, r


def launch_dkdv(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, row_stats: Tensor,
                cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """(dK1, dK2, dV) from the row statistics of launch_dq. Where the branches share K, dK1 is the gradient of both and dK2 is empty."""
    dk1, dv = k1.new_empty(k1.shape), v.new_empty(v.shape)
    dk2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    if k1.numel() == 0:
        return dk1, dk2, dv
    sources = (q1, q2, k1, k1 if k2 is None else k2, v, grad_out)
    launch = _dkdv_plan(q1.device, q1.dtype, are_aligned(*sources), k2 is None, tuple(map(layout, sources)), layout(dk1),
                        layout(dk1 if k2 is None else dk2), layout(dv), row_stats.shape[1], options)
    launch(*sources, row_stats, dk1, dk2, dv, cu_seqlens_q, cu_seqlens_k)
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
    grad_out = row_by_row(grad_out)
    with on_device_of(q1):
        dq1, dq2, row_stats, r = launch_dq(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam,
                                           options)
        dk1, dk2, dv = launch_dkdv(grad_out, q1, q2, k1, k2, v, row_stats, cu_seqlens_q, cu_seqlens_k, options)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return dq1, dq2, dk1, dk2, dv, dlam
