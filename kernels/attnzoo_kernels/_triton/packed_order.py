"""The order in which programs of a Hopper backward of packed causal sequences take the tiles of keys: those that most queries see come
first, so that no program is left with a long one at the end."""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import Launch

LANES = tl.constexpr(512)  # slots that a program looks at at once
OWN = tl.constexpr(32)  # slots whose places it finds
LEAST_STEPS = 32  # of all query heads of a tile; below, the launch takes longer than programs would wait at the end


@triton.jit
def _find(cu_seqlens_q, cu_seqlens_k, slot, n_seqs, halvings, total, slots, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """(sequence, tile, how many tiles of ROWS queries see it) of slots as find_sequence counts them. -1 steps: there is no such tile.
    halvings: as many as leave nothing of n_seqs + 1 sequences."""
    low = slot * 0
    high = low + n_seqs + 1
    for _ in range(halvings):
        some = low < high
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_k + middle, mask=some, other=0) // KEYS + middle <= slot
        low = tl.where(some & before, middle + 1, low)
        high = tl.where(some & (before == 0), middle, high)
    sequence = low - 1
    after = tl.minimum(sequence + 1, n_seqs)
    first_k = tl.load(cu_seqlens_k + sequence)
    len_k = tl.where(sequence == n_seqs, total, tl.load(cu_seqlens_k + after)) - first_k
    len_q = tl.load(cu_seqlens_q + after) - tl.load(cu_seqlens_q + sequence)
    tile = slot - (first_k // KEYS + sequence)
    steps = tl.cdiv(len_q, ROWS) - tl.maximum(tile * KEYS - (len_k - len_q), 0) // ROWS
    return sequence, tile, tl.where((slot < slots) & (tile * KEYS < len_k), tl.maximum(steps, 0), -1)


@triton.jit(do_not_specialize=["n_seqs", "halvings", "total", "slots"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "order"])
def packed_tile_order_kernel(cu_seqlens_q, cu_seqlens_k, order, n_seqs, halvings, total, slots, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Each program finds the places of OWN slots. order: (slots, 2), the sequence and the tile; slots without a tile come last."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    sequence, tile, steps = _find(cu_seqlens_q, cu_seqlens_k, own, n_seqs, halvings, total, slots, KEYS, ROWS)
    rank = own * 0
    for start in range(0, slots, LANES):
        other = start + tl.arange(0, LANES)
        _, _, its = _find(cu_seqlens_q, cu_seqlens_k, other, n_seqs, halvings, total, slots, KEYS, ROWS)
        same = (its[None, :] == steps[:, None]) & (other[None, :] < own[:, None])
        before = (other < slots)[None, :] & ((its[None, :] > steps[:, None]) | same)
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(order + 2 * rank.to(tl.int64), sequence, mask=own < slots)
    tl.store(order + 2 * rank.to(tl.int64) + 1, tile, mask=own < slots)


def order_launch(sequences: int, total: int, slots: int, block: int, rows: int) -> Launch:
    """The launch of packed_tile_order_kernel. A tile has `block` keys, a step `rows` queries."""
    return Launch(packed_tile_order_kernel, -(-slots // OWN.value), (sequences, (sequences + 1).bit_length(), total, slots),
                  {"KEYS": block, "ROWS": rows}, 16, 1)


def packed_order(launch: Launch, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """int32 (slots, 2). The caller has entered the tensors' device."""
    order = cu_seqlens_k.new_empty(launch.scalars[-1], 2)
    launch(cu_seqlens_q, cu_seqlens_k, order)
    return order
