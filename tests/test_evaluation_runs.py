"""Which runs a path names."""

from pathlib import Path

import pytest

from attnzoo.errors import UserError
from attnzoo.evaluation.runs import find


def make_run(folder: Path, *checkpoints: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("data: {seq_len: 8}")
    for name in checkpoints:
        (folder / "checkpoints" / name).touch()
    return folder


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "sweep"
    for name in ("2_sdpa", "10_flash", "0_flash"):
        make_run(folder / name, "best.ckpt", "last.ckpt")
    return folder


def test_one_checkpoint_or_its_folder(sweep):
    path = sweep / "0_flash" / "checkpoints" / "last.ckpt"
    (by_file,) = find(str(path), None)
    assert (by_file.name, by_file.folder, by_file.checkpoint) == ("0_flash", sweep / "0_flash", path)
    assert find(str(sweep / "0_flash"), None, prefer="last") == [by_file]
    assert by_file.config()["data"]["seq_len"] == 8


def test_a_sweep_in_natural_order(sweep):
    runs = find(None, str(sweep))
    assert [run.name for run in runs] == ["0_flash", "2_sdpa", "10_flash"]
    assert {run.checkpoint.name for run in runs} == {"best.ckpt"}
    assert {run.checkpoint.name for run in find(None, str(sweep), prefer="last")} == {"last.ckpt"}


def test_runs_of_several_folders_keep_unlike_names(sweep, tmp_path):
    make_run(tmp_path / "other" / "0_flash", "last.ckpt")
    assert [run.name for run in find(None, [str(sweep / "0_flash"), str(tmp_path / "other")])] == ["sweep/0_flash", "other/0_flash"]


def test_two_checkpoints_of_one_run(sweep):
    paths = [str(sweep / "0_flash" / "checkpoints" / name) for name in ("best.ckpt", "last.ckpt")]
    assert [run.name for run in find(None, paths)] == ["0_flash/best", "0_flash/last"]
    assert len(find(None, [paths[0], paths[0]])) == 1


def test_what_a_run_keeps_inside_is_no_run(sweep):
    inside = sweep / "0_flash" / "wandb" / "run-1" / "files"
    inside.mkdir(parents=True)
    (inside / "config.yaml").touch()
    hydra = sweep / ".hydra"
    hydra.mkdir()
    (hydra / "config.yaml").touch()
    assert len(find(None, str(sweep))) == 3


def test_a_run_without_checkpoint_is_found_without(sweep):
    make_run(sweep / "3_failed")
    assert [run.checkpoint for run in find(None, str(sweep)) if run.name == "3_failed"] == [None]


def test_a_checkpoint_out_of_its_folder_has_no_config(tmp_path):
    (tmp_path / "lone.ckpt").touch()
    (run,) = find(str(tmp_path / "lone.ckpt"), None)
    assert run.config() is None


@pytest.mark.parametrize("content", ["data: [", "a: 1", "data: {}", "just words", ""])
def test_a_damaged_config_is_named(sweep, content):
    (sweep / "0_flash" / "config.yaml").write_text(content)
    (run,) = find(str(sweep / "0_flash"), None)
    with pytest.raises(UserError, match="config.yaml"):
        run.config()


@pytest.mark.parametrize(
    "ckpt_path, runs, prefer, message",
    [
        (None, None, "best", "say what to evaluate"),
        ("a", "b", "best", "say what to evaluate"),
        ("missing.ckpt", None, "best", "missing.ckpt does not exist"),
        (None, [], "best", "runs=\\[\\]"),
        (None, ".", "best", "holds no run"),
        (None, ".", "newest", "checkpoint='newest'"),
    ],
)
def test_wrong_paths_are_named(tmp_path, monkeypatch, ckpt_path, runs, prefer, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find(ckpt_path, runs, prefer)
