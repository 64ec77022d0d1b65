"""Pairs of texts, classified by whether they belong together: Long Range Arena's Retrieval, and a substitute from installed packages.

Sources work as those of `attnzoo.data.labelled`. The two texts of a pair are consecutive documents, each labelled with the pair's class.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnzoo.data.classification import ClassificationDataModule, LabelledRows
from attnzoo.data.sources import file_stats, python_packages, stable_share

SPLITS = ("train", "validation", "test")


def _documents(split: str, number: int, texts: tuple[str, str], label: str) -> Iterator[dict]:
    for side, text in enumerate(texts):  # an empty text would be left out, and its partner would be paired with another text
        yield {"text": text or " ", "path": f"{split}/{number}/{side}", "split": split, "n_replaced": 0, "label": label}


class PairFiles:
    """Long Range Arena's Retrieval as it is published: `*.train.tsv`, `*.eval.tsv`, `*.test.tsv`, with one pair in each line.

    A line has five columns: 0 or 1 (1: one paper cites the other), two ids, two texts.

    Args:
        path: the folder with the three files.

    Raises:
        FileNotFoundError: the folder or one of the files does not exist.
        ValueError: several files have the same ending, or, when the files are read, a line is not a pair.
    """

    kind, splits, classes = "retrieval", SPLITS, ["apart", "linked"]

    def __init__(self, path: str):
        self.folder = Path(path).expanduser()
        self.files: dict[str, Path] = {}
        for split, name in zip(SPLITS, ("train", "eval", "test"), strict=True):
            found = sorted(self.folder.glob(f"*.{name}.tsv"))
            if not found:
                raise FileNotFoundError(f"data.path={str(path)!r} must be a folder with one file *.{name}.tsv, it has none")
            if len(found) > 1:
                raise ValueError(f"data.path={str(path)!r} must have one file *.{name}.tsv, it has {', '.join(f.name for f in found)}")
            self.files[split] = found[0]

    def record(self) -> dict:
        return {"kind": self.kind, "format": 1, "files": {split: file.name for split, file in self.files.items()}}

    def identity(self) -> dict:
        return {**self.record(), "stats": file_stats(self.files)}

    def documents(self) -> Iterator[dict]:
        for split, file in self.files.items():
            with open(file, encoding="utf-8", errors="replace", newline="\n") as lines:
                for number, line in enumerate(lines):
                    label, *others = line.rstrip("\r\n").split("\t")
                    if len(others) != 4 or label not in ("0", "1", "0.0", "1.0"):
                        raise ValueError(f"{file.name}, line {number + 1}: must have 0 or 1, two ids and two texts, with tabs between them")
                    yield from _documents(split, number, (others[2], others[3]), self.classes[int(float(label))])


class SamePackage:
    """Pairs of source files of installed packages; the class tells whether both are of the same package. No file is in two splits.

    Args:
        packages: import names of at least two packages.
        n_train, n_validation, n_test: number of pairs in each split.
        generator_seed: another seed gives other pairs.
        least_bytes: smaller files are left out.
        max_characters: at most so many characters of each file are used, from its beginning.

    Raises:
        ValueError: a number of pairs is not a whole number of at least 1, a package is not installed or has no sources, or a split does not
            have at least two packages with at least two files each.
    """

    kind, splits, classes = "same_package", SPLITS, ["apart", "together"]

    def __init__(self, packages: list[str], n_train: int, n_validation: int, n_test: int, generator_seed: int, least_bytes: int = 1000,
                 max_characters: int = 8192):
        self.n_rows = dict(zip(SPLITS, (n_train, n_validation, n_test), strict=True))
        self.settings = {"generator_seed": generator_seed, "least_bytes": least_bytes, "max_characters": max_characters}
        for split, n in self.n_rows.items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"data.n_{split}={n} must be a whole number, at least 1")
        source = python_packages(packages)
        self.about = source.about
        self.files = {name: path for name, path in source.files.items() if path.stat().st_size >= least_bytes}
        self.of_split: dict[str, list[list[str]]] = {}
        for split in SPLITS:
            by_package: dict[str, list[str]] = {}
            for name in self.files:
                if _split(name) == split:
                    by_package.setdefault(name.partition("/")[0], []).append(name)
            self.of_split[split] = [names for names in by_package.values() if len(names) > 1]
            if len(self.of_split[split]) < 2:
                raise ValueError(f"data.packages={packages} must be at least two packages with at least two files in the {split} split")

    def record(self) -> dict:
        rows = {f"n_{split}": n for split, n in self.n_rows.items()}
        return {"kind": self.kind, "format": 1, **self.about, **rows, **self.settings}

    def identity(self) -> dict:
        return {**self.record(), "stats": file_stats(self.files)}

    def documents(self) -> Iterator[dict]:
        longest = self.settings["max_characters"]
        for i, (split, packages) in enumerate(self.of_split.items()):
            for row in range(self.n_rows[split]):
                rng = np.random.default_rng([self.settings["generator_seed"], i, row])
                together = bool(rng.integers(2))
                one, other = rng.choice(len(packages), 2, replace=False)
                if together:
                    names = rng.choice(packages[one], 2, replace=False)
                else:
                    names = rng.choice(packages[one]), rng.choice(packages[other])
                texts = tuple(self.files[str(name)].read_text(encoding="utf-8", errors="replace")[:longest] for name in names)
                yield from _documents(split, row, texts, self.classes[together])


def _split(name: str) -> str:
    share = stable_share(name)
    return "test" if share < 0.1 else "validation" if share < 0.2 else "train"


class PairRows(LabelledRows):
    """Pairs of sequences, which are consecutive in a batch. Each has special tokens and is cut as in LabelledRows; a pair has one label."""

    towers = 2

    def sequences(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, lengths, labels = super().sequences((2 * rows[:, None] + np.arange(2)).reshape(-1))
        return ids, lengths, labels[::2]


class PairDataModule(ClassificationDataModule):
    """Batches of pairs for a BERT whose classifier reads two sequences.

    The arguments are those of ClassificationDataModule; `batch_size` counts pairs. With objective "mlm" each text is a row of its own.
    """

    towers, rows_class = 2, PairRows


def retrieval(*, path: str, **options) -> PairDataModule:
    """Long Range Arena's Retrieval from a folder, see `PairFiles`; the other options are those of ClassificationDataModule."""
    return PairDataModule(PairFiles(path), **options)


def same_package(
    *, packages: list[str], n_train: int, n_validation: int, n_test: int, generator_seed: int, **options
) -> PairDataModule:
    """Pairs of source files, see `SamePackage`; the other options are those of ClassificationDataModule."""
    return PairDataModule(SamePackage(packages, n_train, n_validation, n_test, generator_seed), **options)


retrieval.options_of = same_package.options_of = (ClassificationDataModule,)
