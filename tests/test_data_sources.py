"""Sources: stable splits, honest records, clear errors."""

import json
import os
import sys
from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from attnzoo.data import sources
from attnzoo.data.sources import HubSource, python_packages, python_stdlib, stable_share, text_files


@pytest.fixture
def folder(tmp_path):
    """Thirty files in two levels."""
    for i in range(30):
        path = tmp_path / "texts" / str(i % 2) / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i}")
    return tmp_path / "texts"


def by_split(source):
    found = {"train": {}, "validation": {}}
    for document in source.documents():
        found[document["split"]][document["path"]] = document["text"]
    return found


def test_stable_share_is_the_same_everywhere():
    assert stable_share("json/decoder.py") == 0.11393991729957655
    shares = [stable_share(str(i)) for i in range(2000)]
    assert 0 <= min(shares) and max(shares) < 1
    assert max(Counter(int(10 * share) for share in shares).values()) < 300


def test_standard_library():
    source = python_stdlib(0.05)
    found = by_split(source)
    assert not found["train"].keys() & found["validation"].keys()
    assert found["train"].keys() | found["validation"].keys() == source.files.keys()
    assert {"os.py", "json/decoder.py"} <= source.files.keys()
    assert not [name for name in source.files if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/")[:-1])]
    n_bytes = {split: sum(len(text.encode()) for text in texts.values()) for split, texts in found.items()}
    assert n_bytes["train"] > 5e6
    assert 0.01 < n_bytes["validation"] / n_bytes["train"] < 0.1
    assert source.record()["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(by_split(python_stdlib(0.05))["train"]) == list(found["train"]) == sorted(found["train"])


def test_packages_are_found_but_not_imported():
    source = python_packages(["pydoc_data", "yaml"], 0.2)
    assert {"pydoc_data/topics.py", "yaml/__init__.py"} <= source.files.keys()
    assert "pydoc_data" not in sys.modules
    assert source.record()["versions"].keys() == {"pydoc_data", "yaml"}
    assert source.record()["versions"]["yaml"].startswith("PyYAML ")
    assert python_packages("yaml", 0.2).files.keys() < source.files.keys()


@pytest.mark.parametrize("package", ["no_such_package", "no.such", "sys", ""])
def test_missing_package_is_named(package):
    with pytest.raises(ValueError, match=f"data.packages: '{package}' must be an installed package"):
        python_packages([package], 0.1)


def test_files_are_split_by_name_wherever_they_lie(folder, tmp_path):
    before = by_split(text_files(str(folder), None, 0.2))
    assert len(before["train"]) + len(before["validation"]) == 30 and before["validation"]
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "new.txt").write_text("new")
    after = by_split(text_files([str(tmp_path / "moved")], None, 0.2))
    for split in before:
        assert before[split].items() <= after[split].items()


def test_files_folders_and_globs_name_each_file_once(folder):
    assert len(text_files(str(folder / "0" / "*.txt")).files) == 15
    assert len(text_files(str(folder / "**" / "*.txt")).files) == 30
    assert len(text_files([str(folder / "0"), str(folder / "0" / "2.txt"), str(folder / "1")]).files) == 30
    (folder / ".hidden").write_text("no")
    (folder / "[odd].txt").write_text("a file whose name looks like a glob")
    assert len(text_files([str(folder)]).files) == 31
    assert list(text_files(str(folder / "[odd].txt")).files) == ["[odd].txt"]


def test_files_of_the_same_name_in_two_folders_are_both_there(folder):
    (folder / "1" / "0.txt").write_text("another 0")
    source = text_files([str(folder / "0"), str(folder / "1")])
    assert len(source.files) == 31


def test_two_files_give_both_splits(folder):
    for pair in (["0/0.txt", "1/1.txt"], ["0/2.txt", "0/4.txt"]):
        found = by_split(text_files([str(folder / name) for name in pair], None, 0.01))
        assert len(found["train"]) == len(found["validation"]) == 1


def test_single_file_is_split_at_its_end(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789é" * 10)
    source = text_files(str(tmp_path / "one.txt"), None, 0.1)
    train, val = by_split(source).values()
    assert train["one.txt"] + val["one.txt"] == "0123456789é" * 10
    assert len(val["one.txt"]) == 11
    assert source.record()["split_by"] == "position"


def test_validation_files_of_their_own(folder):
    source = text_files(str(folder / "0"), str(folder / "1"))
    train, val = by_split(source).values()
    assert len(train) == len(val) == 15
    assert source.record()["split_by"] == "name"
    with pytest.raises(ValueError, match="data.val_paths: .*0.txt' is in data.paths too"):
        text_files(str(folder / "0"), str(folder / "0" / "0.txt"))


def test_decoding_errors_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes("fine \ufffd ".encode() + b"\xff broken \xe9t\xe9")
    (document, _) = text_files(str(tmp_path / "a.txt")).documents()
    assert document["n_replaced"] == 3
    assert document["text"].startswith("fine \ufffd \ufffd broken")


def test_identity_follows_content(folder):
    identity = json.dumps(text_files(str(folder)).identity())
    assert json.dumps(text_files(str(folder)).identity()) == identity
    os.utime(folder / "0" / "0.txt", ns=(1, 1))
    assert json.dumps(text_files(str(folder)).identity()) != identity
    assert json.dumps(text_files(str(folder), None, 0.2).identity()) != identity


@pytest.mark.parametrize(
    ("paths", "message"), [("none.txt", "'none.txt' does not exist"), ("*.none", "has no files"), ([], "at least one file")]
)
def test_paths_that_match_nothing(paths, message):
    with pytest.raises((FileNotFoundError, ValueError), match=f"data.paths.*{message}"):
        text_files(paths)


def test_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no files; it must match at least one"):
        text_files(str(tmp_path))


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_fraction_out_of_range(fraction, folder):
    with pytest.raises(ValueError, match=f"data.val_fraction={fraction} must lie between 0 and 1"):
        text_files(str(folder), None, fraction)


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    path = tmp_path / "rows.parquet"
    lines = [" = First = \n", "one\n", " = = part = = \n", "", " = Second = \n", None, "two\n"]
    pyarrow.parquet.write_table(pyarrow.table({"body": lines, "number": range(7)}), path)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet(parquet, streaming):
    source = HubSource("parquet", data_files=parquet, column="body", streaming=streaming, val_fraction=0.5)
    documents = list(source.documents())
    assert [d["text"] for d in documents] == [" = First = \n", "one\n", " = = part = = \n", "", " = Second = \n", "", "two\n"]
    assert [d["split"] == "validation" for d in documents] == [stable_share(str(i)) < 0.5 for i in range(7)]
    assert len(list(HubSource("parquet", data_files=parquet, column="body", streaming=streaming, max_documents=2).documents())) == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_lines_are_joined_to_documents(parquet, streaming):
    files = {"train": parquet, "test": parquet}
    options = {"data_files": files, "column": "body", "streaming": streaming, "document_start": "^ = [^=]"}
    found = by_split(HubSource("parquet", val_split="test", max_val_documents=1, **options))
    first = " = First = \none\n = = part = = \n"
    assert list(found["train"].values()) == [first, " = Second = \ntwo\n"]
    assert list(found["validation"].values()) == [first]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "text"}, "data.column='text' is not in 'parquet'; it must be one of body, number"),
        ({"column": "number"}, "data.column='number' holds int, it must hold text"),
        ({"split": "dev"}, "split 'dev'.* must be what datasets.load_dataset reads"),
        ({"data_files": "none.parquet"}, "data.name='parquet'.* must be what datasets.load_dataset reads"),
    ],
)
def test_wrong_hub_options(parquet, streaming, options, message):
    with pytest.raises(ValueError, match=message):
        list(HubSource("parquet", **{"data_files": parquet, "streaming": streaming, **options}).documents())


