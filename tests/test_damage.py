"""What goes wrong in a run, or happens to its files: told in a line, and never taken for a result."""

import io
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from test_stopping import RUN, assert_equal, send
from tiny_run import column, compose_tiny

from attnzoo import checkpoint, runner
from attnzoo.data.loader import ResumableLoader
from attnzoo.errors import UserError
from attnzoo.models.transformer import Transformer
from attnzoo.run.command_line import one_line_errors
from attnzoo.run.folder import RunFolder
from attnzoo.training import report
from attnzoo.training.loggers import MetricsCSV, SafeWandbLogger, read_metrics


def config(folder: Path, *overrides: str):
    return compose_tiny(folder, *RUN, *overrides)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after step 8, and the folder of one that was not."""
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("stopped")
    runner.train(config(whole))
    with pytest.raises(SystemExit):
        runner.train(config(folder, send("on_train_batch_start", 7, 1, "SIGTERM")))
    return folder, whole


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of the stopped run, to be damaged."""
    import shutil

    for part in ("run", "corpus", "cache"):
        shutil.copytree(stopped[0] / part, tmp_path / part)
    return RunFolder(tmp_path / "run")


def refusal(folder: Path, capsys, *overrides: str) -> str:
    """The line in which train.py refuses to go on."""
    with pytest.raises(SystemExit) as left, one_line_errors():
        runner.train(config(folder, "resume=auto", *overrides))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert left.value.code == 1
    return line


