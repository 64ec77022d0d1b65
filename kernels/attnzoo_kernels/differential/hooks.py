"""What the plain kernels of differential attention need beyond flash's: a second branch of queries and keys, and lambda.

A branch is one of the two softmaxes with its queries and keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import load_keys
from attnzoo_kernels._triton.tiles import load_rows, other_rows, own_rows, tile_source


class Branch2(NamedTuple):
    """The second branch of a tile of queries, for the steps over keys; the first one is the QueryTile."""

    window: Any
    q: Any  # [BLOCK_M, BLOCK_D]
    key_rows: Any
    stats: Any  # RowStats, backward
    SHARED_K: Any
    LAGS: Any


class Branch2Keys(NamedTuple):
    """The second branch of a tile of keys, for the steps over queries; the first one is the KeyTile."""

    window: Any
    k: Any  # [BLOCK_N, BLOCK_D]; not where SHARED_K
    queries: Any  # Operand, in a step the Rows of a head
    SHARED_K: Any
    gradient: Any = None  # Operand of dK2; not in a step


@triton.jit
def load_branch(queries, keys, place, group, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr,
                TMA: tl.constexpr):
    """A branch's queries [BLOCK_M, BLOCK_D], and the Rows of its keys."""
    q_rows, k_rows = own_rows(queries, place, TMA), other_rows(keys, place, place.head // group, TMA)
    return load_rows(q_rows, place.row, HEAD_DIM, BLOCK_M, BLOCK_D, GUARD, TMA), k_rows


@triton.jit
def load_both_keys(x, own, at, GUARD: tl.constexpr):
    """Both branches' keys from `at` on, [BLOCK_N, BLOCK_D]."""
    k1 = load_keys(x, x.key_rows, at, GUARD)
    return k1, k1 if own.SHARED_K else load_keys(x, own.key_rows, at, GUARD)


@triton.jit
def load_lambda(operand, place, i):
    """Lambda of rows i [BLOCK_M]."""
    rows = tile_source(operand.source, place.batch, place.head, place.first, operand.stride_batch, operand.stride_row, operand.stride_head,
                       False)
    # after the last sequence, where no query sees a key, lambda may be any value
    return tl.load(rows + i.to(tl.int64) * operand.stride_row, mask=(i < place.length) & (place.other_length > 0), other=0.0)
