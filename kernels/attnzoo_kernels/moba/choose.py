"""Which blocks each query reads: the means of blocks, and the best of a query's scores, of which none is stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width, next_power_of_2, on_device_of, strides
from attnzoo_kernels._triton.softmax import score_dot
from attnzoo_kernels._triton.tiles import Operand, head_rows, load_rows, program_tile
from attnzoo_kernels.routed.best import keep_best
from attnzoo_kernels.routed.routes import Blocks

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
        pointers = k_ptr + head.to(tl.int64) * stride_kh + row.to(tl.int64)[:, None] * stride_ks + column[None, :]
        # [ROWS, BLOCK_D]
        total += tl.sum(tl.load(pointers, mask=(row < end)[:, None] & (column < HEAD_DIM)[None, :], other=0.0).to(tl.float32), 0)
    tl.store(means_ptr + (head.to(tl.int64) * count + block) * HEAD_DIM + column, total / block_size, mask=column < HEAD_DIM)


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "block_size", "count", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "first_ptr"])
def moba_blocks_kernel(q_ptr, means_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, first_ptr, stride_qs, stride_qh, n_seqs, seqlen_q,
                       seqlen_k, heads, group, block_size, count, slots, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                       SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """A program's tile of queries goes through the means of the blocks before them; blocks_ptr: int32 (seqlen_q, heads, slots)."""
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    q_rows = head_rows(Operand(q_ptr, 0, stride_qs, stride_qh), 0, place.head, place.first, place.length, False)
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_rows, place.row, HEAD_DIM, BLOCK_M, BLOCK_D, True, False)
    i = place.row + tl.arange(0, BLOCK_M)
    shift = place.other_length - place.length
    own = tl.maximum(i + shift, 0) // block_size
    first = tl.load(first_ptr + tl.minimum(place.sequence, n_seqs - 1))
    means = means_ptr + (place.head // group).to(tl.int64) * count * HEAD_DIM + first.to(tl.int64) * HEAD_DIM
    column = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros([BLOCK_M, SLOTS], tl.float32) + tl.where(slot < slots, -float("inf"), float("inf"))[None, :]
    chosen = tl.zeros([BLOCK_M, SLOTS], tl.int32) - 1 - slot[None, :]
    earlier = tl.maximum(tl.minimum(place.row + BLOCK_M, place.length) - 1 + shift, 0) // block_size
    for at in range(0, earlier, BLOCK_N):
        block = at + tl.arange(0, BLOCK_N)
        # [BLOCK_N, BLOCK_D]
        mean = tl.load(means + block[:, None] * HEAD_DIM + column[None, :], mask=(block < earlier)[:, None] & (column < HEAD_DIM)[None, :],
                       other=0.0)
        # [BLOCK_M, BLOCK_N]
        if PRECISION == "ieee":
            scores = score_dot(q, mean, PRECISION)
        else:
            # means in two parts: products as exact as float32's
            high = mean.to(q.dtype)
            scores = score_dot(q, high, PRECISION) + score_dot(q, (mean - high.to(tl.float32)).to(q.dtype), PRECISION)
        scores = tl.where((block[None, :] < own[:, None]) & (scores == scores), scores, -float("inf"))
        best, chosen = keep_best(best, chosen, scores, block[None, :], SLOTS)
    rows = ((place.first + i).to(tl.int64) * heads + place.head) * slots
    tl.store(blocks_ptr + rows[:, None] + slot[None, :], tl.maximum(chosen, -1),
             mask=(i < place.length)[:, None] & (slot < slots)[None, :])


def launch_blocks(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, slots: int) -> Tensor:
    """q (total_q, heads, head_dim), k (total_k, kv_heads, head_dim); int32 (total_q, heads, slots)."""
    total_q, heads, width = q.shape
    total_k, kv_heads, _ = k.shape
    chosen = torch.empty(total_q, heads, slots, dtype=torch.int32, device=q.device)
    if chosen.numel() == 0:
        return chosen
    blocks = Blocks.of(cu_seqlens_q, cu_seqlens_k, total_q, total_k, block_size)
    means = torch.empty(kv_heads, blocks.count, width, dtype=torch.float32, device=q.device)
    call = Call(sequences=packed_sequences(cu_seqlens_q), softmax_scale=1.0)
    exact = q.dtype == torch.float32
    block_d = block_width(width)
    block_m, block_n = (32, 32) if exact or block_d > 128 else (64, 64)
    with on_device_of(q):
        moba_means_kernel[(blocks.count, kv_heads)](k, blocks.bounds_k, means, *strides(k)[1:], block_size, blocks.count, HEAD_DIM=width,
                                                    BLOCK_D=block_d, ROWS=MEAN_ROWS, num_warps=4)
        moba_blocks_kernel[(call.programs(heads, total_q, call.sequences, block_m),)](
            q, means, chosen, cu_seqlens_q, cu_seqlens_k, blocks.first, *strides(q)[1:], call.sequences, total_q, total_k, heads,
            heads // kv_heads, block_size, blocks.count, slots, HEAD_DIM=width, BLOCK_D=block_d, SLOTS=next_power_of_2(slots),
            BLOCK_M=block_m, BLOCK_N=block_n, PRECISION="ieee" if exact else "tf32",
            num_warps=8 if block_d >= 128 else 4)
    return chosen
