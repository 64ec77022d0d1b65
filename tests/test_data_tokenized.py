"""The token cache: reused, whole or absent, safe for several processes."""

import json
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest

from attnzoo.data.sources import text_files
from attnzoo.data.tokenized import TokenStore, prepare
from attnzoo.data.tokenizers import ByteTokenizer

TEXTS = {"a.txt": "first é", "b.txt": "", "c.txt": "the third"}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "val.txt").write_bytes(b"valid\xff")
    return text_files(str(tmp_path / "texts"), str(tmp_path / "val.txt"))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_documents_come_back(source, cache):
    store = TokenStore(prepare(source, ByteTokenizer(), cache), "train")
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    assert documents == [[*text.encode(), 256] for text in TEXTS.values() if text]
    assert store.tokens.dtype == np.uint16
    assert store.n_bytes.tolist() == [8, 9]
    dataset = store.dataset()
    assert [ids.tolist() for ids in dataset["input_ids"]] == documents
    assert dataset[1]["n_bytes"] == 9 and dataset[1]["input_ids"].dtype == np.int64


def test_record_counts_what_was_read(source, cache, caplog):
    record = json.loads((prepare(source, ByteTokenizer(), cache) / "record.json").read_text())
    train, val = record["splits"]["train"], record["splits"]["validation"]
    assert (train["documents"], train["empty_documents"], train["bytes"], train["tokens"]) == (2, 1, 17, 19)
    assert (val["documents"], val["decoding_errors_replaced"]) == (1, 1)
    assert "1 spots are not UTF-8" in caplog.text
    assert record["source"]["kind"] == "text" and len(record["sha256"]) == 64


def test_tokens_are_written_once(source, cache, monkeypatch):
    folder = prepare(source, ByteTokenizer(), cache)
    monkeypatch.setattr(type(source), "documents", lambda self: pytest.fail("read again"))
    assert prepare(source, ByteTokenizer(), cache) == folder


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=f"data.cache_dir='{folder}': cannot be written: (File exists|Not a directory); set another"):
            prepare(source, ByteTokenizer(), folder)


def test_the_bar_counts_reading_and_not_the_loading_of_the_library(source, cache, tmp_path):
    code = f"""
import sys
from attnzoo.data import sources, tokenized, tokenizers
read = sources.FileSource.documents
sources.FileSource.documents = lambda self: print("datasets" in sys.modules) or read(self)
tokenized.prepare(sources.text_files({str(tmp_path / "val.txt")!r}), tokenizers.ByteTokenizer(), {str(cache)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_changed_text_or_tokenizer_is_tokenised_again(source, cache, tmp_path):
    class OtherTokenizer(ByteTokenizer):
        def record(self):
            return {"kind": "other"}

    folders = {prepare(source, ByteTokenizer(), cache), prepare(source, OtherTokenizer(), cache)}
    (tmp_path / "texts" / "a.txt").write_text("changed")
    folders.add(prepare(source, ByteTokenizer(), cache))
    assert len(folders) == 3
    assert len({json.loads((folder / "record.json").read_text())["sha256"] for folder in folders}) == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_writing_leaves_nothing(source, cache, monkeypatch, error):
    class Broken(ByteTokenizer):
        def encode_batch(self, texts):
            raise error

    with pytest.raises(type(error)):
        prepare(source, Broken(), cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert len(TokenStore(prepare(source, ByteTokenizer(), cache), "train").tokens) == 19


def test_remains_of_a_killed_process_are_not_taken_for_whole(source, cache):
    folder = prepare(source, ByteTokenizer(), cache)
    folder.rename(folder.with_suffix(".partial"))
    (folder.with_suffix(".partial") / "train.tokens.bin").write_bytes(b"")
    assert len(TokenStore(prepare(source, ByteTokenizer(), cache), "train").tokens) == 19
    assert not folder.with_suffix(".partial").exists()


def _prepare_in_process(source, cache, barrier, results):
    barrier.wait()
    folder = prepare(source, ByteTokenizer(), cache)
    results.put((folder.name, TokenStore(folder, "train").tokens.tolist()))


def test_processes_at_once_share_one_cache(source, cache):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_prepare_in_process, args=(source, cache, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    (first, *others) = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert others == [first, first]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_empty_split_is_an_error(source, cache, tmp_path):
    (tmp_path / "val.txt").write_text("")
    with pytest.raises(ValueError, match="data=text has no text for validation; it must hold text in both splits"):
        prepare(source, ByteTokenizer(), cache)
    for name in TEXTS:
        (tmp_path / "texts" / name).write_text("")
    with pytest.raises(ValueError, match="data=text has no text for train and validation"):
        prepare(source, ByteTokenizer(), cache)


def test_store_is_pickled_by_name(source, cache):
    store = TokenStore(prepare(source, ByteTokenizer(), cache), "train")
    assert len(pickle.dumps(store)) < 1000
    assert pickle.loads(pickle.dumps(store)).tokens.tolist() == store.tokens.tolist()
