"""Block-sparse attention's forward: `_triton.forward` over listed tiles of keys, and its launch."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, outputs, read_blocks, tma_kind
from attnzoo_kernels._triton.forward import forward, forward_step, softmax_state
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.tiles import Operand, Shape
from attnzoo_kernels.block_sparse.hooks import Lists, listed_keys, listed_tile, seen
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import forward_tile


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, seen, LAGS=False)


@triton.jit
def _step_by_warp(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, seen, BY_WARP=True)


@triton.jit
def _loops(x, lists):
    return listed_keys(_step, softmax_state(-float("inf"), x.shape), x, lists)


@triton.jit
def _loops_by_warp(x, lists):
    return listed_keys(_step_by_warp, softmax_state(-float("inf"), x.shape), x, lists)


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "stride_stats", "stride_lb",
                               "stride_lh", "list_tiles", "list_width"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order", "index", "count", "bits"])
def block_sparse_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, order, index, count,
                            bits, q_strides, k_strides, v_strides, o_strides, stride_stats, stride_lb, stride_lh, list_tiles, list_width,
                            softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group,
                            HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                            PART_Q: tl.constexpr, PART_K: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                            HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            TMA: tl.constexpr, Q_SELECT: tl.constexpr, BY_WARP: tl.constexpr):
    forward(listed_tile(order, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT),
            Operand(q_source, *q_strides), Operand(k_source, *k_strides), Operand(v_source, *v_strides), Operand(out_ptr, *o_strides),
            lse_ptr, stats_ptr, stride_stats, softmax_scale if PRECISION == "ieee" else scale, 1.0,
            Lists(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), index, count, bits, list_tiles, list_width, stride_lb,
                      stride_lh, n_seqs, PART_Q, PART_K), seqlen_q, heads, group,
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _loops_by_warp if BY_WARP else _loops,
            False, Q_SELECT)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout,
          options: Options) -> tuple[Launch, Grid]:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    tile = forward_tile(architecture(device), *options.widths(q[0], v[0]), dtype.itemsize, options.block_k)
    grid = options.grid(q[0], k[0], tile)
    tma = tma_kind(tile.tma and aligned, (q, k, v), dtype.itemsize, options.packed)
    constants = options.constants(grid, q[0], v[0], dtype)
    # by Hopper's products, whose threads hold two rows of 64; wider values lose by it
    by_warp = tma > 0 and architecture(device) == 90 and constants["BLOCK_DV"] <= 64
    constants |= {"TMA": tma, "Q_SELECT": tile.q_registers, "BY_WARP": by_warp}
    heads, value_dim = q[0][-2], v[0][-1]
    stride_out = (0 if len(q[0]) == 3 else seqlen_q * heads * value_dim, heads * value_dim, value_dim)
    scalars = (*operand_strides(q, k, v), stride_out, math.prod(q[0][:-1]), *options.scalars(grid, q[0], k[0], by_keys=False))
    programs = options.programs(heads, seqlen_q, sequences, tile.block_m)
    return Launch(block_sparse_fwd_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages,
                  read_blocks(tile, constants)), grid


def launch_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (layout of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax."""
    out, lse, stats = outputs(q, v.shape[-1])
    if lse.numel() == 0:
        return out, lse, stats
    launch, grid = _plan(q.device, q.dtype, are_aligned(q, k, v), layout(q), layout(k), layout(v), options)
    with on_device_of(out):
        lists = options.lists(mask, grid, q.shape, k.shape, by_keys=False)
        launch(q, k, v, out, lse, stats, cu_seqlens_q, cu_seqlens_k, *lists.tensors)
    return out, lse, stats
