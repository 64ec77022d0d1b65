"""Differential attention's forward: one pass over the keys, with two softmaxes."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, tma_kind
from attnzoo_kernels._triton.forward import normalised, scored, softmax_state, store_softmax
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.mainloop import QueryTile, key_loops, load_values, window_seen
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.softmax import add_dot, in_units, rescaled, softmax_weights
from attnzoo_kernels._triton.tiles import Operand, Shape, other_rows, program_tile, row_places, store_own
from attnzoo_kernels.differential.hooks import Branch2, load_both_keys, load_branch, load_lambda
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import forward_tile


@triton.jit
def _gather(scores, v, acc, row_max, row_sum, x, MASKED: tl.constexpr, LAGS: tl.constexpr):
    """Adds a tile of keys to one branch's O, row maxima and row sums."""
    weights, new_max, rescale = softmax_weights(scores, row_max, x.unit, MASKED != "none", x.shape.PRECISION == "ieee", LAGS)
    acc = rescaled(acc, rescale, new_max, row_max, LAGS)
    return add_dot(weights.to(v.dtype), v, acc, x.shape.PRECISION), new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    acc1, max1, sum1, acc2, max2, sum2 = state
    k1, k2 = load_both_keys(x, own, at, GUARD)
    scores1, _ = scored(x.q, k1, x, own, at, position, edge, MASKED, window_seen)
    scores2, _ = scored(own.q, k2, x, own, at, position, edge, MASKED, window_seen)
    v = load_values(x, at, GUARD)  # once for both branches
    acc1, max1, sum1 = _gather(scores1, v, acc1, max1, sum1, x, MASKED, own.LAGS)
    acc2, max2, sum2 = _gather(scores2, v, acc2, max2, sum2, x, MASKED, own.LAGS)
    return acc1, max1, sum1, acc2, max2, sum2


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_lse", "stride_lb",
                                "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def differential_fwd_kernel(q1_source, q2_source, k1_source, k2_source, v_source, lam_ptr, out_ptr, out2_ptr, lse_ptr, stats_ptr,
                            cu_seqlens_q, cu_seqlens_k, q1_strides, q2_strides, k1_strides, k2_strides, v_strides, stride_lb, stride_ls,
                            stride_lh, o_strides, stride_lse, softmax_scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads,
                            group, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                            SHARED_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                            PRECISION: tl.constexpr, SAVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
                            Q_SELECT: tl.constexpr, LAGS: tl.constexpr):
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT)
    if place.row >= place.length:
        return
    EXACT: tl.constexpr = PRECISION == "ieee"
    q1, k1_rows = load_branch(Operand(q1_source, *q1_strides),
                              Operand(k1_source, *k1_strides), place, group, HEAD_DIM, BLOCK_M, BLOCK_D,
                              not TMA or Q_SELECT, TMA)
    q2, k2_rows = load_branch(Operand(q2_source, *q2_strides),
                              Operand(k2_source, *k2_strides), place, group, HEAD_DIM, BLOCK_M, BLOCK_D,
                              not TMA or Q_SELECT, TMA)
    v_rows = other_rows(Operand(v_source, *v_strides), place, place.head // group, TMA)
    branch = softmax_state(-float("inf"), Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA))
    acc1, max1, sum1, acc2, max2, sum2 = key_loops(
        _step, branch + branch,
        QueryTile(q1, None, None, k1_rows, v_rows, place, place.row + tl.arange(0, BLOCK_M)[:, None], in_units(softmax_scale, EXACT),
                  Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), False),
        Branch2(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), q2, k2_rows, None, SHARED_K, LAGS), False, False)

    i, at, inside = row_places(place, place.head, seqlen_q, heads, BLOCK_M, PACKED)
    lam = load_lambda(Operand(lam_ptr, stride_lb, stride_ls, stride_lh), place, i)
    acc2 = normalised(acc2, sum2, 1.0, PRECISION)
    out = normalised(acc1, sum1, 1.0, PRECISION) - lam[:, None] * acc2
    store_own(Operand(out_ptr, *o_strides), out, place, VALUE_DIM, BLOCK_M, BLOCK_DV)
    if SAVE and not EXACT:
        store_own(Operand(out2_ptr, *o_strides), acc2, place, VALUE_DIM, BLOCK_M, BLOCK_DV)
    store_softmax(lse_ptr, stats_ptr, stride_lse, at, inside, max1, sum1, PRECISION, SAVE)
    store_softmax(lse_ptr + stride_lse, stats_ptr + 2 * stride_lse, stride_lse, at, inside, max2, sum2, PRECISION, SAVE)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, save: bool, shared_k: bool, q1: Layout, q2: Layout, k1: Layout,
          k2: Layout, v: Layout, lam: tuple[int, int, int], options: Options) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q1[0], k1[0])
    constants = options.constants(q1[0], v[0], dtype, shared_k=shared_k)
    width, value_width = constants["BLOCK_D"], constants["BLOCK_DV"]
    tile = forward_tile(architecture(device), width, value_width, dtype.itemsize)
    tma = tma_kind(tile.tma and aligned, (q1, q2, k1, k2, v), dtype.itemsize, options.packed)
    # lagging maxima and rescaling by warp are faster only for values of width 64; four warps must share 64 rows
    lags = tma > 0 and architecture(device) == 90 and value_width <= 64 and tile.block_m == 16 * tile.num_warps
    constants |= {"SAVE": save, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma, "Q_SELECT": tile.q_registers,
                  "LAGS": lags}
    heads, value_dim = q1[0][-2], v[0][-1]
    stride_out = (0 if options.packed else seqlen_q * heads * value_dim, heads * value_dim, value_dim)
    scalars = (*operand_strides(q1, q2, k1, k2, v), *lam, stride_out, heads * seqlen_q * (1 if options.packed else sequences),
               *options.scalars(q1[0], k1[0]))
    of_queries, of_keys = (tile.block_m, width, options.packed), (tile.block_n, width, options.packed)
    blocks = {0: of_queries, 1: of_queries, 2: of_keys, 3: of_keys, 4: (tile.block_n, value_width, options.packed)}
    return Launch(differential_fwd_kernel, options.programs(heads, seqlen_q, sequences, tile.block_m), scalars, constants, tile.num_warps,
                  tile.num_stages, blocks if tma else {})


