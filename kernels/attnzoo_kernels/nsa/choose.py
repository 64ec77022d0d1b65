"""Which blocks queries read, by the weights of the compressed keys in them: no weight is stored."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of, strides
from attnzoo_kernels._triton.softmax import score_dot
from attnzoo_kernels._triton.tiles import Operand, head_rows, load_rows, program_tile
from attnzoo_kernels.routed.best import choose_best, plan_choice

LOG2E = math.log2(math.e)


class Compressed(NamedTuple):
    """Compressed keys of a sequence, which PER_BLOCK strides make a block and OVERLAP strides a key of, and the queries that meet them."""

    queries: Any  # Operand
    keys: Any  # Rows of a key head
    first: Any  # of the sequence's keys
    count: Any
    lse: Any  # (heads, total), of the queries over all compressed keys
    total: Any
    scale: Any
    stride: Any
    group: Any
    HEAD_DIM: Any
    BLOCK_D: Any
    OVERLAP: Any
    PER_BLOCK: Any
    PRECISION: Any


@triton.jit
def _member_scores(q, lse, x, own, block):
    """The sums, by block, of one head's weights of compressed keys."""
    column = tl.arange(0, own.BLOCK_D)
    numbers = block[None, :]
    scores = (x.position * 0).to(tl.float32) + (numbers * 0).to(tl.float32)
    for offset in range(own.PER_BLOCK + own.OVERLAP - 1):
        # strides in the key and in the block
        shared = tl.minimum(offset + 1, own.PER_BLOCK) - tl.maximum(offset + 1 - own.OVERLAP, 0)
        c = numbers * own.PER_BLOCK + (offset + 1 - own.OVERLAP)
        row = tl.reshape(own.first + c, [numbers.shape[1]]).to(tl.int64)
        there = tl.reshape((c >= 0) & (c < own.count), [numbers.shape[1]])
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(own.keys.source + row[:, None] * own.keys.stride + column[None, :],
                       mask=there[:, None] & (column < own.HEAD_DIM)[None, :], other=0.0)
        weights = tl.exp2(score_dot(q, keys, own.PRECISION) * own.scale - lse)
        scores += tl.where((c >= 0) & ((c + own.OVERLAP) * own.stride <= x.position + 1), shared * weights, 0.0)
    return scores


@triton.jit
def _scores(x, own, block):
    """SCORES: of all heads of a key head."""
    place = x.place
    scores = tl.zeros([x.i.shape[0], block.shape[0]], tl.float32)
    for member in range(own.group):
        head = place.head * own.group + member
        # [BLOCK_M, BLOCK_D]
        q = load_rows(head_rows(own.queries, 0, head, place.first, place.length, False), place.row, own.HEAD_DIM, x.i.shape[0], own.BLOCK_D,
                      True, False)
        lse = tl.load(own.lse + head.to(tl.int64) * own.total + place.first + x.i, mask=x.i < place.length, other=0.0)[:, None]
        # -inf also where a score is NaN; then the weights of all keys that the query sees are NaN, too
        lse = tl.where(lse == -float("inf"), float("nan"), lse * 1.4426950408889634)
        scores += _member_scores(q, lse, x, own, block)
    last = tl.maximum(x.position, 0) // (own.PER_BLOCK * own.stride) - 1
    return tl.where((block == 0)[None, :] | (block[None, :] == last), 1e30, scores)  # the first and the one before the own are always read


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "stride", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_c"])
def nsa_blocks_kernel(q_ptr, k_ptr, lse_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, stride_qs, stride_qh, stride_ks,
                      stride_kh, scale, n_seqs, seqlen_q, seqlen_k, kv_heads, group, stride, slots, HEAD_DIM: tl.constexpr,
                      BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr, PER_BLOCK: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    bounds = cu_seqlens_c + tl.minimum(place.sequence, n_seqs - 1)
    first = tl.load(bounds)
    choose_best(place, Compressed(Operand(q_ptr, 0, stride_qs, stride_qh),
                                  head_rows(Operand(k_ptr, 0, stride_ks, stride_kh), 0, place.head, 0, seqlen_k, False), first,
                                  tl.load(bounds + 1) - first, lse_ptr, seqlen_q, scale, stride, group, HEAD_DIM, BLOCK_D, OVERLAP,
                                  PER_BLOCK, PRECISION),
                blocks_ptr, kv_heads, PER_BLOCK * stride, slots, _scores, SLOTS, BLOCK_M, BLOCK_N)


def launch_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor,
                  compress_size: int, compress_stride: int, block_size: int, slots: int, softmax_scale: float) -> Tensor:
    """q (total_q, heads, head_dim), k_cmp (total_c, kv_heads, head_dim), lse (heads, total_q); int32 (total_q, kv_heads, slots)."""
    total_q, heads, _ = q.shape
    kv_heads = k_cmp.shape[1]
    chosen = torch.empty(total_q, kv_heads, slots, dtype=torch.int32, device=q.device)
    if chosen.numel() == 0:
        return chosen
    programs, sequences, constants = plan_choice(q, cu_seqlens_q, kv_heads, slots, narrow=True)
    with on_device_of(q):
        nsa_blocks_kernel[(programs,)](
            q, k_cmp, lse, chosen, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, *strides(q)[1:], *strides(k_cmp)[1:], softmax_scale * LOG2E,
            sequences, total_q, k_cmp.shape[0], kv_heads, heads // kv_heads, compress_stride, slots,
            OVERLAP=compress_size // compress_stride, PER_BLOCK=block_size // compress_stride, **constants)
    return chosen
