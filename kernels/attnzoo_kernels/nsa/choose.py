"""Which blocks queries read, by the weights of the compressed keys in them: no weight is stored."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width, next_power_of_2, on_device_of, strides
from attnzoo_kernels._triton.softmax import score_dot
from attnzoo_kernels._triton.tiles import Operand, head_rows, load_rows, program_tile
from attnzoo_kernels.routed.best import keep_best

LOG2E = math.log2(math.e)


@triton.jit
def _block_scores(q, lse, rows, first, count, block, position, scale, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                  OVERLAP: tl.constexpr, PER_BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """What one head's weights of compressed keys add up to in blocks [1, BLOCK_N]: [BLOCK_M, BLOCK_N]. rows: the key head's."""
    column = tl.arange(0, BLOCK_D)
    scores = (position * 0).to(tl.float32) + (block * 0).to(tl.float32)
    for offset in range(PER_BLOCK + OVERLAP - 1):
        shared = tl.minimum(offset + 1, PER_BLOCK) - tl.maximum(offset + 1 - OVERLAP, 0)  # strides in the key and in the block
        c = block * PER_BLOCK + (offset + 1 - OVERLAP)
        row = tl.reshape(first + c, [block.shape[1]]).to(tl.int64)
        there = tl.reshape((c >= 0) & (c < count), [block.shape[1]])
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(rows.source + row[:, None] * rows.stride + column[None, :], mask=there[:, None] & (column < HEAD_DIM)[None, :],
                       other=0.0)
        weights = tl.exp2(score_dot(q, keys, PRECISION) * scale - lse)
        scores += tl.where((c >= 0) & ((c + OVERLAP) * stride <= position + 1), shared * weights, 0.0)
    return scores


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "stride", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_c"])
def nsa_blocks_kernel(q_ptr, k_ptr, lse_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, stride_qs, stride_qh, stride_ks,
                      stride_kh, scale, n_seqs, seqlen_q, seqlen_k, kv_heads, group, stride, slots, HEAD_DIM: tl.constexpr,
                      BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr, PER_BLOCK: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """A program's tile of queries goes over the blocks before them, for all heads of a key head; blocks_ptr: int32 (seqlen_q, kv_heads,
    slots). lse_ptr: (kv_heads * group, seqlen_q), of the compressed keys."""
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    sequence = tl.minimum(place.sequence, n_seqs - 1)
    first = tl.load(cu_seqlens_c + sequence)
    count = tl.load(cu_seqlens_c + sequence + 1) - first
    i = place.row + tl.arange(0, BLOCK_M)
    position = i[:, None] + (place.other_length - place.length)
    per_block = PER_BLOCK * stride
    own = tl.maximum(position, 0) // per_block
    keys = head_rows(Operand(k_ptr, 0, stride_ks, stride_kh), 0, place.head, 0, seqlen_k, False)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros([BLOCK_M, SLOTS], tl.float32) + tl.where(slot < slots, -float("inf"), float("inf"))[None, :]
    chosen = tl.zeros([BLOCK_M, SLOTS], tl.int32) - 1 - slot[None, :]
    last = tl.minimum(place.row + BLOCK_M, place.length) - 1 + place.other_length - place.length
    earlier = tl.maximum(last, 0) // per_block
    for at in range(0, earlier, BLOCK_N):
        block = at + tl.arange(0, BLOCK_N)[None, :]
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in range(group):
            head = place.head * group + member
            rows = head_rows(Operand(q_ptr, 0, stride_qs, stride_qh), 0, head, place.first, place.length, False)
            # [BLOCK_M, BLOCK_D]
            q = load_rows(rows, place.row, HEAD_DIM, BLOCK_M, BLOCK_D, True, False)
            lse = tl.load(lse_ptr + head.to(tl.int64) * seqlen_q + place.first + i, mask=i < place.length, other=0.0)[:, None]
            lse = tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)
            scores += _block_scores(q, lse, keys, first, count, block, position, scale, stride, HEAD_DIM, BLOCK_D, OVERLAP, PER_BLOCK,
                                    PRECISION)
        scores = tl.where((block == 0) | (block == own - 1), 1e30, scores)  # the first block and the last before the own are always read
        scores = tl.where((block < own) & (scores == scores), scores, -float("inf"))
        best, chosen = keep_best(best, chosen, scores, block, SLOTS)
    out = ((place.first + i).to(tl.int64) * kv_heads + place.head) * slots
    tl.store(blocks_ptr + out[:, None] + slot[None, :], tl.maximum(chosen, -1), mask=(i < place.length)[:, None] & (slot < slots)[None, :])


def launch_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor,
                  compress_size: int, compress_stride: int, block_size: int, slots: int, softmax_scale: float) -> Tensor:
    """q (total_q, heads, head_dim), k_cmp (total_c, kv_heads, head_dim), lse (heads, total_q); int32 (total_q, kv_heads, slots)."""
    total_q, heads, width = q.shape
    kv_heads = k_cmp.shape[1]
    chosen = torch.empty(total_q, kv_heads, slots, dtype=torch.int32, device=q.device)
    if chosen.numel() == 0:
        return chosen
    call = Call(sequences=packed_sequences(cu_seqlens_q), softmax_scale=1.0)
    exact = q.dtype == torch.float32
    block_d = block_width(width)
    block_m, block_n = (16, 16) if exact and block_d > 128 else (32, 32) if exact or block_d > 128 else (64, 64)
    with on_device_of(q):
        nsa_blocks_kernel[(call.programs(kv_heads, total_q, call.sequences, block_m),)](
            q, k_cmp, lse, chosen, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, *strides(q)[1:], *strides(k_cmp)[1:], softmax_scale * LOG2E,
            call.sequences, total_q, k_cmp.shape[0], kv_heads, heads // kv_heads, compress_stride, slots, HEAD_DIM=width, BLOCK_D=block_d,
            OVERLAP=compress_size // compress_stride, PER_BLOCK=block_size // compress_stride, SLOTS=next_power_of_2(slots),
            BLOCK_M=block_m, BLOCK_N=block_n, PRECISION="ieee" if exact else "tf32", num_warps=8 if block_d >= 128 else 4)
    return chosen
