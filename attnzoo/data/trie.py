"""Packs sequences with common prefixes as the trees of a trie: every shared token is stored once, for attention over trees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnzoo.data.packing import ranges


class Packed(NamedTuple):
    """The tokens of all sequences, in segments in depth-first order, as `attnzoo_kernels.tree_attention` takes them.

    tokens: int64 (total,).
    depths: int64 (total,), each token's position in the sequences that it belongs to.
    before: int64 (total,), the index of the token before it in these sequences, -1 for a sequence's first token.
    counts: int64 (total,), the number of sequences that have the token as a target.
    starts: int64 (segments,), the index at which each segment begins. A segment ends where sequences diverge.
    parents: int32 (segments,), the number of the segment that each one continues, -1 for the first segment of a tree.
    """

    tokens: np.ndarray
    depths: np.ndarray
    before: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    parents: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each segment."""
        return np.diff(self.starts, append=len(self.tokens))


def pack(sequences: Sequence[np.ndarray], first_asked: Sequence[int], *, share: bool = True) -> Packed:
    """Packs sequences so that every common prefix is stored once. The trees are sorted by their tokens.

    sequences: int64, at least one token each. first_asked: the position of each sequence's first target, at least 1.
    share: False stores every sequence in full, in the given order.
    """
    order = list(range(len(sequences)))
    if share:  # big-endian bytes sort like the tokens, and a prefix sorts before what it begins
        order.sort(key=lambda i: sequences[i].astype(">u4").tobytes())
    longest = max(map(len, sequences))
    total, path, last = 0, np.empty(longest, np.int64), np.empty(0, np.int64)
    counts = np.zeros(sum(map(len, sequences)), np.int64)
    new, shared, branches = [], [], []
    for i in order:
        ids = sequences[i]
        n = _common(last, ids) if share else 0
        if n < len(ids):  # otherwise it is the same sequence again
            new.append(ids[n:])
            shared.append(n)
            branches.append(path[n - 1] if n else -1)
            path[n : len(ids)] = total + np.arange(len(ids) - n)
            total += len(ids) - n
        counts[path[first_asked[i] : len(ids)]] += 1
        last = ids
    lengths, shared, branches = np.array([len(ids) for ids in new]), np.array(shared), np.array(branches)
    begins = np.cumsum(lengths) - lengths
    before = np.arange(total) - 1
    before[begins] = branches
    parting = branches != begins - 1  # a sequence that continues the one before it branches off nowhere
    starts = np.unique(np.concatenate([[0], begins[parting], branches[parting] + 1]))
    parents = np.searchsorted(starts, before[starts], side="right") - 1
    return Packed(np.concatenate(new), ranges(shared, lengths), before, counts[:total], starts, parents.astype(np.int32))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the longest common prefix of two sequences."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
