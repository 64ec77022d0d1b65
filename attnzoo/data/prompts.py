"""Where prompts and their continuations come from: JSON lines, and a set made by rule for experiments.

These sources work as those of `attnzoo.data.sources`, but the prompt and each of its continuations are separate documents, one after the
other. A document's `label` tells which of the two it is.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnzoo.data.sources import check_fraction, file_stats, stable_share, text_paths

CLASSES = ("prompt", "continuation")
KEYS = {"train": "data.paths", "validation": "data.val_paths"}  # of the files, which errors name


class PromptFiles:
    """Files of JSON lines, each `{"prompt": "...", "continuations": ["...", ...]}`; other keys are ignored. Halves of surrogate pairs,
    which JSON can hold and UTF-8 cannot, become U+FFFD.

    Args:
        paths: files, folders and globs.
        val_paths: the same for validation; None splits `paths` by a hash of the prompts, so that no prompt is in both splits.
        val_fraction: share of the prompts for validation if there are no `val_paths`.

    Raises:
        FileNotFoundError: a path does not exist, or has no file.
        ValueError: `val_fraction` is not between 0 and 1, or, when the files are read, a line is not as described here.
    """

    kind, classes = "continuations", CLASSES

    def __init__(self, paths: str | list[str], val_paths: str | list[str] | None = None, val_fraction: float = 0.1):
        check_fraction(val_fraction)
        self.files = {"train": text_paths(KEYS["train"], paths), "validation": text_paths(KEYS["validation"], val_paths)}
        self.val_fraction = val_fraction

    def record(self) -> dict:
        files = {f"{split}_files": len(files) for split, files in self.files.items()}
        return {"kind": self.kind, "format": 1, **files, "val_fraction": self.val_fraction}

    def identity(self) -> dict:
        return {**self.record(), "stats": {split: file_stats(files) for split, files in self.files.items()}}

    def documents(self) -> Iterator[dict]:
        for given, files in self.files.items():
            for name, path in files.items():
                for number, prompt, continuations in _read(KEYS[given], path):
                    below = given == "train" and not self.files["validation"] and stable_share(_whole(prompt)[0]) < self.val_fraction
                    yield from _documents("validation" if below else given, f"{name}:{number}", prompt, continuations)


def _read(key: str, path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(line number, prompt, continuations) of each line. Errors name `key`."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{key}: line {number} of {str(path)!r} must be JSON: {error}") from error
            match row:
                case {"prompt": str(prompt), "continuations": [_, *_] as continuations} if prompt and all(
                        isinstance(text, str) and text for text in continuations):
                    yield number, prompt, continuations
                case _:
                    raise ValueError(f"{key}: line {number} of {str(path)!r} must be an object with a text for prompt and a list of "
                                     "texts for continuations, none of them empty")


class NumberPrompts:
    """Prompts that are lines of numbers, with statements about these numbers as continuations; the same in every run.

    Args:
        n_train, n_validation: number of prompts in each split.
        n_numbers: how many numbers a prompt has; each is from 10 to 99.
        n_continuations: how many continuations a prompt has, at most as many as there are kinds (`KINDS`).
    """

    kind, classes = "continuations", CLASSES
    KINDS = {
        "sorted up": sorted,
        "sorted down": lambda numbers: sorted(numbers, reverse=True),
        "backwards": lambda numbers: numbers[::-1],
        "the largest": lambda numbers: [max(numbers)],
        "the smallest": lambda numbers: [min(numbers)],
        "the sum": lambda numbers: [sum(numbers)],
    }

    def __init__(self, n_train: int, n_validation: int, n_numbers: int, n_continuations: int):
        self.n_rows = {"train": n_train, "validation": n_validation}
        self.n_numbers, self.n_continuations = n_numbers, n_continuations
        for key, value in (("n_train", n_train), ("n_validation", n_validation), ("n_numbers", n_numbers)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"data.{key}={value} must be a whole number, at least 1")
        if not isinstance(n_continuations, int) or not 1 <= n_continuations <= len(self.KINDS):
            raise ValueError(f"data.n_continuations={n_continuations} must be a whole number from 1 to {len(self.KINDS)}")

    def record(self) -> dict:
        rows = {f"n_{split}": n for split, n in self.n_rows.items()}
        return {"kind": self.kind, "format": 1, **rows, "n_numbers": self.n_numbers, "n_continuations": self.n_continuations}

    identity = record

    def documents(self) -> Iterator[dict]:
        for i, (split, n) in enumerate(self.n_rows.items()):
            for row in range(n):
                rng = np.random.default_rng([i, row])
                numbers = rng.integers(10, 100, self.n_numbers).tolist()
                kinds = rng.permutation(list(self.KINDS))[: self.n_continuations].tolist()
                continuations = [f"{kind}: {_text(self.KINDS[kind](numbers))}" for kind in kinds]
                yield from _documents(split, str(row), f"{_text(numbers)}\n", continuations)


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _documents(split: str, path: str, prompt: str, continuations: list[str]) -> Iterator[dict]:
    for given, label in ((prompt, CLASSES[0]), *((text, CLASSES[1]) for text in continuations)):
        text, n_replaced = _whole(given)
        yield {"text": text, "path": path, "split": split, "n_replaced": n_replaced, "label": label}


def _whole(text: str) -> tuple[str, int]:
    """The text with U+FFFD in place of surrogates, and how many there were."""
    return re.subn("[\ud800-\udfff]", "\ufffd", text)
