"""Rows for masked language modelling: documents are cut into sequences of at most `seq_len` tokens, some of which must be predicted.

Of the tokens chosen at `mask_rate`, 80 % become the mask, 10 % a random token and 10 % stay (BERT, Devlin et al. 2019). The choice
depends on (seed, epoch, sequence) only, so it is the same on any number of devices, packed or padded, and after a resume.
"""

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.batching import StaticShape, StepOrder, fill_up, pad_rows, padded
from attnzoo.data.packing import packed_fields, ranges
from attnzoo.data.tokenized import TokenStore


class MaskedRows:
    """Sequences cut from documents; none crosses a document's end. If the tokenizer has cls and sep, they enclose every sequence.

    Args:
        store: the token documents.
        seq_len: the length of the longest sequence, cls and sep included.
        tokenizer: has `mask_id`, `pad_id` and `vocab_size`, and may have `cls_id` and `sep_id`.
        mask_rate: share of the tokens to predict; at least one in every sequence.
        seed: the seed of shuffling and masks.
        shuffle: whether epochs are shuffled.
        packed: True puts the sequences one after the other without padding. False pads rows to a multiple of 64 tokens, at most `seq_len`.
        batching, step_tokens: which sequences share a step, see `attnzoo.data.batching.StepOrder`. With "balanced" packed steps are filled
            up to one static shape.
        min_seq_len: documents are cut into sequences of random lengths from this to `seq_len`, the same in every epoch and for every seed;
            a sequence at a document's end may be shorter. None cuts sequences as long as possible.
    """

    def __init__(
        self, store: TokenStore, seq_len: int, *, tokenizer, mask_rate: float, seed: int, shuffle: bool, packed: bool,
        batching: str = "random", step_tokens: int = 4096, min_seq_len: int | None = None,
    ):
        self.store, self.seq_len, self.tokenizer, self.mask_rate = store, seq_len, tokenizer, mask_rate
        self.seed, self.packed = seed, packed
        self.frame = 0 if tokenizer.cls_id is None or tokenizer.sep_id is None else 1
        self._sources, self._lengths = self._cut(min_seq_len)
        self.n_rows = len(self._lengths)
        whole = self._lengths + 2 * self.frame
        steps = StepOrder(whole, seed=seed, shuffle=shuffle, longest=seq_len, batching=batching, step_tokens=step_tokens)
        self.order, self.n_slots = steps.order, steps.n_slots
        self._static = StaticShape(whole, self._lengths, mask_rate) if packed and batching == "balanced" else None

    def _cut(self, min_seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The position at which each sequence begins in the store, and the number of its tokens without cls and sep."""
        longest = self.seq_len - 2 * self.frame
        shortest = longest if min_seq_len is None else max(min_seq_len - 2 * self.frame, 1)
        text = self.store.lengths - 1  # without the end of text
        n_parts = -(-text // shortest)  # an upper bound
        document = np.repeat(np.arange(len(text)), n_parts)
        lengths = np.random.default_rng(0).integers(shortest, longest, len(document), endpoint=True)
        ends = np.cumsum(lengths)
        before = np.concatenate([[0], ends])[np.cumsum(n_parts) - n_parts]  # the sum of the lengths drawn for the documents before it
        begins = ends - lengths - before[document]
        used = begins < text[document]
        document, begins = document[used], begins[used]
        lengths = np.minimum(lengths[used], text[document] - begins)
        if min_seq_len is not None:  # a document's last sequence that is too short is joined to the one before it, or both are made equal
            tails = np.flatnonzero((lengths < shortest) & (begins > 0))
            both = lengths[tails - 1] + lengths[tails]
            lengths[tails] = np.where(both <= longest, 0, both // 2)
            lengths[tails - 1] = both - lengths[tails]
            begins[tails] = begins[tails - 1] + lengths[tails - 1]
        kept = lengths > 0
        return (self.store.offsets[document] + begins)[kept], lengths[kept]

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """The batch of these sequences: packed `(n_tokens,)`, or padded `(sequences, longest)` with a mask.

        `logits_at` are the positions of the tokens to predict. Row numbers from `n_rows` on are left out, and a batch of such numbers only
        has one padding token. With `balanced`, padding after the last sequence fills up packed batches, and positions of padding fill up
        `logits_at`.
        """
        n_rows = len(rows)
        rows = rows[rows < self.n_rows]
        ids, labels, lengths = self._sequences(epoch, rows)
        n_tokens = len(ids)
        if n_tokens == 0:
            ids, labels, lengths = np.array([self.tokenizer.pad_id]), np.array([IGNORED]), np.array([1])
        n_targets = int((labels != IGNORED).sum())
        n_slots, n_logits = len(ids), n_targets
        if self._static:
            n_slots, n_logits = self._static.slots(n_rows, len(ids)), self._static.logits(n_rows, n_targets)
            ids, labels = fill_up(ids, n_slots, self.tokenizer.pad_id), fill_up(labels, n_slots, IGNORED)
        if self.packed:
            fields = packed_fields(lengths, self.seq_len, n_rows + 1, n_slots)
        else:
            longest = padded(lengths.max(), self.seq_len)
            real = np.arange(longest) < lengths[:, None]
            ids, labels = pad_rows(ids, real, self.tokenizer.pad_id), pad_rows(labels, real, IGNORED)
            fields = {"attention_mask": torch.from_numpy(real), "max_tokens": int(lengths.sum()), "lengths": lengths}
        logits_at = fill_up(np.flatnonzero(labels != IGNORED), n_logits, n_slots - 1)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "logits_at": torch.from_numpy(logits_at),
            **fields,
            "n_tokens": n_tokens,
            "n_targets": n_targets,
        }

    def _sequences(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The concatenated input ids and labels of these sequences, and their lengths."""
        texts = self._lengths[rows]
        lengths = texts + 2 * self.frame
        begins = np.cumsum(lengths) - lengths
        at = ranges(begins + self.frame, texts)
        ids = np.empty(lengths.sum(), np.int64)
        ids[at] = self.store.tokens.view(np.ndarray)[ranges(self._sources[rows], texts)]
        if self.frame:
            ids[begins], ids[begins + lengths - 1] = self.tokenizer.cls_id, self.tokenizer.sep_id
        return ids, hide(ids, at, rows, texts, self.mask_rate, self.tokenizer, (self.seed, epoch)), lengths


def hide(ids: np.ndarray, at: np.ndarray, rows: np.ndarray, lengths: np.ndarray, mask_rate: float, tokenizer,
         seed: tuple[int, int]) -> np.ndarray:
    """Masks tokens of `ids` in place. Returns the labels: the original ids of chosen tokens, IGNORED elsewhere.

    at: the positions in `ids` of the tokens that may be masked, one sequence after the other. rows, lengths: the number of each sequence,
    and how many of these positions are its own. At least one token of every sequence is chosen. seed: the run's seed and the epoch.
    """
    draws = [np.random.default_rng([*seed, row]).random((3, n)) for row, n in zip(rows, lengths, strict=True)]
    for draw in draws:
        draw[0, draw[0].argmin()] = 0  # at least one token is chosen
    chosen, kind, random = np.concatenate(draws, axis=1) if draws else np.empty((3, 0))
    chosen = chosen < mask_rate
    labels = np.full(len(ids), IGNORED, np.int64)
    labels[at[chosen]] = ids[at[chosen]]
    ids[at[chosen & (kind < 0.8)]] = tokenizer.mask_id
    replaced = chosen & (kind >= 0.9)
    ids[at[replaced]] = (random[replaced] * tokenizer.vocab_size).astype(np.int64)
    return labels
