"""Copying a string (Jelassi et al. 2024, arXiv:2402.01032), or tokens among blanks: selective copying (Gu & Dao 2023, arXiv:2312.00752).

    input   a b c d : a b c          input   _ a _ _ b _ : a
    labels  - - - - a b c d          labels  - - - - - - a b
"""

from collections.abc import Sequence

import numpy as np

from attnzoo.batch import IGNORED

SEPARATOR, BLANK = 0, 1


def example(
    seq_len: int, *, seed: int | Sequence[int], n_tokens: int | None = None, vocab_size: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """`input_ids` and `labels`, int64 `(seq_len,)`: tokens from 2 to vocab_size - 1, drawn independently, the separator 0, and the copy.

    Args:
        n_tokens: the number of tokens to copy. If they do not fill the room before the separator, they stand at random places among blanks
            (1). None stands for seq_len // 2.

    Raises:
        ValueError: `n_tokens` is below 1 or the row has no room for them, or the vocabulary has fewer than two tokens to copy.
    """
    check(seq_len, n_tokens, vocab_size)
    rng = np.random.default_rng(seed)
    n_tokens = seq_len // 2 if n_tokens is None else n_tokens
    begin = seq_len - n_tokens
    tokens = rng.integers(2, vocab_size, size=n_tokens)
    input_ids, labels = np.full(seq_len, BLANK), np.full(seq_len, IGNORED)
    input_ids[np.sort(rng.choice(begin, n_tokens, replace=False))] = tokens
    input_ids[begin], input_ids[begin + 1 :] = SEPARATOR, tokens[:-1]
    labels[begin:] = tokens
    return input_ids, labels


def check(seq_len: int, n_tokens: int | None, vocab_size: int) -> None:
    """Raises ValueError unless a row of these sizes can be made."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len} must be at least 2")
    if n_tokens is not None and not 1 <= n_tokens <= seq_len // 2:
        raise ValueError(f"n_tokens={n_tokens} must be from 1 to seq_len // 2 = {seq_len // 2}, or null for that")
    if vocab_size < 4:
        raise ValueError(f"vocab_size={vocab_size} must be at least 4: separator, blank and two tokens")
