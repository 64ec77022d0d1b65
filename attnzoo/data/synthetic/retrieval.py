"""The data module of passkeys in natural text: training rows to learn the task from, mixed with language modelling."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnzoo.batch import IGNORED
from attnzoo.data.datamodule import TextDataModule
from attnzoo.data.synthetic import passkey as passkey_task
from attnzoo.data.synthetic.tasks import FORMAT, ExampleDataModule, fingerprint


class PasskeyDataModule(ExampleDataModule):
    """Rows of a text in which a passkey is hidden, and asked for at the end. Rows cross documents.

    In training this is so for a `share` of the rows; the other rows are language modelling. All validation rows have a passkey, and their
    only targets are the answer's tokens: a space and the key's digits.

    Args:
        text: a data module of text; its tokens and its tokenizer are used, but not its rows.
        share: share of the training rows that have a passkey.
        targets: the targets of passkey rows in training: "answer", or "all" tokens.
        depth: share of the text before the key; None draws it for each row.
        keys: the smallest and the largest passkey.
        distractors: number of further keys in a row with a passkey; each key then has a name. The rows take several numbers in turn.
        questions: number of keys that a row with a passkey asks for. If there are several, each has a name and is asked for at a random
            place behind it, `depth` is not used, and a long row has more answers to learn from. The rows take several numbers in turn.
        noise: share of the rows with a passkey whose filler is the task's own five sentences, as in the evaluation `passkey`, and not the
            text.
        rows: keyword arguments of ExampleDataModule.

    Raises:
        ValueError: an argument is out of its range, or `text` is not a TextDataModule.
    """

    kind = "passkey"

    def __init__(
        self, text: TextDataModule, *, share: float = 1.0, targets: str = "answer", depth: float | None = None,
        keys: Sequence[int] = passkey_task.KEYS, distractors: int | Sequence[int] = 0,
        questions: int | Sequence[int] = 1, noise: float = 0.0, **rows,
    ):
        super().__init__(**rows)
        if not isinstance(text, TextDataModule):
            raise ValueError(f"data.text must be a text such as data@data.text=python_stdlib, got {type(text).__name__}")
        self.text, self.share, self.targets, self.depth, self.keys = text, share, targets, depth, tuple(keys)
        self.distractors = _numbers("distractors", distractors, 0, len(passkey_task.NAMES) - 1)
        self.questions = _numbers("questions", questions, 1, len(passkey_task.MANY_NAMES) - max(self.distractors))
        self.noise = noise
        if not 0 < share <= 1:
            raise ValueError(f"data.share={share} must be above 0 and at most 1")
        if not 0 <= noise <= 1:
            raise ValueError(f"data.noise={noise} must be from 0 to 1")
        if targets not in ("answer", "all"):
            raise ValueError(f"data.targets={targets!r} must be answer or all")
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"data.depth={depth} must be null or from 0 to 1")
        if len(self.keys) != 2 or not 0 <= self.keys[0] <= self.keys[1]:
            raise ValueError(f"data.keys={list(keys)} must be the smallest and the largest passkey, whole numbers from 0 on")

    @property
    def tokenizer(self):
        return self.text.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer):
        self.text.tokenizer = tokenizer

    def prepare_data(self) -> None:
        self.text.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Opens the text.

        Raises:
            ValueError: a row has no room for the passkeys, the question and the answer, or what TextDataModule.setup raises: for instance,
                a split of the text is shorter than a row.
        """
        self.text.seq_len = self.seq_len
        self.text.setup()  # without the stage, so that lengths are checked: examples are cut from the text as rows are
        try:
            options = {"encode": self.tokenizer.encode, "seed": 0, "filler": [0], "keys": (self.keys[1], self.keys[1]),
                       "distractors": max(self.distractors)}
            passkey_task.example(self.seq_len, depth=0.0, **options)
            if max(self.questions) > 1:
                passkey_task.quiz(self.seq_len, questions=max(self.questions), **options)
        except ValueError as error:
            raise ValueError(str(error).replace("length=", "data.seq_len=", 1)) from error

    def example_options(self) -> dict[str, Any]:
        """Keyword arguments of `attnzoo.data.synthetic.passkey.example` that make the same questions as in training."""
        return {"keys": self.keys}

    def example(self, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
        train, seed = split == "train", self._row_seed(split, row)
        rng = np.random.default_rng((*seed, 1))  # independent of the generator that draws the key
        tokens = self.text.stores[split].tokens
        begin = int(rng.integers(len(tokens) - self.seq_len))
        text = np.asarray(tokens[begin : begin + self.seq_len + 1], np.int64)
        if train and rng.random() >= self.share:
            return text[:-1], text[1:]
        options = {"encode": self.tokenizer.encode, "seed": seed, "filler": None if self.noise and rng.random() < self.noise else text,
                   "keys": self.keys, "distractors": self.distractors[row % len(self.distractors)]}
        questions = self.questions[row % len(self.questions)]
        if questions > 1:
            input_ids, labels = passkey_task.quiz(self.seq_len, questions=questions, **options)
        else:
            made = passkey_task.example(self.seq_len, depth=self.depth, **options)
            input_ids, labels = made.input_ids, made.labels
        if train and self.targets == "all":
            return input_ids, np.append(input_ids[1:], IGNORED)
        return input_ids, labels

    def record(self) -> dict:
        """The text's record and everything else that the rows depend on, with a sha256 of both."""
        text = self.text.record()
        options = {key: getattr(self, key) for key in ("seq_len", "share", "targets", "depth", "seed", "n_train", "n_validation")}
        if any(self.distractors):
            options["distractors"] = self.distractors
        if self.questions != [1]:
            options["questions"] = self.questions
        if self.noise:
            options["noise"] = self.noise
        source = {"kind": self.kind, "format": FORMAT, **options, "keys": list(self.keys), "text": text["source"]}
        return {**text, "source": source, "sha256": fingerprint({**source, "text": text["sha256"], "tokenizer": text["tokenizer"]})}

    def documents(self, split: str):
        """The text's whole documents, see `TextDataModule.documents`."""
        return self.text.documents(split)


def _numbers(name: str, given: int | Sequence[int], low: int, high: int) -> list[int]:
    numbers = [given] if isinstance(given, int) else list(given)
    if not numbers or any(not isinstance(n, int) or not low <= n <= high for n in numbers):
        raise ValueError(f"data.{name}={given} must be a number from {low} to {high}, or a list of them")
    return numbers


def passkey(**options) -> PasskeyDataModule:
    """A data module of passkeys; options are those of PasskeyDataModule."""
    return PasskeyDataModule(**options)


passkey.options_of = (PasskeyDataModule,)
