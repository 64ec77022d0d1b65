"""The tokenised form of a source on disk: written once, read through memory maps by every later run.

A folder `<cache_dir>/<kind>-<key>` holds, for each split, `<split>.tokens.bin` (all documents one after the other, each ended by the
end of text), `<split>.offsets.npy` (int64, documents + 1) and `<split>.bytes.npy` (int64, UTF-8 bytes of each document), and
`record.json`; for labelled documents also `<split>.labels.npy` (int64, documents) and the classes' names in the record. The key is a hash
of the format's version, the source and the tokenizer. The folder gets its name only when it is complete, so that an interrupted write is
never read.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnzoo.data.tokenizers import fingerprint

log = logging.getLogger(__name__)

FORMAT = 1
SPLITS = ("train", "validation")


class TokenStore:
    """The token documents of one split.

    Attributes:
        tokens: uint16 or uint32 `(n_tokens,)`, memory-mapped.
        offsets: int64 `(n_documents + 1,)`; document i is `tokens[offsets[i] : offsets[i + 1]]`, its last token the end of text.
        n_bytes: int64 `(n_documents,)`, the UTF-8 bytes of each document's text.
        labels: int64 `(n_documents,)`, the number of each document's class; None if the documents have no labels.
    """

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = Path(folder), split
        dtype = json.loads((self.folder / "record.json").read_text())["dtype"]
        self.tokens = np.memmap(self.folder / f"{split}.tokens.bin", dtype, mode="r")
        self.offsets = np.load(self.folder / f"{split}.offsets.npy")
        self.n_bytes = np.load(self.folder / f"{split}.bytes.npy")
        labels = self.folder / f"{split}.labels.npy"
        self.labels = np.load(labels) if labels.exists() else None

    def __reduce__(self):  # a pickled memory map would send all its tokens to each worker
        return TokenStore, (self.folder, self.split)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def dataset(self):
        """A `datasets.Dataset` over the same memory: each document's `input_ids` (ended by the end of text) and `n_bytes`, numpy int64."""
        import datasets
        import pyarrow

        documents = pyarrow.LargeListArray.from_arrays(pyarrow.array(self.offsets), pyarrow.array(self.tokens))
        table = pyarrow.table({"input_ids": documents, "n_bytes": pyarrow.array(self.n_bytes)})
        return datasets.Dataset(datasets.table.InMemoryTable(table)).with_format("numpy")


def prepare(source, tokenizer, cache_dir: str | Path) -> Path:
    """The folder with the tokens of `source`, which are made if they are not in the cache. Several processes may call this at once.

    If it raises, the cache does not keep an incomplete folder.

    Raises:
        ValueError: a split has no text, labelled texts have a single class, a class has no text in the training split, or what the source
            raises.
        OSError: a source file cannot be read, or the cache cannot be written.
    """
    identity = json.dumps([FORMAT, source.identity(), fingerprint(tokenizer)], sort_keys=True)
    cache_dir = Path(cache_dir)
    folder = cache_dir / f"{source.kind}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / "record.json").exists():
        return folder
    from filelock import FileLock

    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock").acquire()
    except OSError as error:
        raise OSError(f"data.cache_dir={str(cache_dir)!r}: cannot be written: {error.strerror}; set another one") from error
    with lock:
        if not (folder / "record.json").exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                _write(source, tokenizer, partial)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return folder


