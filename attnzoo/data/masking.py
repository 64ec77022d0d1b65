"""Rows for masked language modelling: documents cut into sequences of at most `seq_len` tokens, some of them to be guessed.

Of the tokens chosen at `mask_rate`, 80 % become the mask, 10 % a random token and 10 % stay (BERT, Devlin et al. 2019). What is
chosen depends on (seed, epoch, sequence) only: the same on any number of devices, packed or padded, and after a resume.
"""

import numpy as np
import torch

from attnzoo.data.packing import IGNORE, packed_fields, ranges
from attnzoo.data.tokenized import TokenStore


class MaskedRows:
    """Sequences of whole documents, with the tokenizer's cls and sep around each where it has both.

    Args:
        store: the token documents.
        seq_len: the longest sequence, cls and sep included.
        tokenizer: gives `mask_id`, `pad_id`, `vocab_size` and, if any, `cls_id` and `sep_id`.
        mask_rate: share of the tokens to guess; at least one in every sequence.
        seed: of shuffling and masks.
        shuffle: whether epochs are shuffled.
        packed: sequences one after the other without padding; else rows padded to a multiple of 64 tokens.
        group_by_length: put sequences of like length into the same step.
    """

    def __init__(
        self, store: TokenStore, seq_len: int, *, tokenizer, mask_rate: float, seed: int, shuffle: bool, packed: bool, group_by_length: bool
    ):
        self.store, self.seq_len, self.tokenizer, self.mask_rate = store, seq_len, tokenizer, mask_rate
        self.seed, self.shuffle, self.packed, self.group_by_length = seed, shuffle, packed, group_by_length
        self.frame = 0 if tokenizer.cls_id is None or tokenizer.sep_id is None else 1
        longest = seq_len - 2 * self.frame
        text = store.lengths - 1  # without the end of text
        n_parts = -(-text // longest)
        part = ranges(np.zeros_like(n_parts), n_parts) * longest
        self._sources = np.repeat(store.offsets[:-1], n_parts) + part
        self._lengths = np.minimum(np.repeat(text, n_parts) - part, longest)
        self.n_rows = len(self._lengths)

    def order(self, epoch: int, group: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.n_rows)
        if not self.group_by_length:
            return order
        # sort by length inside windows of 50 steps, then shuffle the steps; a last, smaller step stays last
        order = order[np.lexsort((self._lengths[order], np.arange(self.n_rows) // (50 * group)))]
        whole = self.n_rows // group * group
        return np.concatenate([rng.permutation(order[:whole].reshape(-1, group)).reshape(-1), order[whole:]])

    def batch(self, epoch: int, rows: np.ndarray) -> dict:
        """The batch of these sequences; numbers from `n_rows` on are left out, and a batch of nothing else is one padding token.

        `input_ids`, `labels` int64: packed `(n_tokens,)` with the fields of a packed batch, or `(len(rows), longest)` with a bool
        `attention_mask` and the int `max_tokens`, its sum. `logits_at` int64 `(n_targets,)` holds the flat indices of the tokens to
        guess. Also the ints `n_tokens` (without padding) and `n_targets`, and `lengths` (numpy int64).
        """
        rows = rows[rows < self.n_rows]
        ids, labels, lengths = self._sequences(epoch, rows)
        n_tokens = len(ids)
        if n_tokens == 0:
            ids, labels, lengths = np.array([self.tokenizer.pad_id]), np.array([IGNORE]), np.array([1])
        if self.packed:
            fields = packed_fields(lengths, self.seq_len, len(lengths) + 1)
        else:
            longest = min(-(-lengths.max() // 64) * 64, self.seq_len)
            real = np.arange(longest) < lengths[:, None]
            ids, labels = _pad(ids, real, self.tokenizer.pad_id), _pad(labels, real, IGNORE)
            fields = {"attention_mask": torch.from_numpy(real), "max_tokens": int(lengths.sum()), "lengths": lengths}
        logits_at = np.flatnonzero(labels != IGNORE)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "logits_at": torch.from_numpy(logits_at),
            **fields,
            "n_tokens": n_tokens,
            "n_targets": len(logits_at),
        }

    def _sequences(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Input ids and labels of these sequences, one after the other, and their lengths."""
        texts = self._lengths[rows]
        lengths = texts + 2 * self.frame
        begins = np.cumsum(lengths) - lengths
        at = ranges(begins + self.frame, texts)
        labels = np.full(lengths.sum(), IGNORE, np.int64)
        labels[at] = self.store.tokens.view(np.ndarray)[ranges(self._sources[rows], texts)]
        ids = labels.copy()
        if self.frame:
            ids[begins], ids[begins + lengths - 1] = self.tokenizer.cls_id, self.tokenizer.sep_id
        draws = [self._draw(epoch, row, n) for row, n in zip(rows, texts, strict=True)]
        chosen, kind, random = np.concatenate(draws, axis=1) if draws else np.empty((3, 0))
        chosen = chosen < self.mask_rate
        labels[at[~chosen]] = IGNORE
        ids[at[chosen & (kind < 0.8)]] = self.tokenizer.mask_id
        replaced = chosen & (kind >= 0.9)
        ids[at[replaced]] = (random[replaced] * self.tokenizer.vocab_size).astype(np.int64)
        return ids, labels, lengths

    def _draw(self, epoch: int, row: int, length: int) -> np.ndarray:
        draw = np.random.default_rng([self.seed, epoch, row]).random((3, length))
        draw[0, draw[0].argmin()] = 0  # always one to guess
        return draw


def _pad(values: np.ndarray, real: np.ndarray, fill: int) -> np.ndarray:
    padded = np.full(real.shape, fill, np.int64)
    padded[real] = values
    return padded
