"""Multi-query associative recall, MQAR (Arora et al. 2023, arXiv:2312.04927), in the setting published with zoology.

A row consists of `key value` pairs, and then of queries among blanks (token 0, or random tokens). At each query the model must predict
the value that followed the key:

    input   k1 v1 k2 v2  k2 0  0  0  k1 0
    labels   -  -  -  -  v2 -  -  -  v1 -
"""

from collections.abc import Sequence

import numpy as np

from attnzoo.batch import IGNORED
from attnzoo.errors import NoRoom


def example(
    seq_len: int,
    *,
    n_pairs: int,
    seed: int | Sequence[int],
    vocab_size: int = 8192,
    power: float = 0.01,
    random_fill: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `labels`, int64 `(seq_len,)`; each of the `n_pairs` keys is asked for once.

    Keys are distinct and lie between 1 and vocab_size // 2 - 1; values are distinct and lie between vocab_size // 2 and vocab_size - 1.
    Queries stand at the even distances 2 g after the end of the pairs, g >= 0. The g are drawn without replacement, with probabilities
    proportional to (g + 1)^(power - 1); a power below 1 favours small distances.

    Args:
        seq_len: even, at least 4 `n_pairs`.
        power: above 0.
        random_fill: whether the other tokens after the pairs are drawn from the whole vocabulary; otherwise they are 0, as in the paper.

    Raises:
        ValueError: the pairs and queries do not fit into the row (NoRoom) or the vocabulary, or `n_pairs` or `power` is out of its range.
    """
    check(seq_len, n_pairs, vocab_size, power, random_fill)
    rng = np.random.default_rng(seed)
    half, begin = vocab_size // 2, 2 * n_pairs
    keys = 1 + rng.choice(half - 1, n_pairs, replace=False)
    values = half + rng.choice(vocab_size - half, n_pairs, replace=False)
    # sorting independent exponential waiting times gives the same distribution as drawing without replacement
    rates = np.arange(1, (seq_len - begin) // 2 + 1) ** (power - 1.0)
    gaps = np.argsort(rng.exponential(size=len(rates)) / rates)[:n_pairs]
    input_ids = rng.integers(vocab_size, size=seq_len) if random_fill else np.zeros(seq_len, np.int64)
    labels = np.full(seq_len, IGNORED)
    input_ids[0:begin:2], input_ids[1:begin:2] = keys, values
    queries = begin + 2 * gaps
    input_ids[queries], labels[queries] = keys, values
    return input_ids, labels


def check(seq_len: int, n_pairs: int, vocab_size: int, power: float, random_fill: bool) -> None:
    """Raises ValueError unless a row of these sizes can be made."""
    if n_pairs < 1:
        raise ValueError(f"n_pairs={n_pairs} must be at least 1")
    if seq_len % 2 or seq_len < 4 * n_pairs:
        raise NoRoom(f"seq_len={seq_len} must be even and at least 4 n_pairs = {4 * n_pairs}: a pair takes two tokens, as does a query")
    if vocab_size // 2 - 1 < n_pairs:
        raise ValueError(f"vocab_size={vocab_size} must be at least 2 n_pairs + 2 = {2 * n_pairs + 2}: keys and values are distinct")
    if not power > 0:
        raise ValueError(f"power={power} must be above 0")
