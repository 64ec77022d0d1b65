"""Block-sparse attention's backward: `_triton.backward` over the forward's lists and over those of the queries of each tile of keys."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, backward_dkdv, backward_dq, dkdv_step, dq_step
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks, tma_kind
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.tiles import Operand, Shape
from attnzoo_kernels.block_sparse.hooks import Lists, listed_keys, listed_queries, listed_tile, seen, seen_transposed
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import dkdv_tile, dq_tile


@triton.jit
def _dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dq_step(state, x, own, at, position, edge, MASKED, GUARD, seen)


@triton.jit
def _dq_loops(state, x, lists):
    return listed_keys(_dq_step, state, x, lists)


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_stats", "stride_lb",
                               "stride_lh", "list_tiles", "list_width"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order", "index", "count", "bits", "grad_lse_ptr"])
def block_sparse_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, row_stats_ptr, dq_ptr,
                               cu_seqlens_q, cu_seqlens_k, order, index, count, bits, q_strides, k_strides, v_strides, o_strides,
                               do_strides, dq_strides, stride_stats, stride_rows, stride_lb, stride_lh, list_tiles, list_width,
                               softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group,
                               HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                               PART_Q: tl.constexpr, PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                               HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               HAS_GRAD_LSE: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    backward_dq(listed_tile(order, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT),
                Operand(q_source, *q_strides), Operand(k_source, *k_strides), Operand(v_source, *v_strides), Operand(out_ptr, *o_strides),
                Operand(do_source, *do_strides), Operand(dq_ptr, *dq_strides), grad_lse_ptr, stats_ptr, None, row_stats_ptr, stride_stats,
                stride_rows, softmax_scale if PRECISION == "ieee" else scale, softmax_scale,
                Lists(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), index, count, bits, list_tiles, list_width, stride_lb,
                      stride_lh, n_seqs, PART_Q, PART_K), n_seqs, seqlen_q, heads, group,
                Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dq_loops, HAS_GRAD_LSE, False,
                STATS_BLOCK, REFINED=True)


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dkdv_step(state, x, own, at, position, edge, MASKED, GUARD, seen_transposed)


@triton.jit
def _dkdv_loops(state, x, lists):
    return listed_queries(_dkdv_step, state, x, lists)


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_lb", "stride_lh",
                               "list_tiles", "list_width"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order", "index", "count", "bits"])
def block_sparse_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, order,
                                 index, count, bits, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, stride_rows,
                                 stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, window_left, window_right, n_seqs,
                                 seqlen_q, seqlen_k, heads, group, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                                 BLOCK_DV: tl.constexpr, PART_Q: tl.constexpr, PART_K: tl.constexpr, PACKED: tl.constexpr,
                                 HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                                 BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    backward_dkdv(listed_tile(order, cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False),
                  Operand(q_source, *q_strides), Operand(k_source, *k_strides), Operand(v_source, *v_strides),
                  Operand(do_source, *do_strides), Operand(dk_ptr, *dk_strides), Operand(dv_ptr, *dv_strides), row_stats_ptr, stride_rows,
                  softmax_scale if PRECISION == "ieee" else scale, softmax_scale, 1.0,
                  Lists(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), index, count, bits, list_tiles, list_width, stride_lb,
                      stride_lh, n_seqs, PART_Q, PART_K), n_seqs, seqlen_q, heads, group,
                  Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dkdv_loops, STATS_BLOCK)


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, q: Layout, k: Layout, v: Layout, out: Layout,
             grad_out: Layout, dq: Layout, stats_stride: int, options: Options) -> tuple[Launch, Grid]:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    tile = dq_tile(architecture(device), *options.widths(q[0], v[0]), dtype.itemsize, options.block_k)
    grid = options.grid(q[0], k[0], tile)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.packed)
    constants = options.constants(grid, q[0], v[0], dtype) | {"HAS_GRAD_LSE": has_grad_lse, "STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*operand_strides(q, k, v, out, grad_out, dq), math.prod(q[0][:-1]), stats_stride,
               *options.scalars(grid, q[0], k[0], by_keys=False))
    programs = options.programs(q[0][-2], seqlen_q, sequences, tile.block_m)
    return Launch(block_sparse_bwd_dq_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages,
                  read_blocks(tile, constants, 4)), grid


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout, dk: Layout,
               dv: Layout, stats_stride: int, options: Options) -> tuple[Launch, Grid]:
    sequences, _, seqlen_k = options.sizes(q[0], k[0])
    tile = dkdv_tile(architecture(device), *options.widths(q[0], v[0]), dtype.itemsize, options.block_q)
    grid = options.grid(q[0], k[0], tile)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.packed)
    constants = options.constants(grid, q[0], v[0], dtype) | {"STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*operand_strides(q, k, v, grad_out, dk, dv), stats_stride,
               *options.scalars(grid, q[0], k[0], by_keys=True))
    programs = options.programs(k[0][-2], seqlen_k, sequences, tile.block_n)
    return Launch(block_sparse_bwd_dkdv_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages,
                  read_blocks(tile, constants, 3)), grid


def launch_dq(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
              cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """dQ and the row statistics that launch_dkdv reads."""
    sequences, seqlen_q, _ = options.sizes(q.shape, k.shape)
    dq = q.new_empty(q.shape)
    rows = options.programs(q.shape[-2], seqlen_q, sequences, STATS_BLOCK) * STATS_BLOCK
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, rows)
    if stats.numel() == 0:
        return dq, row_stats
    launch, grid = _dq_plan(q.device, q.dtype, are_aligned(q, k, v, out, grad_out), grad_lse is not None,
                                  *map(layout, (q, k, v, out, grad_out, dq)), rows, options)
    lists = options.lists(mask, grid, q.shape, k.shape, by_keys=False)
    launch(q, k, v, out, grad_out, grad_lse, stats, row_stats, dq, cu_seqlens_q, cu_seqlens_k, *lists.tensors)
    return dq, row_stats


def launch_dkdv(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_stats: Tensor, mask: Tensor, cu_seqlens_q: Tensor | None,
                cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """dK and dV from the row statistics of launch_dq."""
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    if k.numel() == 0:
        return dk, dv
    launch, grid = _dkdv_plan(q.device, q.dtype, are_aligned(q, k, v, grad_out), *map(layout, (q, k, v, grad_out, dk, dv)),
                                    row_stats.shape[1], options)
    lists = options.lists(mask, grid, q.shape, k.shape, by_keys=True)
    launch(q, k, v, grad_out, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k, *lists.tensors)
    return dk, dv


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV for the gradients of output and LSE."""
    grad_out = row_by_row(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    with on_device_of(q):
        dq, row_stats = launch_dq(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, options)
        return dq, *launch_dkdv(grad_out, q, k, v, row_stats, mask, cu_seqlens_q, cu_seqlens_k, options)
