"""Where documents come from: files, and Hugging Face data sets.

A source has three methods. `identity()` cheaply returns what the key of the token cache is made of. `documents()` yields every document
once, in a fixed order. `record()` describes the source in the run's record. A document is a dict with `text`, `path` (its name inside the
source), `split` ("train" or "validation") and `n_replaced`, the number of undecodable spots that became U+FFFD.
"""

import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

# suffixes of files that are not plain text, under the name of the reader that datasets.load_dataset has for them
NOT_PLAIN = {
    "json": ("a JSON record a line", {".jsonl", ".ndjson"}),
    "parquet": ("a table", {".parquet"}),
    "text": ("compressed", {".gz", ".bz2", ".xz", ".zst", ".zip"}),
}


def stable_share(name: str) -> float:
    """A number in [0, 1) that depends on `name` only. It is the same in every process, Python version and machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64


class FileSource:
    """Text files, one document each, split by file.

    A file is for validation if its name is in `val_names`. Without `val_names`, a hash of the name decides: it is compared with
    `val_fraction`, so that adding files does not move other files to another split. There is one exception: if a split would have no file,
    it gets the file with the nearest hash. A single file without `val_names` gives two documents: the last `val_fraction` of its characters
    is the validation document, and the rest is the training document.

    Args:
        kind: the source's name in the record and in the cache.
        files: the path of each file by its name. Names are relative, so that the split does not depend on where the files lie.
        val_fraction: expected share of the files, or share of the single file's characters, for validation.
        val_names: the names of the validation files; if there are any, `val_fraction` is not used.
        about: further plain facts for the record, such as versions.

    Raises:
        ValueError: `val_fraction` is not between 0 and 1.
    """

    def __init__(self, kind: str, files: dict[str, Path], val_fraction: float, *, val_names: Iterable[str] = (), about: dict | None = None):
        check_fraction(val_fraction)
        self.kind, self.files, self.val_fraction, self.about = kind, dict(sorted(files.items())), val_fraction, about or {}
        self.val_names = set(val_names)
        self.by_position = len(self.files) == 1 and not self.val_names

    def record(self) -> dict:
        by = "name" if self.val_names else "position" if self.by_position else "file"
        return {"kind": self.kind, **self.about, "files": len(self.files), "split_by": by, "val_fraction": self.val_fraction}

    def identity(self) -> dict:
        return {**self.record(), "validation": sorted(self.val_names), "stats": file_stats(self.files)}

    def documents(self) -> Iterator[dict]:
        for name in self.files:
            yield from map(_read, self._parts(name))

    def _parts(self, name: str) -> list[tuple]:
        """A tuple (name, path, split, begin, end) for each document of a file; begin and end are shares of the file's characters."""
        path = self.files[name]
        if self.by_position:
            cut = 1 - self.val_fraction
            return [(name, path, "train", 0.0, cut), (name, path, "validation", cut, 1.0)]
        return [(name, path, "validation" if name in self._validation else "train", 0.0, 1.0)]

    @cached_property
    def _validation(self) -> set[str]:
        if self.val_names:
            return self.val_names
        names = sorted(self.files, key=stable_share)
        n_below = sum(stable_share(name) < self.val_fraction for name in names)
        return set(names[: min(max(n_below, 1), len(names) - 1)])  # each split has at least one file


def _read(part: tuple[str, Path, str, float, float]) -> dict:
    name, path, split, begin, end = part
    data = path.read_bytes()
    text = data.decode(errors="replace")
    n_replaced = text.count("\ufffd") - data.count("\ufffd".encode())
    text = text[int(begin * len(text)) : int(end * len(text))]
    return {"text": text, "path": name, "split": split, "n_replaced": n_replaced if begin == 0 else 0}


