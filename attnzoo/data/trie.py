"""Sequences that begin alike as the trees of a trie, with every shared token once, for attention over trees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnzoo.data.packing import ranges


class Packed(NamedTuple):
    """Tokens of sequences one after the other, in segments that lie depth first, as `attnzoo_kernels.tree_attention` has them.

    tokens: int64 (total,).
    depths: int64 (total,), each token's place in the sequences that it belongs to.
    before: int64 (total,), where the token before it in these sequences lies, -1 for a first one.
    counts: int64 (total,), in how many sequences it is asked for.
    starts: int64 (segments,), where each segment begins. A segment ends where sequences part.
    parents: int32 (segments,), the segment that each continues, -1 for the first of a tree.
    """

    tokens: np.ndarray
    depths: np.ndarray
    before: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    parents: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each segment."""
        return np.diff(self.starts, append=len(self.tokens))


def pack(sequences: Sequence[np.ndarray], first_asked: Sequence[int], *, share: bool = True) -> Packed:
    """What sequences have in common from their first token on is there once; the trees are sorted by their tokens.

    sequences: int64, at least one token each. first_asked: of each sequence, the first token that is asked for, at least 1.
    share: False leaves every sequence by itself, in the given order.
    """
    order = list(range(len(sequences)))
    if share:  # big-endian bytes sort as the tokens do, and a sequence's beginning before it
        order.sort(key=lambda i: sequences[i].astype(">u4").tobytes())
    longest = max(map(len, sequences))
    total, path, last = 0, np.empty(longest, np.int64), np.empty(0, np.int64)
    counts = np.zeros(sum(map(len, sequences)), np.int64)
    new, shared, branches = [], [], []
    for i in order:
        ids = sequences[i]
        n = _common(last, ids) if share else 0
        if n < len(ids):  # else the same sequence again
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
    parting = branches != begins - 1  # what continues the sequence before it parts from nothing
    starts = np.unique(np.concatenate([[0], begins[parting], branches[parting] + 1]))
    parents = np.searchsorted(starts, before[starts], side="right") - 1
    return Packed(np.concatenate(new), ranges(shared, lengths), before, counts[:total], starts, parents.astype(np.int32))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
