"""Rows for language modelling: the documents are concatenated and cut into rows of equal length, and every token is predicted.

Without `cross_documents` a batch is packed: attention, positions and targets end where a document or a row ends.
"""

import math

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.tokenized import TokenStore


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenation of `arange(s, s + n)` for each start s and length n: int64 `(sum(lengths),)`."""
    first = np.cumsum(lengths) - lengths
    return np.repeat(starts - first, lengths) + np.arange(lengths.sum())


def packed_fields(lengths: np.ndarray, max_seqlen: int, entries: int, slots: int | None = None) -> dict:
    """`cu_seqlens`, `max_seqlen`, `position_ids` and `lengths` of a packed batch of sequences of these lengths.

    `cu_seqlens` has `entries` entries, so that its shape stays the same; its last value is repeated. If `entries` is too small, it is
    doubled until it suffices. `position_ids` has `slots` entries, by default one for each token; the entries after the last sequence are 0.
    """
    while entries <= len(lengths):
        entries *= 2
    ends = np.cumsum(lengths)
    cu_seqlens = np.full(entries, ends[-1], np.int32)
    cu_seqlens[0], cu_seqlens[1 : len(ends) + 1] = 0, ends
    position_ids = ranges(np.zeros_like(lengths), lengths)
    return {
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "max_seqlen": max_seqlen,
        "position_ids": torch.from_numpy(np.pad(position_ids, (0, (slots or ends[-1]) - ends[-1]))),
        "lengths": lengths,
    }


class CausalRows:
    """Rows of `seq_len` tokens with the next tokens as labels.

    In training (`ring`) the tokens of an epoch form a ring, so that every token is seen; in validation the last row is filled with padding.
    With `shuffle` the order of the documents, the order of the rows and the offset of the first row are drawn from seed and epoch.

    Args:
        store: the token documents.
        seq_len: tokens in a row.
        pad_id: the padding token; its label is -100.
        seed: the seed of the shuffling.
        shuffle: whether epochs are shuffled; otherwise all epochs are the same.
        ring: True for training, False for validation.
        cross_documents: whether a row is a single sequence even if it holds several documents.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, pad_id: int, seed: int, shuffle: bool, ring: bool, cross_documents: bool):
        self.store, self.seq_len, self.pad_id = store, seq_len, pad_id
        self.seed, self.shuffle, self.ring, self.cross_documents = seed, shuffle, ring, cross_documents
        n_targets = len(store.tokens) - (not ring)
        self.n_rows = -(-n_targets // seq_len)
        self._epoch = None

    def order(self, epoch: int, group: int) -> np.ndarray:
        self._plan(epoch)
        return self._order

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """The batch of these rows: packed `(len(rows) * seq_len,)`, or `(len(rows), seq_len)` across documents.

        Row numbers from `n_rows` on give rows of padding.
        """
        self._plan(epoch)
        ids, real, cuts = self._windows(self._offset + rows * self.seq_len)
        labels = np.where(real[:, 1:], ids[:, 1:], IGNORED)
        if self.cross_documents:
            shape, fields = (len(rows), self.seq_len), {"lengths": np.full(len(rows), self.seq_len)}
        else:
            labels.reshape(-1)[cuts - 1] = IGNORED  # after a document's last token there is nothing to predict
            ends = np.union1d(cuts, np.arange(1, len(rows) + 1) * self.seq_len)
            shape, fields = (-1,), packed_fields(np.diff(ends, prepend=0), self.seq_len, self._entries(len(rows)))
        return {
            "input_ids": torch.from_numpy(ids[:, :-1].reshape(shape)),
            "labels": torch.from_numpy(labels.reshape(shape)),
            **fields,
            "n_tokens": int(real[:, :-1].sum()),
            "n_targets": int((labels != IGNORED).sum()),
        }

    def _entries(self, n_rows: int) -> int:
        """A number of entries of `cu_seqlens` that nearly always suffices, a multiple of 8.

        It counts the rows and the expected number of documents that end in them, plus four standard deviations of that number.
        """
        n_ends = n_rows * self.seq_len * len(self.store.n_bytes) / len(self.store.tokens)
        return 8 * math.ceil((n_rows + 1 + n_ends + 4 * math.sqrt(n_ends)) / 8)

    def _plan(self, epoch: int) -> None:
        """Lays out the tokens of an epoch: where each document starts in the epoch (`_starts`) and in the store (`_sources`)."""
        if epoch == self._epoch:
            return
        offsets = self.store.offsets
        documents, self._order, self._offset = np.arange(len(offsets) - 1), np.arange(self.n_rows), 0
        if self.shuffle:
            rng = np.random.default_rng([self.seed, epoch])
            documents, self._order, self._offset = rng.permutation(documents), rng.permutation(self.n_rows), int(rng.integers(self.seq_len))
        if self.ring:  # the documents are repeated until the last row has all its tokens
            end = self._offset + self.n_rows * self.seq_len + 1
            documents = np.tile(documents, -(-end // offsets[-1]))
        self._sources = offsets[documents]
        self._starts = np.concatenate([[0], np.cumsum(offsets[documents + 1] - self._sources)])
        self._epoch = epoch

    def _windows(self, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The `seq_len + 1` tokens from each of these positions of the epoch on.

        Returns:
            ids: int64 `(len(begins), seq_len + 1)`.
            real: bool of the same shape, false beyond the epoch's last token.
            cuts: int64, sorted: the ends of the documents that end among the inputs, as exclusive positions in the flattened
                `(len(begins), seq_len)`.
        """
        width = self.seq_len + 1
        stops = np.minimum(begins + width, self._starts[-1])
        begins = np.minimum(begins, stops)
        # each window consists of a few pieces of documents
        first = np.searchsorted(self._starts, begins, side="right") - 1
        count = np.searchsorted(self._starts, stops, side="left") - first
        document, row = ranges(first, count), np.repeat(np.arange(len(begins)), count)
        start, end = self._starts[document], self._starts[document + 1]
        low, high = np.maximum(start, begins[row]), np.minimum(end, stops[row])
        tokens = self.store.tokens.view(np.ndarray)[ranges(self._sources[document] + low - start, high - low)]
        real = np.arange(width) < (stops - begins)[:, None]
        ids = np.full(real.shape, self.pad_id, np.int64)
        ids[real] = tokens
        cuts = high - begins[row]
        return ids, real, (row * self.seq_len + cuts)[(high == end) & (cuts <= self.seq_len)]