def python_stdlib(val_fraction: float = 0.05) -> FileSource:
    """The standard library of the running Python: every .py file outside its test folders and the folders of installed packages.

    Raises:
        FileNotFoundError: the library's folder has no .py files.
        ValueError: `val_fraction` is not between 0 and 1.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = _python_files(root, {"test", "tests", "idle_test", "site-packages", "dist-packages"})
    if not files:
        raise FileNotFoundError(f"data=python_stdlib: {root} must hold the library's .py files, it has none; take data=text")
    return FileSource("python_stdlib", files, val_fraction, about={"python": platform.python_version()})


def python_packages(packages: str | list[str], val_fraction: float = 0.05) -> FileSource:
    """The .py files of installed packages, which are found without importing the packages.

    Raises:
        ValueError: no package is named, a package is not installed or has no sources, or `val_fraction` is not between 0 and 1.
    """
    files, versions = {}, {}
    for package in [packages] if isinstance(packages, str) else packages:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        roots = map(Path, (spec and spec.submodule_search_locations) or ())
        found = {f"{package}/{name}": path for root in roots for name, path in _python_files(root).items()}
        if not found:
            raise ValueError(f"data.packages: {package!r} must be an installed package with Python sources; install it or take another")
        files |= found
        versions[package] = _version(package)
    if not files:
        raise ValueError("data.packages is empty, it must name at least one installed package")
    return FileSource("python_packages", files, val_fraction, about={"python": platform.python_version(), "versions": versions})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name than the package, or there is no distribution
        names = importlib.metadata.packages_distributions().get(package, [])
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or "unknown"


def text_files(paths: str | list[str], val_paths: str | list[str] | None = None, val_fraction: float = 0.1) -> FileSource:
    """A source of text files, given as files, folders (all files below them that are not hidden) and globs.

    Args:
        paths: one path or several.
        val_paths: the validation files; None splits `paths`.
        val_fraction: see FileSource.

    Raises:
        FileNotFoundError: a path does not exist, or a folder or glob has no file.
        ValueError: a file is in both lists, a file is not plain text by its suffix, `paths` is empty, or `val_fraction` is not between 0
            and 1.
    """
    train, val = text_paths("data.paths", paths), text_paths("data.val_paths", val_paths)
    for key, files in (("data.paths", train), ("data.val_paths", val)):
        _check_plain(key, files)
    if not train:
        raise ValueError(f"data.paths={paths!r} must name at least one file, folder or glob")
    if both := sorted(set(train.values()) & set(val.values())):
        raise ValueError(f"data.val_paths: {str(both[0])!r} is in data.paths too; a file must be in one split only")
    val = {f"validation/{name}": path for name, path in val.items()}
    return FileSource("text", train | val, val_fraction, val_names=val)


def _check_plain(key: str, files: dict[str, Path]) -> None:
    """Raises ValueError for files whose suffix says that they are not plain text."""
    for path in files.values():
        for reader, (kind, suffixes) in NOT_PLAIN.items():
            if path.suffix.lower() in suffixes:
                raise ValueError(f"{key}: {str(path)!r} must be plain text, it is {kind}: take data=hf data.name={reader} "
                                 f"'data.data_files=...', or name the other files by a glob")


def _python_files(root: Path, without: set[str] = frozenset()) -> dict[str, Path]:
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - without
        files |= {path.relative_to(root).as_posix(): path for name in names if (path := Path(folder, name)).suffix == ".py"}
    return files


def text_paths(key: str, paths: str | list[str] | None) -> dict[str, Path]:
    """The files that paths stand for, by name. A path is a file, a folder (all files below it that are not hidden) or a glob.

    A file's name is its path relative to the given folder, to the glob's fixed part, or to its own folder. If another file has this name,
    the absolute path is the name instead. A file that several paths stand for is listed once. Errors name `key`.

    Raises:
        FileNotFoundError: a path does not exist, or a folder or glob has no files.
    """
    files, seen = {}, set()
    for given in [paths] if isinstance(paths, str) else paths or ():
        path = Path(given).expanduser()
        if path.is_file():
            root, found = path.parent, [path]
        elif path.is_dir():
            root, found = path, [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        elif glob.has_magic(given):
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
            root, found = Path(*fixed), [Path(p) for p in glob.glob(str(path), recursive=True)]
        else:
            raise FileNotFoundError(f"{key}: {given!r} does not exist; it must be a file, a folder or a glob (relative to {Path.cwd()})")
        found = sorted(p for p in found if p.is_file())
        if not found:
            raise FileNotFoundError(f"{key}: {given!r} has no files; it must match at least one")
        for p in found:
            if (real := p.resolve()) not in seen:
                seen.add(real)
                name = p.relative_to(root).as_posix()
                files[name if name not in files else str(real)] = real
    return files


class HubSource:
    """Any data set that `datasets.load_dataset` reads, from the hub or from local files (name "parquet", "json", ... with `data_files`).

    Args:
        name, config, revision, data_files, streaming: arguments of `load_dataset`; `name` is its `path`, and `config` is its `name`.
        column: the column with the text.
        split, val_split: split expressions; without `val_split` a hash of each document's number decides whether it is for validation.
        val_fraction: expected share of the documents for validation if there is no `val_split`.
        max_documents, max_val_documents: how many documents of `split` and `val_split` are read; None reads all.
        document_start: a regular expression for data sets that store lines: a document begins at each row that it matches.
    """

    def __init__(
        self,
        name: str,
        *,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        column: str = "text",
        val_fraction: float = 0.01,
        data_files: str | list | dict | None = None,
        revision: str | None = None,
        streaming: bool = False,
        max_documents: int | None = None,
        max_val_documents: int | None = None,
        document_start: str | None = None,
    ):
        self.options = {key: value for key, value in locals().items() if key != "self"}
        self.kind = "hf"
        check_fraction(val_fraction)

    def record(self) -> dict:
        return {"kind": self.kind, **self.options}

    def identity(self) -> dict:
        given = self.options["data_files"] or f"{self.options['name']}/**"
        patterns = [p for v in (given.values() if isinstance(given, dict) else [given]) for p in ([v] if isinstance(v, str) else v)]
        local = sorted({Path(p) for pattern in patterns for p in glob.glob(str(Path(pattern).expanduser()), recursive=True)})
        return {**self.record(), "stats": file_stats({str(path): path for path in local if path.is_file()})}

    def documents(self) -> Iterator[dict]:
        o = self.options
        train = enumerate(itertools.islice(self._texts(o["split"]), o["max_documents"]))
        if o["val_split"] is None:
            yield from (document_of(o["split"], i, text, stable_share(str(i)) < o["val_fraction"]) for i, text in train)
        else:
            yield from (document_of(o["split"], i, text, False) for i, text in train)
            val = enumerate(itertools.islice(self._texts(o["val_split"]), o["max_val_documents"]))
            yield from (document_of(o["val_split"], i, text, True) for i, text in val)

    def _texts(self, split: str) -> Iterator[str]:
        column, start = self.options["column"], self.options["document_start"]
        loaded = self._load(split)
        if column in (loaded.column_names or ()):  # streams with unknown features have no column names yet
            loaded = loaded.select_columns(column)
        rows = (text for batch in loaded.iter(batch_size=256) for text in self._column(batch))
        if start is None:
            yield from rows
            return
        begins, lines = re.compile(start), []
        for text in rows:
            if lines and begins.search(text):
                yield "".join(lines)
                lines = []
            lines.append(text)
        yield "".join(lines)

    def _load(self, split: str):
        import datasets

        o = self.options
        try:
            return datasets.load_dataset(
                o["name"], o["config"], split=split, data_files=o["data_files"], revision=o["revision"], streaming=o["streaming"]
            )
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"data.name={o['name']!r} (data.config={o['config']!r}, split {split!r}) must be what datasets.load_dataset reads: {reason}"
            ) from error

    def _column(self, batch: dict) -> list[str]:
        column = self.options["column"]
        if column not in batch:
            raise ValueError(f"data.column={column!r} is not in {self.options['name']!r}; it must be one of {', '.join(batch)}")
        texts = [text or "" for text in batch[column]]
        if other := next((text for text in texts if not isinstance(text, str)), None):
            raise ValueError(f"data.column={column!r} holds {type(other).__name__}, it must hold text")
        return texts


def document_of(split: str, number: int, text: str, validation: bool) -> dict:
    """The document of a numbered row."""
    return {"text": text, "path": f"{split}/{number}", "split": "validation" if validation else "train", "n_replaced": 0}


def file_stats(files: dict[str, Path]) -> list[tuple]:
    """Name, path, size in bytes and modification time in nanoseconds of each file: they show that a file has changed."""
    stats = ((name, str(path), path.stat()) for name, path in files.items())
    return [(name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in stats]


def check_fraction(val_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise ValueError(f"data.val_fraction={val_fraction} must lie between 0 and 1")
