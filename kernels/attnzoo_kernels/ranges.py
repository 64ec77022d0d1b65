"""Key ranges: a list, on the device, that says which keys packed queries see, and how operators handle it on the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks

FULL, CAUSAL, CAUSAL_TOP_LEFT = 0, 1, 2  # a range's kind
COLUMNS = 5
WIDTH = 8  # of an entry in the tables


class KeyRanges(NamedTuple):
    """A list of key ranges, and the tables by which kernels search it.

    ranges: int32 (n, 5), a row is (q_begin, q_end, k_begin, k_end, kind). Query q_begin + i, which lies before q_end, sees these keys
    k_begin + j, which lie before k_end:
        FULL (0)             all keys of the range.
        CAUSAL (1)           j <= i + (k_end - k_begin) - (q_end - q_begin): the last query sees all, as in a packed causal sequence.
        CAUSAL_TOP_LEFT (2)  j <= i: the first query sees the first key only.
    Begins and ends count over all packed tokens. Ranges may come in any order, begin and end anywhere, and share queries or keys. A range
    is empty if an end is at or before its begin. If several ranges show a query the same key, the key counts once for each of them, as if
    it were repeated; `check` refuses such lists.
    """

    ranges: Tensor
    tables: Tensor | None = None  # int32 (2, n, 8): the list by queries and by keys; None until a kernel asks for it

    @classmethod
    def of(cls, ranges: Tensor, *, check: bool = False) -> "KeyRanges":
        """A KeyRanges with tables, if a kernel can make them, so that many calls with one list make them only once. The host does not wait.

        check: also raise ValueError for kinds that do not exist, negative places and overlapping ranges. This waits for the device.
        """
        check_form("ranges", ranges)
        checks.flag("check", check)
        if check:
            check_values(ranges)
            check_overlap(ranges)
        return cls(ranges, make_tables(ranges) if ranges.is_cuda else None)


def check_form(name: str, ranges: Tensor) -> None:
    checks.tensor(name, ranges, "an int32 tensor of shape (ranges, 5), or a KeyRanges")
    if ranges.dim() != 2 or ranges.shape[1] != COLUMNS:
        raise ValueError(f"{name}: must have shape (ranges, 5), got {tuple(ranges.shape)}")
    if ranges.dtype != torch.int32:
        raise TypeError(f"{name}: must be int32, got {ranges.dtype}")


def check_values(ranges: Tensor, total_q: int | None = None, total_k: int | None = None) -> None:
    """Raises for kinds that do not exist and for places outside of the tokens; waits for the device."""
    for n, (q_begin, q_end, k_begin, k_end, kind) in enumerate(ranges.tolist()):
        if kind not in (FULL, CAUSAL, CAUSAL_TOP_LEFT):
            raise ValueError(f"ranges: kind must be 0 (full), 1 (causal) or 2 (causal, top left), got {kind} in row {n}")
        if min(q_begin, k_begin) < 0:
            raise ValueError(f"ranges: must begin at 0 or later, got {q_begin} and {k_begin} in row {n}")
        for side, end, total in (("queries", q_end, total_q), ("keys", k_end, total_k)):
            if total is not None and end > total:
                raise ValueError(f"ranges: must end within the {total} {side}, got {end} in row {n}")


def check_overlap(ranges: Tensor) -> None:
    """Raises if ranges show a query the same key twice, whatever the window; waits for the device."""
    q_begin, q_end, k_begin, k_end, _ = ranges.long().unbind(1)
    shift = diagonals(ranges)[1]
    some = (q_begin < q_end) & (k_begin < k_end)
    for first in range(0, len(ranges), 256):
        mine = slice(first, first + 256)
        last_q = torch.minimum(q_end[mine, None], q_end) - 1
        first_k = torch.maximum(k_begin[mine, None], k_begin)
        # of the queries and keys that two ranges share, the last query sees the first key if any does
        both = some[mine, None] & some & (torch.maximum(q_begin[mine, None], q_begin) <= last_q)
        both &= (first_k < torch.minimum(k_end[mine, None], k_end)) & (first_k <= last_q + torch.minimum(shift[mine, None], shift))
        pairs = both.triu(first + 1).nonzero().tolist()
        if pairs:
            a, b = pairs[0]
            raise ValueError(f"ranges: must not show a query one key twice, but rows {first + a} and {b} do: "
                             f"{ranges[first + a].tolist()} and {ranges[b].tolist()}")


def diagonals(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """For each range, (key - query), by places over all tokens: on the diagonal from which windows count, and the largest that is seen."""
    q_begin, q_end, k_begin, k_end, kind = ranges.long().unbind(1)
    diagonal = torch.where(kind == CAUSAL_TOP_LEFT, k_begin - q_begin, k_end - q_end)
    return diagonal, torch.where(kind == FULL, 2**40, diagonal)


def times_seen(ranges: Tensor, rows: int, columns: int, window_size: tuple[int, int]) -> Tensor:
    """int32 (rows, columns): how many ranges show each query each key. This defines the meaning of a list, in plain PyTorch."""
    left, right = window_size
    i = torch.arange(rows, device=ranges.device)[:, None]
    j = torch.arange(columns, device=ranges.device)
    times = torch.zeros(rows, columns, dtype=torch.int32, device=ranges.device)
    for some in ranges.split(max(1, 2**24 // max(rows * columns, 1))):
        q_begin, q_end, k_begin, k_end, _ = some.long().T[..., None, None]
        diagonal, last = (x[:, None, None] for x in diagonals(some))
        seen = (q_begin <= i) & (i < q_end) & (k_begin <= j) & (j < k_end) & (j - i <= last)
        if left >= 0:
            seen &= j - i >= diagonal - left
        if right >= 0:
            seen &= j - i <= diagonal + right
        times += seen.sum(0)
    return times


def _tables(ranges: Tensor) -> Tensor:
    from attnzoo_kernels._triton.range_tables import launch_tables

    return launch_tables(ranges)


make_tables = autograd.forward_only("key_range_tables", _tables, lambda ranges: ranges.new_empty(2, max(len(ranges), 1), WIDTH))
