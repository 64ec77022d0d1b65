"""Labelled images as sequences of gray pixels: Pathfinder, and any folder or Hugging Face data set of images.

Sources work as those of `attnzoo.data.labelled`. A document's tokens (`ids`) are its pixels, row by row, and its text has one character for
each pixel, whose code is the pixel's value.
"""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context

import numpy as np

from attnzoo.data import tokenizers
from attnzoo.data.classification import ClassificationDataModule
from attnzoo.data.sources import stable_share
from attnzoo.data.synthetic import pathfinder as pathfinder_task

SPLITS = ("train", "validation", "test")
TOKENS = ("[PAD]", "[CLS]", "[EOS]", "[MASK]", *map(str, range(256)))
FIRST_PIXEL = TOKENS.index("0")


def pixel_tokenizer() -> tokenizers.HuggingFaceTokenizer:
    """A tokenizer with one token for each gray value from 0 to 255."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad": "[PAD]", "cls": "[CLS]", "eos": "[EOS]", "mask": "[MASK]"}
    backend.add_special_tokens(list(special.values()))
    return tokenizers.HuggingFaceTokenizer(backend, "pixels", special)


def _document(image: np.ndarray, split: str, row: int, label: str) -> dict:
    pixels = image.reshape(-1)
    return {"text": pixels.tobytes().decode("latin-1"), "ids": pixels.astype(np.uint16) + FIRST_PIXEL, "path": str(row), "split": split,
            "n_replaced": 0, "label": label}


class PathfinderSource:
    """Images of `attnzoo.data.synthetic.pathfinder`, the same in every run with the same sizes, settings and generator seed.

    Args:
        n_train, n_validation, n_test: number of images in each split.
        generator_seed: another seed gives other images.
        settings: the settings of the task.
        processes: the number of processes that draw images; None takes one for each core.

    Raises:
        ValueError: a number of images is not a whole number of at least 1, or `generator_seed` is not a whole number of at least 0.
    """

    splits, classes = SPLITS, ["apart", "joined"]

    def __init__(self, n_train: int, n_validation: int, n_test: int, generator_seed: int, settings: pathfinder_task.Settings,
                 processes: int | None = None):
        self.n_rows = dict(zip(self.splits, (n_train, n_validation, n_test), strict=True))
        for split, n in self.n_rows.items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"data.n_{split}={n} must be a whole number, at least 1")
        if not isinstance(generator_seed, int) or generator_seed < 0:
            raise ValueError(f"data.generator_seed={generator_seed} must be a whole number, at least 0")
        self.generator_seed, self.settings, self.processes = generator_seed, settings, processes
        self.kind = "pathx" if settings.size == 128 else "pathfinder"

    def record(self) -> dict:
        rows = {f"n_{split}": n for split, n in self.n_rows.items()}
        settings = asdict(self.settings) | {"margins": list(self.settings.margins)}
        return {"kind": self.kind, "format": 2, "generator_seed": self.generator_seed, **rows, **settings}

    identity = record

    def documents(self) -> Iterator[dict]:
        size = pathfinder_task.CHUNK
        jobs = [(split, first, (self.generator_seed, i, first // size)) for i, split in enumerate(self.splits)
                for first in range(0, self.n_rows[split], size)]
        settings = itertools.repeat(self.settings)
        seeds = [seed for *_, seed in jobs]
        workers = min(self.processes or os.cpu_count() or 1, len(jobs))
        if workers == 1:
            yield from self._rows(jobs, map(pathfinder_task.chunk, seeds, settings))
            return
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:  # forking is not safe once CUDA has begun
            yield from self._rows(jobs, pool.map(pathfinder_task.chunk, seeds, settings))

    def _rows(self, jobs: list[tuple], chunks) -> Iterator[dict]:
        for (split, first, _), (images, labels) in zip(jobs, chunks, strict=True):
            for row in range(first, min(first + len(images), self.n_rows[split])):
                yield _document(images[row - first], split, row, self.classes[labels[row - first]])


class ImageSource:
    """Labelled images from a folder or a Hugging Face data set, converted to gray and to one size.

    Args:
        name: the path that `datasets.load_dataset` takes, such as uoft-cs/cifar10; None reads `path`.
        path: a folder with a folder for each class, or with train and test folders that have a folder for each class.
        image_column, label_column: the columns with the images and their classes.
        size: the height and width in pixels; images of other sizes are resized.
        val_fraction: expected share of the training images for validation.
        test_split: the name of the test split; None if there is none.

    Raises:
        FileNotFoundError: `path` is not a folder.
        ValueError: not exactly one of `name` and `path` is given, `size` or `val_fraction` is out of its range, or, when the images are
            read, a column is missing.
    """

    kind = "images"

    def __init__(self, *, name: str | None, path: str | None, image_column: str, label_column: str, size: int, val_fraction: float,
                 test_split: str | None):
        if (name is None) == (path is None):
            raise ValueError("data.path, data.name: set one of them: a folder with a folder for each class, or a data set of the hub")
        if path is not None and not os.path.isdir(path):
            raise FileNotFoundError(f"data.path={path!r} must be a folder with a folder for each class")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"data.size={size!r} must be a whole number of pixels, at least 1")
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction} must lie between 0 and 1")
        self.options = {"name": name, "path": path and os.path.abspath(path), "image_column": image_column, "label_column": label_column,
                        "size": size, "val_fraction": val_fraction, "test_split": test_split}
        self.splits = SPLITS if test_split else SPLITS[:2]
        self.classes: list[str] | None = None

    def identity(self) -> dict:
        o = self.options
        files = {} if o["path"] is None else {"files": sorted(
            (os.path.relpath(os.path.join(folder, f), o["path"]), os.path.getsize(os.path.join(folder, f)))
            for folder, _, names in os.walk(o["path"]) for f in names)}
        return {"kind": self.kind, "format": 1, **o, **files}

    def record(self) -> dict:
        return {"kind": self.kind, **self.options}

    def _load(self, split: str):
        import datasets

        o = self.options
        if o["path"] is not None:
            return datasets.load_dataset("imagefolder", data_dir=o["path"], split=split)
        return datasets.load_dataset(o["name"], split=split)

    def documents(self) -> Iterator[dict]:
        o = self.options
        for split in ("train", *([o["test_split"]] if o["test_split"] else [])):
            loaded = self._load(split)
            for column in (o["image_column"], o["label_column"]):
                if column not in loaded.features:
                    raise ValueError(f"data: column {column!r} is not in the data set; it has {', '.join(loaded.features)}")
            names = getattr(loaded.features[o["label_column"]], "names", None)
            self.classes = names or self.classes
            for row, example in enumerate(loaded):
                label = example[o["label_column"]]
                gray = example[o["image_column"]].convert("L")
                if gray.size != (o["size"], o["size"]):
                    gray = gray.resize((o["size"], o["size"]))
                validation = split == "train" and stable_share(str(row)) < o["val_fraction"]
                kept = "validation" if validation else "train" if split == "train" else "test"
                yield _document(np.asarray(gray, np.uint8), kept, row, names[label] if names else str(label))


def pathfinder(
    *, n_train: int, n_validation: int, n_test: int, generator_seed: int, size: int, processes: int | None = None, **options
) -> ClassificationDataModule:
    """Pathfinder with Long Range Arena's settings for 32 x 32 or 128 x 128 (Path-X) pixels.

    Options of `attnzoo.data.synthetic.pathfinder.Settings` change the task; the others are those of ClassificationDataModule.
    """
    known = {32: pathfinder_task.LRA_32, 128: pathfinder_task.LRA_128}
    if size not in known:
        raise ValueError(f"data.size={size} must be one of {', '.join(map(str, known))}")
    changes = {key: options.pop(key) for key in list(options) if key in pathfinder_task.Settings.__dataclass_fields__}
    try:
        settings = replace(known[size], **changes)
    except ValueError as error:
        raise ValueError(f"data.{error}") from error
    source = PathfinderSource(n_train, n_validation, n_test, generator_seed, settings, processes)
    return ClassificationDataModule(source, tokenizer=pixel_tokenizer(), **options)


def images(
    *, name: str | None = None, path: str | None = None, image_column: str, label_column: str, size: int, val_fraction: float,
    test_split: str | None, **options
) -> ClassificationDataModule:
    """Gray images as sequences of pixels. Options are those of `ImageSource` and of ClassificationDataModule."""
    source = ImageSource(name=name, path=path, image_column=image_column, label_column=label_column, size=size, val_fraction=val_fraction,
                         test_split=test_split)
    return ClassificationDataModule(source, tokenizer=pixel_tokenizer(), **options)


pathfinder.options_of = (pathfinder_task.Settings, ClassificationDataModule)
images.options_of = (ClassificationDataModule,)
