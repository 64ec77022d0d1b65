"""Data modules of tasks whose rows are made by rule from tokens; the validation rows are the same in every run."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.rows import RowsDataModule
from attnzoo.data.synthetic import copying as copying_task
from attnzoo.data.synthetic import induction as induction_task
from attnzoo.data.synthetic import recall as recall_task
from attnzoo.data.tokenizers import NumberTokenizer

FORMAT = 1  # the version of the generators, part of the record: rows of another generator are another data set
TRAIN, VALIDATION = 0, 1
KEPT_TOKENS = 2**26  # rows are kept if an epoch has no more tokens than this; they take at most 512 MiB in each process


class ExampleRows:
    """Rows that a function makes one by one, as dense batches. The rows of a small data set are made only once by each process.

    Args:
        make: maps the number of a row to its `input_ids` and `labels`, numpy int64 `(seq_len,)`.
        n_rows: rows in an epoch; all epochs have the same rows.
        seq_len: tokens in a row.
        pad_id: the padding token; its label is -100.
        seed, shuffle: the seed of the epochs' order, and whether epochs are shuffled at all.
    """

    def __init__(
        self, make: Callable[[int], tuple[np.ndarray, np.ndarray]], n_rows: int, seq_len: int, *, pad_id: int, seed: int, shuffle: bool
    ):
        self.make, self.n_rows, self.seq_len, self.pad_id, self.seed, self.shuffle = make, n_rows, seq_len, pad_id, seed, shuffle
        self._kept: dict[int, np.ndarray] = {}

    def order(self, epoch: int, group: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_rows) if self.shuffle else np.arange(self.n_rows)

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """The batch `(len(rows), seq_len)` of these rows. `logits_at` are the positions with a label.

        Numbers from `n_rows` on give rows of padding.
        """
        ids, labels = np.full((len(rows), self.seq_len), self.pad_id), np.full((len(rows), self.seq_len), IGNORED)
        for i, row in enumerate(rows):
            if row < self.n_rows:
                ids[i], labels[i] = self._row(int(row))
        logits_at = np.flatnonzero(labels != IGNORED)
        if len(logits_at) == 0:  # a batch of padding; a model needs at least one position to predict from
            logits_at = np.zeros(1, np.int64)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "logits_at": torch.from_numpy(logits_at),
            "lengths": np.full(len(rows), self.seq_len),
            "n_tokens": int((rows < self.n_rows).sum()) * self.seq_len,
            "n_targets": int((labels != IGNORED).sum()),
        }

    def _row(self, row: int) -> np.ndarray:
        """`input_ids` and `labels`, `(2, seq_len)`."""
        made = self._kept.get(row)
        if made is None:
            made = np.array(self.make(row), np.int32)
            if self.n_rows * self.seq_len <= KEPT_TOKENS:
                self._kept[row] = made
        return made


class ExampleDataModule(RowsDataModule):
    """Rows of `seq_len` tokens that are made one by one, for a causal model; `val/accuracy` is the share of correctly predicted targets.

    A subclass sets `kind` and `tokenizer`, and has `example(split, row)` and `record()`.

    Args:
        seq_len: tokens in a row.
        batch_size, eval_batch_size: rows of one device in one micro-step, in training and in validation; an `eval_batch_size` of None
            stands for `batch_size`.
        n_train, n_validation: number of rows in each split; all epochs have the same rows, and the validation rows depend on no seed.
        objective: must be "lm".
        shuffle, seed, num_workers: options of the loaders; `seed` also decides the training rows.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, *, seq_len: int, batch_size: int, eval_batch_size: int | None = None, n_train: int, n_validation: int, objective: str = "lm",
        shuffle: bool = True, seed: int = 0, num_workers: int = 0,
    ):
        super().__init__()
        self.seq_len, self.batch_size = seq_len, batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.n_train, self.n_validation, self.objective = n_train, n_validation, objective
        self.shuffle, self.seed, self.num_workers = shuffle, seed, num_workers
        self.check_at_least(seq_len=2, batch_size=1, eval_batch_size=1, n_train=1, n_validation=1, num_workers=0, seed=0)
        if objective != "lm":
            raise ValueError(
                f"data={self.kind} must go with task=lm and a GPT: answers follow from what stands before them; got task {objective!r}"
            )

    def example(self, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
        """`input_ids` and `labels`, int64 `(seq_len,)`, of a row of the split "train" or "validation"."""
        raise NotImplementedError

    def record(self) -> dict:
        """The run's data as plain JSON: everything that the rows depend on, with a sha256 of that."""
        raise NotImplementedError

    def _row_seed(self, split: str, row: int) -> tuple[int, int, int]:
        return (self.seed, TRAIN, row) if split == "train" else (0, VALIDATION, row)

    def _rows(self, split: str, shuffle: bool = False) -> ExampleRows:
        n_rows = self.n_train if split == "train" else self.n_validation
        make = functools.partial(self.example, split)
        return ExampleRows(make, n_rows, self.seq_len, pad_id=self.tokenizer.pad_id, seed=self.seed, shuffle=shuffle)

    def _settings(self) -> dict[str, Any]:
        return {"examples": self.record()["sha256"], "shuffle": self.shuffle}

    def bytes_per_token(self, split: str) -> None:
        """None, because the loss of answers has no bits per byte of text."""


class TokenTask(ExampleDataModule):
    """Rows of a task in `attnzoo.data.synthetic` that is made of tokens, not of text.

    Args:
        task: the task's module; its `check` and `example` take `seq_len`, `vocab_size` and `options`.
        options: keyword arguments of `example`; the rows take the values of a list in turn.
        vocab_size: the vocabulary size of the task and of the model.
        rows: keyword arguments of ExampleDataModule.

    Raises:
        ValueError: an argument is out of its range, or the task cannot be made with these options.
    """

    def __init__(self, task: ModuleType, options: dict[str, Any], *, vocab_size: int, **rows):
        self.kind = task.__name__.rpartition(".")[2]
        super().__init__(**rows)
        self.task, self.options, self.vocab_size = task, options, vocab_size
        self.tokenizer = NumberTokenizer(vocab_size)
        self._choices = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
        if empty := next((key for key, values in self._choices.items() if not values), None):
            raise ValueError(f"data.{empty}=[] must be a value or a list with at least one")
        check_arguments(task.check, [self._arguments(i) for i in range(max(map(len, self._choices.values()), default=1))])

    def _arguments(self, row: int) -> dict[str, Any]:
        chosen = {key: values[row % len(values)] for key, values in self._choices.items()}
        return {"seq_len": self.seq_len, "vocab_size": self.vocab_size, **chosen}

    def example_options(self) -> dict[str, Any]:
        """Keyword arguments of the task's `example` for the first row, without `seq_len` and `seed`."""
        return {key: value for key, value in self._arguments(0).items() if key != "seq_len"}

    def example(self, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self.task.example(**self._arguments(row), seed=self._row_seed(split, row))

    def record(self) -> dict:
        options = {**self.options, "seq_len": self.seq_len, "vocab_size": self.vocab_size, "seed": self.seed}
        source = {"kind": self.kind, "format": FORMAT, **options, "n_train": self.n_train, "n_validation": self.n_validation}
        return {"source": source, "sha256": fingerprint(source), "tokenizer": self.tokenizer.record()}

    def documents(self, split: str):
        """The split's first rows, at most 1000, as a `datasets.Dataset` of `input_ids` (numpy int64)."""
        import datasets

        n_rows = min(1000, self._rows(split).n_rows)
        rows = [self.example(split, row)[0] for row in range(n_rows)]
        return datasets.Dataset.from_dict({"input_ids": rows}).with_format("numpy")


def check_arguments(check: Callable[..., None], arguments: Sequence[dict[str, Any]]) -> None:
    """Calls `check` with each set of arguments. Turns its ValueError or TypeError into a ValueError that names keys as the command line."""
    for one in arguments:
        try:
            check(**one)
        except (ValueError, TypeError) as error:
            raise ValueError(f"data.{error}") from error


def fingerprint(source: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()


def recall(*, n_pairs: int | list[int], power: float, random_fill: bool, **options) -> TokenTask:
    """Multi-query associative recall, see `attnzoo.data.synthetic.recall`; the other options are those of TokenTask."""
    return TokenTask(recall_task, {"n_pairs": n_pairs, "power": power, "random_fill": random_fill}, **options)


def copying(*, n_tokens: int | list[int] | None, **options) -> TokenTask:
    """Copying and selective copying, see `attnzoo.data.synthetic.copying`; the other options are those of TokenTask."""
    return TokenTask(copying_task, {"n_tokens": n_tokens}, **options)


def induction(**options) -> TokenTask:
    """Induction heads, see `attnzoo.data.synthetic.induction`; the other options are those of TokenTask."""
    return TokenTask(induction_task, {}, **options)


for _task in (recall, copying, induction):
    _task.options_of = (TokenTask,)