class Poison(lightning.Callback):
    """From step 6 on a weight is NaN."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == 6:
            with torch.no_grad():
                next(pl_module.parameters())[0] = math.nan


@pytest.mark.parametrize("every", [1, 1000])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, every):
    poison = "+callbacks.poison={_target_: test_damage.Poison}"
    with pytest.raises(UserError, match=r"^(train|val)/loss is nan at step \d+, so training ends here: .*last.ckpt holds an earlier step"):
        runner.train(config(tmp_path, poison, f"trainer.log_every_n_steps={every}"))
    folder = RunFolder(tmp_path / "run")
    assert "loss is nan" in folder.read_record()["status"]
    for path in (folder.best, folder.last):
        content = torch.load(path, weights_only=True)
        assert content["global_step"] <= 6 and all(value.isfinite().all() for value in content["state_dict"].values())


def test_a_flipped_bit_is_noticed(copy):
    content = torch.load(copy.last, weights_only=True)
    weight = content["state_dict"]["model.token_embedding.weight"].numpy().tobytes()[:64]
    whole = bytearray(copy.last.read_bytes())
    whole[whole.index(weight) + 3] ^= 0x40
    copy.last.write_bytes(whole)
    with pytest.raises(UserError, match="last.ckpt is damaged or no checkpoint .*checksum of .* is not that of its bytes"):
        checkpoint.read(copy.last)


@pytest.mark.parametrize("key", ["optimizer_states", "lr_schedulers", "loops"])
def test_a_checkpoint_without_what_training_needs(copy, capsys, key):
    content = torch.load(copy.last, weights_only=True)
    del content[key]
    torch.save(content, copy.last)
    assert f"last.ckpt cannot be trained on: it has no {key}." in refusal(copy.path.parent, capsys)


@pytest.mark.parametrize("state", [{}, {"position": 3}, {"position": 3, "settings": None}, {"position": "3", "settings": {}}])
def test_a_state_of_the_loader_that_is_none(state):
    rows = SimpleNamespace(n_rows=8, begin=lambda epoch: None)
    with pytest.raises(ValueError, match="the checkpoint's state of the loader has no position and settings"):
        ResumableLoader(rows, 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text[: text.rindex(",", 0, -3)], True),  # the last row is cut
        (lambda text: text + "0,1.0,3", True),
        (lambda text: text + "\0\0\0\0\n", True),
        (lambda text: "\x7fELF\x02\n,,\n" * 9, False),
        (lambda text: "", False),
        (lambda text: "step,train/loss\n1," + "x" * 200_000 + "\n", False),  # more than the csv module takes
    ],
    ids=["cut", "half", "zeros", "garbage", "empty", "long"],
)
def test_a_damaged_metrics_csv_is_resumed(copy, stopped, damage, kept, caplog):
    copy.metrics.write_text(damage(copy.metrics.read_text()))
    before = copy.metrics.read_text()
    runner.train(config(copy.path.parent, "resume=auto"))
    if kept:
        steps = [step for step, _ in read_metrics(copy.metrics)["train/loss"]]
        assert steps[-3:] == [9, 10, 11] and steps[:7] == list(range(1, 8))
    else:
        assert [step for step, _ in read_metrics(copy.metrics)["train/loss"]] == [9, 10, 11]
    aside = copy.path / "metrics.csv.damaged"
    assert aside.exists() == (not kept and before != "") and (not aside.exists() or aside.read_text() == before)


def test_an_empty_record_is_resumed(copy, stopped):
    copy.record.write_text("")
    runner.train(config(copy.path.parent, "resume=auto"))
    assert copy.read_record()["status"] == "finished"
    assert_equal(copy.path.parent, stopped[1])


def test_metrics_are_read_from_the_model_once_a_logged_step(tmp_path, monkeypatch):
    calls, metrics = [], Transformer.metrics
    monkeypatch.setattr(Transformer, "metrics", lambda self: calls.append(1) or metrics(self))
    runner.train(config(tmp_path, "trainer.max_steps=8", "trainer.log_every_n_steps=4"))
    assert len(calls) == 2


def test_wandb_that_dies_does_not_end_a_run(monkeypatch, caplog):
    sent = []

    def log_metrics(self, metrics, step=None):
        sent.append(step)
        if step == 6:
            raise BrokenPipeError("the service is gone")

    monkeypatch.setattr(WandbLogger, "log_metrics", log_metrics)
    monkeypatch.setattr(WandbLogger, "__init__", lambda self: None)
    logger = SafeWandbLogger()
    logger.has_until = 4  # which an earlier start sent
    with caplog.at_level("WARNING"):
        for step in range(3, 9):
            logger.log_metrics({"train/loss": 1.0}, step)
        logger.finalize("success")
    assert sent == [5, 6]
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("W&B failed (BrokenPipeError: the service is gone); the run goes on")


def test_a_resume_tells_how_far_an_earlier_start_logged(tmp_path):
    table = MetricsCSV(str(tmp_path))
    assert table.forget_from(0) == -1
    for step in range(5):
        table.log_metrics({"train/loss": 1.0}, step)
    assert MetricsCSV(str(tmp_path)).forget_from(3) == 4
    assert [step for step, _ in read_metrics(table.path)["train/loss"]] == [1, 2, 3]


def test_control_characters_of_a_sample_do_not_reach_the_terminal(tmp_path):
    folder = RunFolder(tmp_path)
    folder.sample.write_text("a\x1b]0;title\x07b\x9b2J\tüber\n", encoding="utf-8")
    text = report.end(tmp_path, {})
    assert r"    a\x1b]0;title\x07b\x9b2J" in text and "\tüber" in text
    assert all(char.isprintable() or char in "\n\t" for char in text)


def test_a_terminal_of_ascii_shows_escapes(monkeypatch):
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="ascii"))
    report.quiet()
    print("│ ü", flush=True)
    assert bytes_.getvalue() == b"\\u2502 \\xfc\n"


@pytest.mark.parametrize(("resume", "asked"), [("auto", ["requeue 7"]), ("null", [])])
def test_slurm_is_asked_to_start_a_job_again_that_would_go_on(tmp_path, monkeypatch, resume, asked):
    for name, value in {"NTASKS": "1", "JOB_ID": "7", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    asking = tmp_path / "bin" / "scontrol"
    asking.parent.mkdir()
    asking.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n')
    asking.chmod(0o755)
    monkeypatch.setenv("PATH", f"{asking.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SystemExit) as left:
        runner.train(config(tmp_path, f"resume={resume}", send("on_train_batch_start", 2, 2, "SIGUSR1")))
    assert left.value.code == 128 + signal.SIGUSR1
    assert torch.load(RunFolder(tmp_path / "run").last, weights_only=True)["global_step"] == 3
    assert ((tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []) == asked
    assert len(column(tmp_path, "train/loss")) == 3
