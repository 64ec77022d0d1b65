"""Which keys a query sees: masks of elements, and the ranges of tiles that need them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Window(NamedTuple):
    """How many keys a query sees before (left) and after (right) its place on the bottom-right diagonal. HAS_LEFT and HAS_RIGHT say
    whether these bounds apply."""

    left: Any
    right: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any


@triton.jit
def keys_seen(i, j, len_q, len_k, window):
    """Which keys j [1, N] the queries i [M, 1] see, aligned to the bottom right: bool [M, N]. Bounds are computed by row, so that an
    element needs one comparison for each side.

    For queries beyond len_q the result is arbitrary, because their output is not stored.
    """
    last = i * 0 + (len_k - 1)
    if window.HAS_RIGHT:
        last = tl.minimum(last, i + (len_k - len_q + window.right))
    seen = j <= last
    if window.HAS_LEFT:
        seen = seen & (j >= i + (len_k - len_q - window.left))
    return seen


@triton.jit
def queries_seeing(i, j, len_q, len_k, window):
    """Which queries i [1, M] see the keys j [N, 1]: keys_seen transposed, bool [N, M].

    Rows beyond the lengths are not masked: the gradients of keys beyond len_k are not stored, and queries beyond len_q have LSE +inf, which
    makes their weights zero.
    """
    seen = i >= j * 0
    if window.HAS_RIGHT:
        seen = seen & (i >= j - (len_k - len_q + window.right))
    if window.HAS_LEFT:
        seen = seen & (i <= j - (len_k - len_q - window.left))
    return seen


@triton.jit
def key_ranges(row, len_q, len_k, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GUARD_TAIL: tl.constexpr):
    """Bounds of the keys that a tile of queries starting at `row` sees: (begin, full_begin, full_end, tail, end).

    All queries see all keys of the tiles from full_begin to full_end. The tiles from begin to full_begin and from full_end to tail need a
    mask. Under GUARD_TAIL, tail .. end is the tile that crosses len_k, if there is one; else it is empty. All bounds but `end` are
    multiples of BLOCK_N.
    """
    shift = len_k - len_q
    last = tl.minimum(row + BLOCK_M, len_q) - 1
    begin = 0
    full_begin = 0
    end = len_k
    full_end = len_k
    if window.HAS_RIGHT:
        end = tl.minimum(end, last + shift + window.right + 1)
        full_end = tl.minimum(full_end, row + shift + window.right + 1)
    if window.HAS_LEFT:
        begin = tl.maximum(row + shift - window.left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last + shift - window.left, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N
    return _ordered(begin, full_begin, full_end, end, len_k, BLOCK_N, GUARD_TAIL)


@triton.jit
def query_ranges(column, len_q, len_k, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GUARD_TAIL: tl.constexpr):
    """Bounds of the queries that see a tile of keys starting at `column`: like key_ranges, in multiples of BLOCK_M.

    A tile that crosses len_q needs no mask for that: the rows after the end have LSE +inf and weight zero.
    """
    shift = len_k - len_q
    last = tl.minimum(column + BLOCK_N, len_k) - 1
    begin = 0
    full_begin = 0
    end = len_q
    full_end = tl.cdiv(len_q, BLOCK_M) * BLOCK_M
    if window.HAS_RIGHT:
        begin = tl.maximum(column - shift - window.right, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(last - shift - window.right, 0), BLOCK_M) * BLOCK_M
    if window.HAS_LEFT:
        end = tl.minimum(end, last - shift + window.left + 1)
        full_end = tl.minimum(full_end, tl.maximum(column - shift + window.left + 1, 0) // BLOCK_M * BLOCK_M)
    return _ordered(begin, full_begin, full_end, end, len_q, BLOCK_M, GUARD_TAIL)


@triton.jit
def _ordered(begin, full_begin, full_end, end, length, BLOCK: tl.constexpr, GUARD_TAIL: tl.constexpr):
    """Clips the bounds, so that they ascend: begin <= full_begin <= full_end <= tail. Empty ranges have equal bounds."""
    end = tl.maximum(end, begin)
    tail = tl.cdiv(end, BLOCK) * BLOCK
    if GUARD_TAIL:
        tail = tl.maximum(tl.minimum(tail, length // BLOCK * BLOCK), begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tail)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), tail)
    return begin, full_begin, full_end, tail, end
