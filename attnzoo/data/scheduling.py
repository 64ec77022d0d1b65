"""Which sequences are padded together: batches of a sorted list of lengths by dynamic programming.

TurboTransformers (Fang et al. 2021, arXiv:2010.05680) schedules the requests that wait for an encoder so. Sequences of like length waste
little padding, and few large batches waste little of what each costs beside its tokens. Among all ways to put sequences into batches one of
the best cuts the sorted list of their lengths, for every cost that does not fall with the longest length.
"""

from collections.abc import Callable

import numpy as np

Cost = Callable[[np.ndarray, int], np.ndarray]


def batch_sizes(lengths: np.ndarray, max_rows: int, cost: Cost) -> np.ndarray:
    """Sequences in each batch, int64, of the cheapest way to cut a sorted list of lengths.

    Args:
        lengths: int (n,), in ascending order.
        max_rows: sequences in a batch at most.
        cost: called as cost(rows, longest), of batches with these numbers of sequences, int64 (k,), all padded to the length `longest`.

    Raises:
        ValueError: the lengths are not sorted, or max_rows is below 1.
    """
    lengths = np.asarray(lengths)
    if max_rows < 1:
        raise ValueError(f"max_rows={max_rows} must be at least 1")
    if (np.diff(lengths) < 0).any():
        raise ValueError("lengths must be in ascending order")
    n = len(lengths)
    best, last = np.zeros(n + 1), np.zeros(n + 1, np.int64)  # of the first i sequences: the least cost, and the size of its last batch
    costs: dict[int, np.ndarray] = {}
    for i in range(1, n + 1):
        longest = int(lengths[i - 1])
        if longest not in costs:
            costs[longest] = cost(np.arange(1, max_rows + 1), longest)
        rows = min(i, max_rows)
        total = best[i - rows : i][::-1] + costs[longest][:rows]
        size = rows - int(total[::-1].argmin())  # of equals the largest batch
        best[i], last[i] = total[size - 1], size
    sizes = []
    while n:
        sizes.append(last[n])
        n -= last[n]
    return np.array(sizes[::-1], np.int64)
