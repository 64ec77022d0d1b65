"""Decides which sequences are padded together: cuts a sorted list of lengths into batches by dynamic programming.

TurboTransformers (Fang et al. 2021, arXiv:2010.05680) schedules the waiting requests of an encoder in this way. Batches of sequences of
similar length waste little on padding, and a small number of large batches wastes little on the fixed cost of a batch. If a batch's cost
does not decrease when its longest length grows, one of the cheapest ways to form batches is to cut the sorted list of lengths.
"""

from collections.abc import Callable

import numpy as np

Cost = Callable[[np.ndarray, int], np.ndarray]


def batch_sizes(lengths: np.ndarray, max_rows: int, cost: Cost) -> np.ndarray:
    """The number of sequences in each batch, int64, for the cheapest way to cut a sorted list of lengths.

    Args:
        lengths: int (n,), in ascending order.
        max_rows: the largest number of sequences in a batch.
        cost: called as cost(rows, longest); returns the costs (k,) of batches of `rows` sequences, int64 (k,), padded to length `longest`.

    Raises:
        ValueError: the lengths are not sorted, or max_rows is below 1.
    """
    lengths = np.asarray(lengths)
    if max_rows < 1:
        raise ValueError(f"max_rows={max_rows} must be at least 1")
    if (np.diff(lengths) < 0).any():
        raise ValueError("lengths must be in ascending order")
    n = len(lengths)
    best, last = np.zeros(n + 1), np.zeros(n + 1, np.int64)  # for the first i sequences: the least cost, and its last batch's size
    costs: dict[int, np.ndarray] = {}
    for i in range(1, n + 1):
        longest = int(lengths[i - 1])
        if longest not in costs:
            costs[longest] = cost(np.arange(1, max_rows + 1), longest)
        rows = min(i, max_rows)
        total = best[i - rows : i][::-1] + costs[longest][:rows]
        size = rows - int(total[::-1].argmin())  # among equal costs the largest batch
        best[i], last[i] = total[size - 1], size
    sizes = []
    while n:
        sizes.append(last[n])
        n -= last[n]
    return np.array(sizes[::-1], np.int64)
