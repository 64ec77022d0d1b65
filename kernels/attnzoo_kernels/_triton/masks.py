"""Which keys a query sees: element masks, and the tile ranges that need them."""

import triton
import triton.language as tl


@triton.jit
def keys_seen(i, j, len_q, len_k, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys j [1, N] the queries i [M, 1] see, aligned to the bottom right. Bounds are taken by row, so that an element costs one comparison.

    Queries beyond len_q see anything: nothing of them is stored.
    """
    last = i * 0 + (len_k - 1)
    if HAS_RIGHT:
        last = tl.minimum(last, i + (len_k - len_q + window_right))
    seen = j <= last
    if HAS_LEFT:
        seen = seen & (j >= i + (len_k - len_q - window_left))
    return seen


@triton.jit
def queries_seeing(i, j, len_q, len_k, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which queries i [1, M] see the keys j [N, 1]: the same relation, bounds by key; one of the two sides must be bounded.

    Lengths are not looked at: queries beyond len_q have LSE +inf and weight zero, and of keys beyond len_k nothing is stored.
    """
    if HAS_RIGHT:
        seen = i >= j - (len_k - len_q + window_right)
        if HAS_LEFT:
            seen = seen & (i <= j - (len_k - len_q - window_left))
    else:
        seen = i <= j - (len_k - len_q - window_left)
    return seen


@triton.jit
def key_ranges(row, len_q, len_k, window_left, window_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Keys that a tile of queries starting at `row` sees: [begin, full_begin) masked, [full_begin, full_end) all visible, [full_end, end) masked.

    begin, full_begin and full_end are multiples of BLOCK_N.
    """
    shift = len_k - len_q
    last = tl.minimum(row + BLOCK_M, len_q) - 1
    begin = 0
    full_begin = 0
    end = len_k
    full_end = len_k
    if HAS_RIGHT:
        end = tl.minimum(end, last + shift + window_right + 1)
        full_end = tl.minimum(full_end, row + shift + window_right + 1)
    if HAS_LEFT:
        begin = tl.maximum(row + shift - window_left, 0) // BLOCK_N * BLOCK_N
        full_begin = (tl.maximum(last + shift - window_left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    end = tl.maximum(end, begin)
    full_end = tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N
    if HAS_LEFT:
        full_begin = tl.minimum(full_begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_ranges(column, len_q, len_k, window_left, window_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Queries that see a tile of keys starting at `column`, in three ranges as `key_ranges`; all bounds but the last are multiples of BLOCK_M.

    Keys beyond len_k need no mask here: they reach only rows of dK and dV that are not stored.
    """
    shift = len_k - len_q
    last = tl.minimum(column + BLOCK_N, len_k) - 1
    begin = 0
    full_begin = 0
    end = len_q
    full_end = len_q
    if HAS_RIGHT:
        begin = tl.maximum(column - shift - window_right, 0) // BLOCK_M * BLOCK_M
        full_begin = (tl.maximum(last - shift - window_right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = tl.minimum(end, last - shift + window_left + 1)
        full_end = tl.minimum(full_end, column - shift + window_left + 1)
    end = tl.maximum(end, begin)
    full_end = tl.maximum(full_end, 0) // BLOCK_M * BLOCK_M
    if HAS_RIGHT:
        full_begin = tl.minimum(full_begin, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end