def _write(source, tokenizer, folder: Path) -> None:
    import datasets  # noqa: F401  # takes seconds, which the progress bar must not count
    from tqdm.auto import tqdm

    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    names = getattr(source, "splits", SPLITS)
    writers = {split: _SplitWriter(folder, split, dtype, tokenizer.eos_id) for split in names}
    documents = tqdm(source.documents(), desc=f"tokenising {source.kind}", unit=" documents", delay=2)
    for batch in _batched(documents):
        encoded = [d["ids"] for d in batch] if "ids" in batch[0] else tokenizer.encode_batch([d["text"] for d in batch])
        for document, ids in zip(batch, encoded, strict=True):
            writers[document["split"]].add(document, ids)
    classes = _save_labels(source, folder, {split: writer.labels for split, writer in writers.items() if writer.labels})
    splits = {split: writer.close() for split, writer in writers.items()}
    if empty := [split for split in names if splits[split]["documents"] == 0]:
        raise ValueError(f"data={source.kind} has no text for {' and '.join(empty)}; it must hold text in both splits (data.val_fraction)")
    if n_replaced := sum(splits[split]["decoding_errors_replaced"] for split in names):
        log.warning("data=%s: %d spots are not UTF-8 and became U+FFFD", source.kind, n_replaced)
    digest = hashlib.sha256("".join(splits[split]["sha256"] for split in names).encode()).hexdigest()
    record = {"source": source.record(), "sha256": digest, "splits": splits, "dtype": dtype.name}
    if classes:
        record["classes"] = classes
    (folder / "record.json").write_text(json.dumps(record, indent=1))


def _save_labels(source, folder: Path, labels: dict[str, list[str]]) -> list[str]:
    """Writes the class numbers of each split's documents. Returns the names of the classes, [] without labels.

    The order is the source's `classes`. Without these, whole numbers come first, sorted by value, and then the other names, sorted.
    """
    found = {label for of_split in labels.values() for label in of_split}
    classes = list(getattr(source, "classes", None) or sorted(found, key=lambda name: (0, int(name)) if name.isdecimal() else (1, name)))
    if labels and len(classes) < 2:
        raise ValueError(f"data={source.kind} has the single class {classes[0]!r}, it must have at least two")
    if unseen := sorted(found - set(labels.get("train", ()))):
        raise ValueError(f"data={source.kind}: class {unseen[0]!r} has no text in the train split; give it some or set data.val_fraction")
    number = {name: i for i, name in enumerate(classes)}
    for split, of_split in labels.items():
        np.save(folder / f"{split}.labels.npy", np.array([number[label] for label in of_split], np.int64))
    return classes if labels else []


def _batched(documents, max_characters: int = 2**22) -> Iterator[list[dict]]:
    """Lists of documents, large enough to keep a tokenizer's threads busy, and bounded in memory."""
    batch, n = [], 0
    for document in documents:
        batch.append(document)
        n += len(document["text"])
        if n > max_characters or len(batch) == 1024:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch


class _SplitWriter:
    def __init__(self, folder: Path, split: str, dtype: np.dtype, eos_id: int):
        self.folder, self.split = folder, split
        self.eos = np.array([eos_id], dtype)
        self.file = open(folder / f"{split}.tokens.bin", "wb")
        self.lengths, self.n_bytes, self.labels = [], [], []
        self.n_replaced = self.n_empty = 0
        self.sha256 = hashlib.sha256()

    def add(self, document: dict, ids: np.ndarray) -> None:
        text = document["text"].encode()
        self.sha256.update(f"{document['path']}\0{document.get('label', '')}{len(text)}\0".encode() + text)
        self.n_replaced += document["n_replaced"]
        if len(ids) == 0:
            self.n_empty += 1
            return
        self.file.write(np.append(ids.astype(self.eos.dtype), self.eos).tobytes())
        self.lengths.append(len(ids) + 1)
        self.n_bytes.append(len(text))
        if "label" in document:
            self.labels.append(document["label"])

    def close(self) -> dict:
        with self.file as file:
            file.flush()
            os.fsync(file.fileno())
        np.save(self.folder / f"{self.split}.offsets.npy", np.array([0, *itertools.accumulate(self.lengths)], np.int64))
        np.save(self.folder / f"{self.split}.bytes.npy", np.array(self.n_bytes, np.int64))
        return {
            "documents": len(self.lengths),
            "empty_documents": self.n_empty,
            "bytes": sum(self.n_bytes),
            "tokens": sum(self.lengths),
            "decoding_errors_replaced": self.n_replaced,
            "sha256": self.sha256.hexdigest(),
        }