def test_hub_identity_sees_local_files_change(parquet):
    identity = HubSource("parquet", data_files=parquet).identity()
    assert json.loads(json.dumps(identity))["stats"]
    os.utime(parquet, ns=(1, 1))
    assert HubSource("parquet", data_files=parquet).identity() != identity
    assert "stats" in HubSource("someone/something").identity()


def test_hub_options_are_recorded():
    record = HubSource("c4", config="en", revision="abc").record()
    assert (record["name"], record["config"], record["revision"]) == ("c4", "en", "abc")
    assert sources.HubSource.__init__.__kwdefaults__.keys() < record.keys()


@pytest.mark.parametrize(("name", "says"), [
    ("a.jsonl", "a JSON record a line: take data=hf data.name=json"), ("a.txt.gz", "compressed: take data=hf data.name=text"),
    ("A.PARQUET", "a table: take data=hf data.name=parquet"),
])
def test_files_that_are_no_plain_text_are_refused(tmp_path, name, says):
    (tmp_path / name).write_text("{}")
    (tmp_path / "b.txt").write_text("b")
    for given in (tmp_path / name, tmp_path, tmp_path / "*"):
        with pytest.raises(ValueError, match=f"data.paths: .*{name}' must be plain text, it is {says}"):
            text_files(str(given))
    with pytest.raises(ValueError, match="data.val_paths: "):
        text_files(str(tmp_path / "b.txt"), str(tmp_path / name))
    assert len(text_files(str(tmp_path / "*.txt")).files) == 1
