"""Keeps the best of scores that are computed tile by tile, so that the choice of blocks stores no scores."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width, multiprocessors, next_power_of_2, on_device_of
from attnzoo_kernels.routed.routes import FEW

NUMBERS = tl.constexpr(2**32)  # a key is an ordered score times NUMBERS, plus NUMBERS - 1 - block
EMPTY = tl.constexpr(-(2**63) + 2**32)  # the key of slot 0 while it is empty; that of slot 1 is the next, and so on
MISSING = tl.constexpr(2**63 - 1)  # the key of a slot that does not exist
MOST_SPLITS = 64  # a power of two


class Queries(NamedTuple):
    """A program's tile of queries, for SCORES: rows [BLOCK_M * HEADS], of HEADS heads of each query."""

    i: Any  # [rows], the query
    position: Any  # [rows, 1], the query's own key
    earlier: Any  # number of blocks before the last query's own block


@triton.jit
def _key(score, block):
    """int64 in the order in which blocks are chosen: of equal scores, that of the lower number is larger. -inf is less than EMPTY."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.to(tl.int64) * NUMBERS + (NUMBERS - 1 - block.to(tl.int64))
    return tl.where(score == -float("inf"), EMPTY - 1, key)


@triton.jit
def keep_best(best, scores, block):
    """Merges scores [M, N] of the ascending block numbers `block` [1, N] into the keys `best` [M, SLOTS], which are different."""
    left = 1
    while left > 0:
        top = tl.max(scores, 1)
        number = tl.min(tl.where(scores == top[:, None], block, 2147483647), 1)
        key, worst = _key(top, number), tl.min(best, 1)
        best = tl.where(best == worst[:, None], tl.maximum(key, worst)[:, None], best)
        scores = tl.where(block == number[:, None], -float("inf"), scores)
        left = tl.sum((key > worst).to(tl.int32))
    return best


@triton.jit
def rows_of_tile(place, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(query, head among HEADS) of the rows of a tile of BLOCK_M queries."""
    row = tl.arange(0, BLOCK_M * HEADS)
    return place.row + row // HEADS, row % HEADS


@triton.jit
def choose_best(place, own, blocks_ptr, heads, block_size, slots, SCORES: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A whole program: a tile of queries goes over the blocks before them. place.head: of heads // HEADS, HEADS of which choose in one
    program. blocks_ptr: int32 (queries, heads, slots). If it is int64 (queries, heads, splits, slots), the grid's second axis divides the
    blocks, and keys are stored, which `launch_choice` merges.

    SCORES(x, own, at, block) gives the scores [BLOCK_M * HEADS, BLOCK_N] of the blocks `block` [BLOCK_N], the first of which is `at`. Some
    of these may lie after a query's own block, or after the last block.
    """
    i, member = rows_of_tile(place, HEADS, BLOCK_M)
    shift = place.other_length - place.length
    of_query = tl.maximum(i + shift, 0) // block_size
    earlier = tl.maximum(tl.minimum(place.row + BLOCK_M, place.length) - 1 + shift, 0) // block_size
    x = Queries(i, i[:, None] + shift, earlier)
    slot = tl.arange(0, SLOTS)
    best = tl.zeros([BLOCK_M * HEADS, SLOTS], tl.int64) + tl.where(slot < slots, EMPTY + slot.to(tl.int64), MISSING)[None, :]
    SPLIT: tl.constexpr = blocks_ptr.dtype.element_ty == tl.int64
    for at in range(tl.program_id(1) * BLOCK_N if SPLIT else 0, earlier, tl.num_programs(1) * BLOCK_N if SPLIT else BLOCK_N):
        block = at + tl.arange(0, BLOCK_N)
        # [BLOCK_M * HEADS, BLOCK_N]
        scores = SCORES(x, own, at, block)
        scores = tl.where((block[None, :] < of_query[:, None]) & (scores == scores), scores, -float("inf"))
        best = keep_best(best, scores, block[None, :])
    rows = (place.first + i).to(tl.int64) * heads + place.head * HEADS + member
    if SPLIT:
        rows = rows * tl.num_programs(1) + tl.program_id(1)
    chosen = best if SPLIT else _number(best, SLOTS)
    tl.store(blocks_ptr + rows[:, None] * slots + slot[None, :], chosen, mask=(i < place.length)[:, None] & (slot < slots)[None, :])


@triton.jit
def _number(key, SLOTS: tl.constexpr):
    return tl.where(key < EMPTY + SLOTS, -1, NUMBERS - 1 - (key & (NUMBERS - 1))).to(tl.int32)


@triton.jit(do_not_specialize=["count", "slots"])
def routed_best_kernel(keys_ptr, blocks_ptr, count, slots, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """The best `slots` of a row's keys, of which those of empty slots may be equal."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, COUNT)
    keys = tl.load(keys_ptr + row * count + lane, mask=lane < count, other=EMPTY - 1)
    for slot in range(slots):
        top = tl.max(keys, 0)
        tl.store(blocks_ptr + row * slots + slot, _number(top, SLOTS))
        keys = tl.where(keys == top, EMPTY - 1, keys)


def few(q: Tensor, cu_seqlens_q: Tensor) -> bool:
    """Whether sequences have so few queries that several programs choose for one of them, each from a part of the blocks. Repeated bounds
    may pad cu_seqlens_q, so that many queries are not few in any case."""
    return q.shape[0] <= FEW * min(packed_sequences(cu_seqlens_q), 64)


def tile_size(q: Tensor) -> int:
    """Rows of a tile, and as many blocks."""
    return 32 if q.dtype == torch.float32 or block_width(q.shape[-1]) > 128 else 64


def plan_choice(q: Tensor, cu_seqlens_q: Tensor, heads: int, slots: int, queries: int, blocks: int,
                shares: int) -> tuple[tuple[int, int], int, dict[str, Any]]:
    """(grid, sequences, constants) of a choice whose tiles have `queries` queries of one of `heads` heads, and `blocks` blocks. For few
    queries the blocks of all sequences may be divided into `shares` at most."""
    total, _, width = q.shape
    call = Call(sequences=packed_sequences(cu_seqlens_q), softmax_scale=1.0)
    programs, splits = call.programs(heads, total, call.sequences, queries), 1
    if few(q, cu_seqlens_q):
        rows = max(min(total, call.sequences), 1)
        splits = max(1, min(shares // rows, MOST_SPLITS, 4 * multiprocessors(q.device) // (heads * rows)))
    return (programs, splits), call.sequences, {
        "HEAD_DIM": width, "BLOCK_D": block_width(width), "SLOTS": next_power_of_2(slots), "BLOCK_M": queries, "BLOCK_N": blocks,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32"}


def launch_choice(launch: Callable[[Tensor], None], q: Tensor, heads: int, slots: int, splits: int) -> Tensor:
    """What launch(blocks) chooses, int32 (total_q, heads, slots)."""
    chosen = torch.empty(q.shape[0], heads, slots, dtype=torch.int32, device=q.device)
    with on_device_of(q):
        if splits == 1:
            launch(chosen)
        else:
            keys = chosen.new_empty(q.shape[0] * heads, splits * slots, dtype=torch.int64)
            launch(keys)
            most = next_power_of_2(slots)
            routed_best_kernel[(len(keys),)](keys, chosen, splits * slots, slots, COUNT=MOST_SPLITS * most, SLOTS=most, num_warps=4)
    return chosen
