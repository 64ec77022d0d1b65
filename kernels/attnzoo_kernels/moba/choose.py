"""Which blocks each query reads: the means of blocks, and the best of a query's scores, of which none is stored."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, on_device_of, strides
from attnzoo_kernels._triton.softmax import score_dot
from attnzoo_kernels._triton.tiles import Operand, head_rows, load_rows, load_rows_at, program_tile
from attnzoo_kernels.routed.best import choose_best, launch_choice, plan_choice, tile_size

MEAN_ROWS = 64


@triton.jit(do_not_specialize=["block_size", "count"])
def moba_means_kernel(k_ptr, bounds_ptr, means_ptr, stride_ks, stride_kh, block_size, count, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                      ROWS: tl.constexpr):
    """One program: the mean of one block's keys, float32 (kv_heads, count, HEAD_DIM). A block that is not whole has another: none reads
    it."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    first, end = tl.load(bounds_ptr + block), tl.load(bounds_ptr + block + 1)
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for at in range(first, end, ROWS):
        row = at + tl.arange(0, ROWS)
        pointers = k_ptr + head.to(tl.int64) * stride_kh + row.to(tl.int64) * stride_ks
        # [ROWS, BLOCK_D]
        total += tl.sum(load_rows_at(pointers, row < end, HEAD_DIM, BLOCK_D).to(tl.float32), 0)
    tl.store(means_ptr + (head.to(tl.int64) * count + block) * HEAD_DIM + column, total / block_size, mask=column < HEAD_DIM)


class Means(NamedTuple):
    """Of a sequence's blocks, and the queries [BLOCK_M, BLOCK_D] that meet them."""

    q: Any
    means: Any
    stride: Any  # from one block's mean to the next one's
    HEAD_DIM: Any
    BLOCK_D: Any
    PRECISION: Any


@triton.jit
def _scores(x, own, at, block):
    """SCORES: queries times means."""
    # [BLOCK_N, BLOCK_D]
    mean = load_rows_at(own.means + block.to(tl.int64) * own.stride, block < x.earlier, own.HEAD_DIM, own.BLOCK_D)
    if own.PRECISION == "ieee":
        scores = score_dot(own.q, mean, own.PRECISION)
    else:
        # means in two parts: products as exact as float32's
        high = mean.to(own.q.dtype)
        scores = score_dot(own.q, high, own.PRECISION)
        scores += score_dot(own.q, (mean - high.to(tl.float32)).to(own.q.dtype), own.PRECISION)
    return scores


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "block_size", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "first_ptr"])
def moba_blocks_kernel(q_ptr, means_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, first_ptr, stride_qs, stride_qh, stride_mh, stride_mb,
                       n_seqs, seqlen_q, seqlen_k, heads, group, block_size, slots, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                       SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    # [BLOCK_M, BLOCK_D]
    q = load_rows(head_rows(Operand(q_ptr, 0, stride_qs, stride_qh), 0, place.head, place.first, place.length, False), place.row, HEAD_DIM,
                  BLOCK_M, BLOCK_D, True, False)
    first = tl.load(first_ptr + tl.minimum(place.sequence, n_seqs - 1))
    means = means_ptr + (place.head // group).to(tl.int64) * stride_mh + first.to(tl.int64) * stride_mb
    choose_best(place, Means(q, means, stride_mb, HEAD_DIM, BLOCK_D, PRECISION), blocks_ptr, heads, block_size, slots, _scores, SLOTS, 1,
                BLOCK_M, BLOCK_N)


def launch_blocks(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, first: Tensor, bounds_k: Tensor, block_size: int,
                  slots: int, means: Tensor | None = None) -> Tensor:
    """q (total_q, heads, head_dim), k (total_k, kv_heads, head_dim), first and bounds_k of Blocks; int32 (total_q, heads, slots).

    If `means` are given, float32 (blocks, kv_heads, head_dim), `first` has the index of each sequence's first block in them.
    """
    total_q, heads, width = q.shape
    total_k, kv_heads, _ = k.shape
    count = bounds_k.shape[0] - 1
    if total_q * slots == 0:
        return torch.empty(total_q, heads, slots, dtype=torch.int32, device=q.device)
    grid, sequences, constants = plan_choice(q, cu_seqlens_q, heads, slots, tile_size(q), tile_size(q), count // 256)
    if means is None:
        by_head = torch.empty(kv_heads, count, width, dtype=torch.float32, device=q.device)
        with on_device_of(q):
            moba_means_kernel[(count, kv_heads)](k, bounds_k, by_head, *strides(k)[1:], block_size, count, HEAD_DIM=width,
                                                 BLOCK_D=block_width(width), ROWS=MEAN_ROWS, num_warps=4)
        means = by_head.transpose(0, 1)
    return launch_choice(lambda blocks: moba_blocks_kernel[grid](
        q, means, blocks, cu_seqlens_q, cu_seqlens_k, first, *strides(q)[1:], means.stride(1), means.stride(0), sequences, total_q,
        total_k, heads, heads // kv_heads, block_size, slots, **constants, num_warps=4), q, heads, slots, grid[1])
