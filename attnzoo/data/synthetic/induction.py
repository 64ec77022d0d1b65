"""Induction heads (Olsson et al. 2022, arXiv:2209.11895) as a task (Fu et al. 2022, arXiv:2212.14052; Gu & Dao 2023, arXiv:2312.00752).

A special token stands at a random place among random tokens. When it occurs again at the row's end, the model must predict the token that
followed it the first time:

    input   a b * c d a b *
    labels  - - - - - - - c
"""

from collections.abc import Sequence

import numpy as np

from attnzoo.batch import IGNORED

SPECIAL = 0


def example(seq_len: int, *, seed: int | Sequence[int], vocab_size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `labels`, int64 `(seq_len,)`: tokens from 1 to vocab_size - 1, the special token 0 at a random place and at the end.

    Raises:
        ValueError: `seq_len` is below 3, or the vocabulary has fewer than two other tokens.
    """
    check(seq_len, vocab_size)
    rng = np.random.default_rng(seed)
    input_ids, labels = rng.integers(1, vocab_size, size=seq_len), np.full(seq_len, IGNORED)
    first = rng.integers(seq_len - 2)
    input_ids[first] = input_ids[-1] = SPECIAL
    labels[-1] = input_ids[first + 1]
    return input_ids, labels


def check(seq_len: int, vocab_size: int) -> None:
    """Raises ValueError unless a row of these sizes can be made."""
    if seq_len < 3:
        raise ValueError(f"seq_len={seq_len} must be at least 3")
    if vocab_size < 3:
        raise ValueError(f"vocab_size={vocab_size} must be at least 3: the special token and two others")
