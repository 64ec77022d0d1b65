"""A run's folder: claimed by one process, opened again only by a resume, its files whole or as they were."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from tiny_run import ROOT, TINY, compose_tiny

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.run.claiming import ClaimRunFolder
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder, new_folder


def test_no_two_are_given_the_same_new_folder(tmp_path):
    given = [new_folder(tmp_path / "outputs" / "now") for _ in range(3)]
    assert [folder.name for folder in given] == ["now", "now_2", "now_3"] and all(folder.is_dir() for folder in given)


def hold(folder: Path) -> subprocess.Popen:
    """Another process that holds the folder until its standard input is closed."""
    code = f"from pathlib import Path\nfrom attnzoo.run.folder import RunFolder\nRunFolder(Path({str(folder)!r})).claim(again=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "print('held', flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_in_which_another_process_is_at_work_is_refused_and_free_after_its_death(tmp_path):
    folder = RunFolder(tmp_path / "run")
    other = hold(folder.path)
    try:
        for again in (False, True):
            with pytest.raises(UserError, match="another run is at work in .*run"):
                folder.claim(again=again)
    finally:
        other.kill()
        other.communicate()
    folder.claim(again=False)
    folder.release()
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("left", ["record.json", "config.yaml", "checkpoints"])
def test_a_run_is_opened_again_by_a_resume_only(tmp_path, left):
    (tmp_path / left).mkdir()
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="holds a run already; add resume=auto"):
        folder.claim(again=False)
    folder.claim(again=True)
    folder.release()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/run"])
def test_a_folder_that_cannot_be_is_one_line(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: .*; set another hydra.run.dir") as error:
        RunFolder(tmp_path / place).claim(again=False)
    assert "\n" not in str(error.value)


@pytest.fixture(autouse=True)
def no_hydra_before(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


def start(*overrides: str, command: str = "train"):
    """The configuration after Hydra told the callback that a run or sweep starts."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3", job_name=command):
        config = compose(command, overrides=list(overrides), return_hydra_config=True)
    mode = "multirun" if "hydra.mode=MULTIRUN" in overrides else "run"
    getattr(ClaimRunFolder(), f"on_{mode}_start")(config=config)
    return config


STAMPED = "${now:%Y}_${hydra:runtime.choices.model}"


def test_two_starts_in_one_second_get_folders_of_their_own(tmp_path):
    stamped = f"hydra.run.dir={tmp_path}/{STAMPED}"
    first, second = (Path(start(stamped).hydra.run.dir) for _ in range(2))
    try:
        assert (first.parent, second.name) == (tmp_path, f"{first.name}_2") and first.is_dir() and second.is_dir()
    finally:
        for folder in (first, second):
            RunFolder(folder).release()


def test_two_sweeps_in_one_second_get_folders_of_their_own(tmp_path):
    stamped = f"hydra.sweep.dir={tmp_path}/{STAMPED}"
    sweeps = [start(stamped, "hydra.mode=MULTIRUN") for _ in range(2)]
    assert [Path(config.hydra.sweep.dir).name for config in sweeps][1].endswith("_2")
    for config in sweeps:  # which each job's configuration is composed from
        assert config.hydra.overrides.hydra[-1] == f"hydra.sweep.dir='{config.hydra.sweep.dir}'"


def test_a_named_folder_with_a_run_is_refused_before_hydra_touches_it(tmp_path, capsys):
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(SystemExit) as left:
        start(f"hydra.run.dir={tmp_path}")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert left.value.code == 1 and "holds a run already" in line
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("mode", ["RUN", "MULTIRUN"])
def test_resume_auto_needs_a_folder_that_stays_the_same(tmp_path, monkeypatch, capsys, mode):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        start("resume=auto", f"hydra.mode={mode}")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "resume=auto needs a run folder that stays the same" in line and not list(tmp_path.iterdir())


def test_a_command_without_a_run_claims_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start("ckpt_path=x.ckpt", command="generate")
    assert not list(tmp_path.iterdir())


def test_other_ranks_claim_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config = start(f"hydra.run.dir={tmp_path}/{STAMPED}")
    assert not list(tmp_path.iterdir()) and config.hydra.output_subdir is None and config.hydra.job.name == "train_rank_1"
    (tmp_path / "record.json").touch()
    assert start(f"hydra.run.dir={tmp_path}").hydra.run.dir == str(tmp_path)


@pytest.mark.slow
def test_two_commands_at_once_are_two_runs(tmp_path):
    compose_tiny(tmp_path)  # writes the corpus
    command = [
        *("train.py", *TINY, "trainer.max_steps=2", "callbacks.plot=null", f"data.paths=[{tmp_path / 'corpus'}]"),
        *(f"data.cache_dir={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path}/runs/{STAMPED}"),
    ]
    runs = [Command(*command, f"seed={seed}") for seed in (1, 2)]
    assert [run.wait().returncode for run in runs] == [0, 0]
    folders = [RunFolder(path) for path in (tmp_path / "runs").iterdir()]
    assert len(folders) == 2 and all(folder.best.is_file() for folder in folders)
    assert sorted(line for folder in folders for line in folder.config.read_text().splitlines() if line.startswith("seed")) == [
        "seed: 1",
        "seed: 2",
    ]


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=2"))
    folder = RunFolder(tmp_path / "run")
    before = folder.best.read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        runner.train(compose_tiny(tmp_path, "trainer.max_steps=2", "seed=1"))
    assert folder.best.read_bytes() == before


@pytest.mark.parametrize("content", ["", '{"wandb": "a', "[]", "\x00" * 9])
def test_a_damaged_record_is_an_empty_one(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.record.write_text(content)
    assert folder.read_record() == {}


def test_files_are_whole_or_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "new" / "record.json"
    write_whole(path, json.dumps({"Zürich": 1}, ensure_ascii=False))

    def fails(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="could not save .*record.json: No space left on device; the earlier file is unchanged"):
        write_whole(path, fails)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "{}")
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    assert json.loads(path.read_bytes().decode("utf-8")) == {"Zürich": 1}
