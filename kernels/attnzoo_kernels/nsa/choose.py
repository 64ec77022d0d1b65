"""Which blocks queries read, by the weights of the compressed keys in them: no weight is stored."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import architecture, next_power_of_2, strides
from attnzoo_kernels._triton.softmax import score_dot
from attnzoo_kernels._triton.tiles import Operand, head_rows, program_tile
from attnzoo_kernels.flash.tiles import hopper_like
from attnzoo_kernels.routed.best import choose_best, few, launch_choice, plan_choice, rows_of_tile, tile_size
from attnzoo_kernels.routed.parts import gather_tile

LOG2E = math.log2(math.e)


def tile(q: Tensor) -> tuple[int, int]:
    """(rows of a tile of queries and, as many, blocks; tiles at most). Hopper's registers and shared memory take two programs with four
    tiles of 16 bits."""
    return 16 if q.dtype == torch.float32 else tile_size(q), 4 if hopper_like(architecture(q)) else 2


class Compressed(NamedTuple):
    """Compressed keys of a sequence, which PER_BLOCK strides make a block and OVERLAP strides a key of, and the queries that meet them. A
    row is one of HEADS heads of one of BLOCK_M queries."""

    queries: Any  # tiles [rows, BLOCK_D] of further heads
    lse: Any  # theirs [rows, 1], over all compressed keys, in units of log2
    last: Any  # [rows, 1], the last of the sequence's keys that a row sees
    keys: Any  # Rows of a key head, from the sequence's first key on
    count: Any
    scale: Any
    OVERLAP: Any
    PER_BLOCK: Any
    HEADS: Any
    TILES: Any
    HEAD_DIM: Any
    PRECISION: Any
    stride: Any


@triton.jit
def _scores(x, own, at, block):
    """SCORES: the weights of compressed keys, summed by block and over the heads of a key head. Keys are loaded once for all heads."""
    BLOCK_M: tl.constexpr = x.i.shape[0]
    lane, column = tl.arange(0, block.shape[0]) * own.PER_BLOCK, tl.arange(0, own.queries[0].shape[1])
    offsets = lane[:, None] * own.keys.stride + column[None, :]
    scores = tl.zeros([BLOCK_M * own.HEADS, block.shape[0]], tl.float32)
    for offset in range(1 - own.OVERLAP, own.PER_BLOCK):  # of a key from a block's begin, in strides
        first = at * own.PER_BLOCK + offset
        there = (lane >= -first) & (lane < own.count - first)
        # [BLOCK_N, BLOCK_D]
        keys = tl.load(own.keys.source + tl.cast(first, tl.int64) * own.keys.stride + offsets,
                       mask=there[:, None] & (column < own.HEAD_DIM)[None, :], other=0.0)
        weights = tl.zeros(scores.shape, tl.float32)
        for n in tl.static_range(own.TILES):
            weights += tl.exp2(score_dot(own.queries[n], keys, own.PRECISION) * own.scale - own.lse[n])
        shared = tl.minimum(offset + own.OVERLAP, own.PER_BLOCK) - tl.maximum(offset, 0)
        seen = (own.last - offset + own.PER_BLOCK) // own.PER_BLOCK  # number of blocks whose key a row sees
        of = block
        if own.OVERLAP > own.PER_BLOCK + 1:  # there is no key before the first; that of block 0, which is read in any case, may count
            of = tl.where(lane >= -first, block, 2147483647)
        scores += tl.where(of[None, :] < seen, shared * weights, 0.0)
    scores = tl.sum(tl.reshape(scores, [BLOCK_M, own.HEADS, block.shape[0]]), 1)
    last = tl.maximum(x.position, 0) // (own.PER_BLOCK * own.stride) - 1
    return tl.where((block == 0)[None, :] | (block[None, :] == last), 1e30, scores)  # the first and the one before the own are always read


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "stride", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_c"])
def nsa_blocks_kernel(q_ptr, k_ptr, lse_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, stride_qs, stride_qh, stride_ks,
                      stride_kh, scale, n_seqs, seqlen_q, seqlen_k, kv_heads, group, stride, slots, HEAD_DIM: tl.constexpr,
                      BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr, PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
                      SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    i, of_heads = rows_of_tile(place, HEADS, BLOCK_M)
    queries, lses = (), ()
    for n in tl.static_range(TILES):
        member = n * HEADS + of_heads
        head = place.head * group + tl.minimum(member, group - 1)
        # [BLOCK_M * HEADS, BLOCK_D]
        queries += (gather_tile(q_ptr, stride_qs, stride_qh, place.first + i, head, i < place.length, HEAD_DIM, BLOCK_D),)
        lse = tl.load(lse_ptr + head.to(tl.int64) * seqlen_q + place.first + i, mask=i < place.length, other=0.0)
        # -inf also where a score is NaN; then the weights of all keys that the query sees are NaN, too
        lse = tl.where(lse == -float("inf"), float("nan"), lse * 1.4426950408889634)
        lses += (tl.where(member < group, lse, float("inf"))[:, None],)
    last = (i + place.other_length - place.length + 1) // stride - OVERLAP
    bounds = cu_seqlens_c + tl.minimum(place.sequence, n_seqs - 1)
    first = tl.load(bounds)
    keys = head_rows(Operand(k_ptr, 0, stride_ks, stride_kh), 0, place.head, first, seqlen_k, False)
    choose_best(place, Compressed(queries, lses, last[:, None], keys, tl.load(bounds + 1) - first, scale, OVERLAP, PER_BLOCK, HEADS, TILES,
                                  HEAD_DIM, PRECISION, stride),
                blocks_ptr, kv_heads, PER_BLOCK * stride, slots, _scores, SLOTS, 1, BLOCK_M, BLOCK_N)


def launch_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor,
                  compress_size: int, compress_stride: int, block_size: int, slots: int, softmax_scale: float) -> Tensor:
    """q (total_q, heads, head_dim), k_cmp (total_c, kv_heads, head_dim), lse (heads, total_q); int32 (total_q, kv_heads, slots)."""
    total_q, heads, _ = q.shape
    kv_heads = k_cmp.shape[1]
    if total_q * slots == 0:
        return torch.empty(total_q, kv_heads, slots, dtype=torch.int32, device=q.device)
    (rows, tiles), group = (16, 1) if few(q, cu_seqlens_q) else tile(q), heads // kv_heads
    together = next_power_of_2(triton.cdiv(group, tiles))
    per_block = block_size // compress_stride
    grid, sequences, constants = plan_choice(q, cu_seqlens_q, kv_heads, slots, max(rows // together, 1), rows,
                                             k_cmp.shape[0] // per_block // rows)
    return launch_choice(lambda blocks: nsa_blocks_kernel[grid](
        q, k_cmp, lse, blocks, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, *strides(q)[1:], *strides(k_cmp)[1:], softmax_scale * LOG2E,
        sequences, total_q, k_cmp.shape[0], kv_heads, group, compress_stride, slots, OVERLAP=compress_size // compress_stride,
        PER_BLOCK=per_block, HEADS=together, TILES=triton.cdiv(group, together), **constants, num_warps=4), q, kv_heads, slots, grid[1])
