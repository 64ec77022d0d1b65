"""Which blocks each query reads, by the largest of the indexer's scores in them: no score is stored."""

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


def tile(q: Tensor) -> tuple[int, int, dict[str, int]]:
    """(rows of a tile, blocks of a tile, KEYS and the compiler's options). On Hopper, two programs of this many registers run at a time."""
    if q.dtype != torch.float32 and q.shape[-1] <= 128 and hopper_like(architecture(q)):
        return 128, 64, {"KEYS": 1, "num_warps": 8, "maxnreg": 128}
    return tile_size(q), 32, {"KEYS": 1, "num_warps": 8 if q.dtype == torch.float32 else 4}  # a sequence has few blocks


class Index(NamedTuple):
    """A sequence's keys, and the rows of queries [rows, BLOCK_D] that meet them."""

    q: Any
    keys: Any  # Rows
    block_size: Any
    HEAD_DIM: Any
    BLOCK_D: Any
    PRECISION: Any
    KEYS: Any


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scores(x, own, at, block):
    """SCORES: the largest of a block, NaN where one is. KEYS of each block at a time."""
    column = tl.arange(0, own.BLOCK_D)
    key = tl.arange(0, block.shape[0] * own.KEYS)
    of_block, place = at + key // own.KEYS, key % own.KEYS
    there = (of_block < x.earlier)[:, None] & (column < own.HEAD_DIM)[None, :]
    first = own.keys.source + (of_block * own.block_size + place).to(tl.int64)[:, None] * own.keys.stride + column[None, :]
    scores = tl.full([x.i.shape[0], block.shape[0]], -float("inf"), tl.float32)
    for offset in range(0, own.block_size, own.KEYS):
        inside = there
        if own.KEYS > 1:
            inside &= (offset + place < own.block_size)[:, None]
        # [BLOCK_N * KEYS, BLOCK_D]
        keys = tl.load(first + tl.cast(offset, tl.int64) * own.keys.stride, mask=inside, other=0.0)
        new = score_dot(own.q, keys, own.PRECISION)
        if own.KEYS > 1:
            new = tl.where((offset + place < own.block_size)[None, :], new, -float("inf"))
            new = tl.reduce(new.reshape(x.i.shape[0], block.shape[0], own.KEYS), 2, _largest)
        scores = _largest(scores, new)
    return scores


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "block_size", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def msa_blocks_kernel(q_ptr, k_ptr, blocks_ptr, cu_seqlens_q, cu_seqlens_k, stride_qs, stride_qh, stride_ks, stride_kh, n_seqs, seqlen_q,
                      seqlen_k, heads, block_size, slots, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
                      KEYS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """All heads have the same keys, which a program loads once for HEADS of them."""
    place = program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads // HEADS, BLOCK_M, True, True)
    if place.row >= place.length:
        return
    i, member = rows_of_tile(place, HEADS, BLOCK_M)
    # [BLOCK_M * HEADS, BLOCK_D]
    q = gather_tile(q_ptr, stride_qs, stride_qh, place.first + i, place.head * HEADS + member, i < place.length, HEAD_DIM, BLOCK_D)
    keys = head_rows(Operand(k_ptr, 0, stride_ks, stride_kh), 0, 0, place.other_first, place.other_length, False)
    choose_best(place, Index(q, keys, block_size, HEAD_DIM, BLOCK_D, PRECISION, KEYS), blocks_ptr, heads, block_size, slots, _scores, SLOTS,
                HEADS, BLOCK_M, BLOCK_N)


def launch_blocks(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, slots: int) -> Tensor:
    """q (total_q, heads, width), k (total_k, 1, width); int32 (total_q, heads, slots)."""
    total_q, heads, _ = q.shape
    if total_q * slots == 0:
        return torch.empty(total_q, heads, slots, dtype=torch.int32, device=q.device)
    rows, columns, options = tile(q)
    if few(q, cu_seqlens_q):  # many keys of a block at once: loading one after the other would take most of the time
        at_once = 32 if q.dtype == torch.float32 else 128
        keys = min(next_power_of_2(block_size), 32)
        rows, columns, options = 16, at_once // keys, {"KEYS": keys, "num_warps": 4}
    together = min(heads & -heads, rows)  # the largest power of two that divides `heads`
    grid, sequences, constants = plan_choice(q, cu_seqlens_q, heads // together, slots, rows // together, columns,
                                             k.shape[0] // block_size // columns)
    return launch_choice(lambda blocks: msa_blocks_kernel[grid](
        q, k, blocks, cu_seqlens_q, cu_seqlens_k, *strides(q)[1:], *strides(k)[1:], sequences, total_q, k.shape[0], heads, block_size,
        slots, HEADS=together, **constants, **options), q, heads, slots, grid[1])
