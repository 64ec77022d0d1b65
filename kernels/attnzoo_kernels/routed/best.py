"""Keeps the best of scores that are computed tile by tile, so that the choice of blocks stores no scores."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width, next_power_of_2


class Queries(NamedTuple):
    """A program's tile of queries, for SCORES."""

    place: Any
    i: Any  # [BLOCK_M], their rows
    position: Any  # [BLOCK_M, 1], each query's own key
    earlier: Any  # number of blocks before the last query's own block


@triton.jit
def keep_best(best, chosen, scores, block, SLOTS: tl.constexpr):
    """Merges scores [M, N], of the ascending block numbers `block` [1, N], into `best` and `chosen` [M, SLOTS]. Of equal scores the lower
    number is kept. Slots that do not exist have best +inf. Empty slots have -inf and different numbers below 0."""
    left = tl.sum((scores > -float("inf")).to(tl.int32))
    while left > 0:
        top = tl.max(scores, 1)
        number = tl.min(tl.where(scores == top[:, None], block, 2147483647), 1)
        worst = tl.min(best, 1)
        evicted = tl.max(tl.where(best == worst[:, None], chosen, -2147483648), 1)
        better = top > worst
        here = better[:, None] & (best == worst[:, None]) & (chosen == evicted[:, None])
        best = tl.where(here, top[:, None], best)
        chosen = tl.where(here, number[:, None], chosen)
        scores = tl.where(better[:, None] & (block != number[:, None]), scores, -float("inf"))
        left = tl.sum(better.to(tl.int32))
    return best, chosen


@triton.jit
def choose_best(place, own, blocks_ptr, heads, block_size, slots, SCORES: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """A whole program: a tile of queries goes over the blocks before them. blocks_ptr: int32 (queries, heads, slots).

    SCORES(x, own, block) gives the scores [BLOCK_M, BLOCK_N] of the blocks `block` [BLOCK_N]. Some of these may lie after a query's own
    block, or after the last block.
    """
    i = place.row + tl.arange(0, BLOCK_M)
    shift = place.other_length - place.length
    of_query = tl.maximum(i + shift, 0) // block_size
    earlier = tl.maximum(tl.minimum(place.row + BLOCK_M, place.length) - 1 + shift, 0) // block_size
    x = Queries(place, i, i[:, None] + shift, earlier)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros([BLOCK_M, SLOTS], tl.float32) + tl.where(slot < slots, -float("inf"), float("inf"))[None, :]
    chosen = tl.zeros([BLOCK_M, SLOTS], tl.int32) - 1 - slot[None, :]
    for at in range(0, earlier, BLOCK_N):
        block = at + tl.arange(0, BLOCK_N)
        # [BLOCK_M, BLOCK_N]
        scores = SCORES(x, own, block)
        scores = tl.where((block[None, :] < of_query[:, None]) & (scores == scores), scores, -float("inf"))
        best, chosen = keep_best(best, chosen, scores, block[None, :], SLOTS)
    rows = ((place.first + i).to(tl.int64) * heads + place.head) * slots
    tl.store(blocks_ptr + rows[:, None] + slot[None, :], tl.maximum(chosen, -1),
             mask=(i < place.length)[:, None] & (slot < slots)[None, :])


def plan_choice(q: Tensor, cu_seqlens_q: Tensor, heads: int, slots: int, narrow: bool = False) -> tuple[int, int, dict[str, Any]]:
    """(programs, sequences, constants) of a choice by `heads` heads. narrow: tiles of wide float32 are half as large."""
    total, _, width = q.shape
    call = Call(sequences=packed_sequences(cu_seqlens_q), softmax_scale=1.0)
    exact, wide = q.dtype == torch.float32, block_width(width) > 128
    block = 16 if narrow and exact and wide else 32 if exact or wide else 64
    return call.programs(heads, total, call.sequences, block), call.sequences, {
        "HEAD_DIM": width, "BLOCK_D": block_width(width), "SLOTS": next_power_of_2(slots), "BLOCK_M": block, "BLOCK_N": block,
        "PRECISION": "ieee" if exact else "tf32", "num_warps": 8 if block_width(width) >= 128 else 4}