def launch_forward(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
                   cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, save: bool,
                   options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (layout of q1, value width), both LSEs (2, ...), and for the backward, empty unless `save`: the second branch's output, which
    float32 does not need, and the statistics (4, ...) of both softmaxes.
    """
    sequences, seqlen_q, _ = options.sizes(q1.shape, k1.shape)
    heads, shared_k = q1.shape[-2], k2 is None
    out = torch.empty(*q1.shape[:-1], v.shape[-1], dtype=q1.dtype, device=q1.device)
    out2 = torch.empty_like(out) if save and q1.dtype != torch.float32 else out.new_empty(0)
    rows = (heads, seqlen_q) if options.packed else (sequences, heads, seqlen_q)
    lse = torch.empty(2, *rows, dtype=torch.float32, device=q1.device)
    stats = lse.new_empty(4, *rows) if save else lse.new_empty(0)
    if lse.numel() == 0:
        return out, lse, out2, stats
    k2 = k1 if k2 is None else k2
    launch = _plan(q1.device, q1.dtype, are_aligned(q1, q2, k1, k2, v), save, shared_k, *map(layout, (q1, q2, k1, k2, v)),
                   lambda_strides(lam, options.packed), options)
    with on_device_of(out):
        launch(q1, q2, k1, k2, v, lam, out, out2, lse, stats, cu_seqlens_q, cu_seqlens_k)
    return out, lse, out2, stats
