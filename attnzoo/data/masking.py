"""Rows for masked language modelling: documents are cut into sequences of at most `seq_len` tokens, some of which must be predicted.

Of the tokens chosen at `mask_rate`, 80 % become the mask, 10 % a random token and 10 % stay (BERT, Devlin et al. 2019). The choice
depends on (seed, epoch, sequence) only, so it is the same on any number of devices, packed or padded, and after a resume.
"""

import math

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.packing import packed_fields, ranges
from attnzoo.data.scheduling import batch_sizes
from attnzoo.data.tokenized import TokenStore

BATCHINGS = ("random", "by_length", "scheduled", "balanced")
SLOTS, LOGITS = 128, 64  # static shapes are multiples of these, so that they are divisible by the tiles of matrix products


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
        batching: which sequences share a step if epochs are shuffled, one of BATCHINGS. "random": any. "by_length": those of similar
            length, so that padded rows hold less padding. "scheduled": those of similar length; `attnzoo.data.scheduling` begins a new step
            where that costs less than padding, so that steps may have fewer rows. "balanced": those of all lengths, so that packed steps
            hold nearly the same number of tokens. They are filled up to one static shape, so that nothing is compiled or captured again.
        step_tokens: "scheduled" only: the fixed cost of a step, expressed as a number of tokens.
        min_seq_len: documents are cut into sequences of random lengths from this to `seq_len`, the same in every epoch and for every seed;
            a sequence at a document's end may be shorter. None cuts sequences as long as possible.
    """

    def __init__(
        self, store: TokenStore, seq_len: int, *, tokenizer, mask_rate: float, seed: int, shuffle: bool, packed: bool,
        batching: str = "random", step_tokens: int = 4096, min_seq_len: int | None = None,
    ):
        self.store, self.seq_len, self.tokenizer, self.mask_rate = store, seq_len, tokenizer, mask_rate
        self.seed, self.shuffle, self.packed, self.batching, self.step_tokens = seed, shuffle, packed, batching, step_tokens
        self.frame = 0 if tokenizer.cls_id is None or tokenizer.sep_id is None else 1
        self._sources, self._lengths = self._cut(min_seq_len)
        self.n_rows = len(self._lengths)
        self._sizes: dict[int, tuple[int, int]] = {}
        self._steps: dict[int, np.ndarray] = {}

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

    def order(self, epoch: int, group: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.n_rows)
        if self.batching == "balanced":
            return self._balanced(order, group, rng)
        if self.batching == "scheduled":
            return self._scheduled(order, group, rng)
        if self.batching == "random":
            return order
        # sort by length inside windows of 50 steps, then shuffle the steps; an incomplete last step stays last
        order = order[np.lexsort((self._lengths[order], np.arange(self.n_rows) // (50 * group)))]
        whole = self.n_rows // group * group
        return np.concatenate([rng.permutation(order[:whole].reshape(-1, group)).reshape(-1), order[whole:]])

    def _balanced(self, order: np.ndarray, group: int, rng: np.random.Generator) -> np.ndarray:
        """An order in which every step has one row of every length class.

        If the last step is incomplete, it lacks those classes that the first step begins with: loaders fill it with the first rows.
        """
        order = order[np.argsort(self._lengths[order], kind="stable")]
        whole, rest = divmod(self.n_rows, group)
        spread = spread_out(group)
        sizes = np.full(group, whole)
        sizes[spread[group - rest :]] += 1
        classes = [rng.permutation(rows) for rows in np.split(order, np.cumsum(sizes)[:-1])]
        steps = np.stack([classes[c][:whole] for c in spread], axis=1)
        return np.concatenate([steps.reshape(-1), *(classes[c][whole:] for c in spread[group - rest :])])

    def n_slots(self, group: int) -> int:
        """The number of places in an epoch's order: one for each sequence, and with a schedule also the empty places of its steps."""
        scheduled = self.batching == "scheduled" and self.shuffle
        return len(self._schedule(group)) * group if scheduled else self.n_rows

    def _schedule(self, group: int) -> np.ndarray:
        """The number of sequences in each step, where the sequences are sorted by length."""
        if group not in self._steps:
            padded = self._padded(np.sort(self._lengths) + 2 * self.frame)
            self._steps[group] = batch_sizes(padded, group, lambda rows, longest: self.step_tokens + rows * longest)
        return self._steps[group]

    def _scheduled(self, order: np.ndarray, group: int, rng: np.random.Generator) -> np.ndarray:
        """The schedule's steps in random order. Sequences of equal length are in random order too. Empty places hold `n_rows`."""
        sizes = self._schedule(group)
        steps = np.full((len(sizes), group), self.n_rows)
        # every device takes neighbouring places of a step; the sequences are spread out, so that each device gets its share
        steps[spread_out(group) < sizes[:, None]] = order[np.argsort(self._lengths[order], kind="stable")]
        return rng.permutation(steps).reshape(-1)

    def _padded(self, lengths: np.ndarray) -> np.ndarray:
        """The lengths to which sequences of these lengths are padded."""
        return np.minimum(-(-lengths // 64) * 64, self.seq_len)

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
        if self.packed and self.batching == "balanced":
            usual_slots, usual_logits = self._static_sizes(n_rows)
            n_slots = max(usual_slots, round_up(len(ids) + 1, SLOTS))  # the last slot is always padding
            n_logits = max(usual_logits, round_up(n_targets, LOGITS))
            ids = np.pad(ids, (0, n_slots - len(ids)), constant_values=self.tokenizer.pad_id)
            labels = np.pad(labels, (0, n_slots - len(labels)), constant_values=IGNORED)
        if self.packed:
            fields = packed_fields(lengths, self.seq_len, n_rows + 1, n_slots)
        else:
            longest = self._padded(lengths.max())
            real = np.arange(longest) < lengths[:, None]
            ids, labels = pad_rows(ids, real, self.tokenizer.pad_id), pad_rows(labels, real, IGNORED)
            fields = {"attention_mask": torch.from_numpy(real), "max_tokens": int(lengths.sum()), "lengths": lengths}
        logits_at = np.pad(np.flatnonzero(labels != IGNORED), (0, n_logits - n_targets), constant_values=n_slots - 1)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "logits_at": torch.from_numpy(logits_at),
            **fields,
            "n_tokens": n_tokens,
            "n_targets": n_targets,
        }

    def _static_sizes(self, n_rows: int) -> tuple[int, int]:
        """Numbers of slots and logits that nearly always suffice for a step with one sequence of each length class.

        They lie five standard deviations above the mean.
        """
        if n_rows not in self._sizes:
            classes = [c for c in np.array_split(np.sort(self._lengths), n_rows) if len(c)]
            n_tokens, variance = n_rows * self._lengths.mean(), sum(c.var() for c in classes)
            rate = self.mask_rate
            n_targets = rate * n_tokens + n_rows * ((1 - rate) ** self._lengths).mean()  # every sequence has at least one target
            n_slots = n_tokens + 2 * self.frame * n_rows + 5 * math.sqrt(variance) + 1
            n_logits = n_targets + 5 * math.sqrt(rate * (1 - rate) * n_tokens + rate**2 * variance)
            self._sizes[n_rows] = round_up(n_slots, SLOTS), round_up(n_logits, LOGITS)
        return self._sizes[n_rows]

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


def spread_out(n: int) -> np.ndarray:
    """The numbers 0 .. n - 1 in an order in which each half, each quarter and so on covers the whole range, as far as n can be halved.

    These are the parts that 2, 4, ... devices take.
    """
    if n % 2:
        return np.arange(n)
    half = 2 * spread_out(n // 2)
    return np.concatenate([half, half + 1])


def round_up(n: float, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def pad_rows(values: np.ndarray, real: np.ndarray, fill: int) -> np.ndarray:
    padded = np.full(real.shape, fill, np.int64)
    padded[real] = values
    return padded
