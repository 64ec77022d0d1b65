"""Which queries and keys are computed together: the tiles that an operator yields for the mainloop, and functions for such generators."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels._cpu.gates import Gates

ROWS = 128  # queries of a tile: with fewer, overhead dominates; with more, more is computed that the causal mask hides


class Call(NamedTuple):
    """What a generator of tiles gets. Query i's own key is i + diagonal, so that the last query's is the last key.

    window: (left, right), -1 is unlimited. layout: bool (heads or 1, q_blocks, k_blocks), or None. blocks: int32 (len_q, choosers, slots),
    blocks of keys that queries chose, or None. heads: query heads. fused: PyTorch's kernel computes the tiles. biased: scores get a bias
    besides. gates: those of forgetting attention. numbers: the operator's own.
    """

    len_q: int
    len_k: int
    window: tuple[int, int]
    layout: Tensor | None
    blocks: Tensor | None
    heads: int
    fused: bool
    biased: bool
    gates: Gates | None
    numbers: Sequence[int]

    @property
    def diagonal(self) -> int:
        return self.len_k - self.len_q


class Part(NamedTuple):
    """Keys of a tile (a slice or ascending indices) in copy `k_copy` of k, for the queries in copy `q_copy` of q.

    seen: bool (rows, keys) or (1, heads, rows, keys), None if all keys are seen. triangle: there are as many keys as queries, and each
    query sees the keys up to its own (fused only).
    """

    keys: slice | Tensor
    seen: Tensor | None = None
    triangle: bool = False
    q_copy: int = 0
    k_copy: int = 0


class Tile(NamedTuple):
    """Queries, and the parts that they see. heads: query heads: all heads of some key heads, or one head.

    In each head, a query is in at most one tile whose rows are a slice. In tiles whose rows are indices, each query sees some key, and its
    results are merged into those of earlier tiles (fused only).
    """

    rows: slice | Tensor
    parts: list[Part]
    heads: slice = slice(None)


def numbers_of(span: slice) -> Tensor:
    """The numbers of a slice, on a CPU, whatever torch.set_default_device says."""
    return torch.arange(span.start, span.stop, device="cpu")


def row_tiles(first: int, end: int, rows: int = ROWS) -> Iterator[slice]:
    for start in range(first, end, rows):
        yield slice(start, min(start + rows, end))


def causal_parts(first: int, positions: slice) -> list[Part]:
    """The keys from the first on: those before the queries' own keys, and the own keys as a triangle (fused only)."""
    own = Part(positions, triangle=True)
    return [Part(slice(first, positions.start)), own] if first < positions.start else [own]


def window_span(rows: slice, call: Call) -> slice:
    """The keys that are in the window of any of the rows."""
    left, right = call.window
    first = 0 if left < 0 else max(rows.start + call.diagonal - left, 0)
    end = call.len_k if right < 0 else min(rows.stop + call.diagonal + right, call.len_k)
    return slice(first, max(first, end))


def in_window(rows: slice, keys: Tensor, call: Call) -> Tensor:
    """Which of the keys, given by their positions, each of the rows sees: bool (rows, keys)."""
    left, right = call.window
    distance = keys - (numbers_of(rows) + call.diagonal)[:, None]
    seen = distance <= (call.len_k + call.len_q if right < 0 else right)
    return seen if left < 0 else seen & (distance >= -left)


def in_window_of(rows: slice, keys: slice, call: Call) -> Tensor | None:
    """in_window for a range of keys; None if each row sees all of them."""
    left, right = call.window
    before, behind = rows.stop - 1 + call.diagonal - keys.start, keys.stop - 1 - rows.start - call.diagonal
    if (left < 0 or before <= left) and (right < 0 or behind <= right):
        return None
    return in_window(rows, numbers_of(keys), call)
