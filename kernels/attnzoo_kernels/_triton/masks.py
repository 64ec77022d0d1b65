"""Which keys a query sees: masks of elements, and the ranges of tiles that need them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Window(NamedTuple):
    """How far keys are seen around the diagonal; left and right apply only under HAS_LEFT and HAS_RIGHT."""

    left: Any
    right: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any


@triton.jit
def keys_seen(i, j, len_q, len_k, window):
    """Which keys j [1, N] the queries i [M, 1] see, aligned to the bottom right. Bounds are taken by row: one comparison for each element
    and side.

    For queries beyond len_q the result is arbitrary, because nothing of them is stored.
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
    """Which queries i [1, M] see the keys j [N, 1]: the same relation, with bounds taken by key.

    The lengths' ends are not checked: nothing is stored for keys beyond len_k, and queries beyond len_q have LSE +inf.
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

    All queries see all keys of the tiles from full_begin to full_end; the tiles before and after them need a mask. Under GUARD_TAIL, tail
    .. end holds just the tile that crosses len_k; else it is empty. All bounds but `end` are multiples of BLOCK_N.
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
    """Clips the bounds, so that the ranges between them follow each other without overlap. Empty ranges have equal bounds."""
    end = tl.maximum(end, begin)
    tail = tl.cdiv(end, BLOCK) * BLOCK
    if GUARD_TAIL:
        tail = tl.maximum(tl.minimum(tail, length // BLOCK * BLOCK), begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tail)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), tail)
    return begin, full_begin, full_end, tail, end
