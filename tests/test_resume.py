"""A run that was stopped and goes on gives the losses of one that never was: weights, schedule, dropout and place in the data."""

import os
import re
import signal

import lightning
import pytest
import torch
from tiny_run import column, compose_tiny

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.run.command_line import one_line_errors
from attnzoo.run.folder import RunFolder
from attnzoo.training.loggers import read_metrics

STEPS, STOP = 12, 8


class Stop(lightning.Callback):
    """Ends a run after its step `at`."""

    def __init__(self, at: int, how: str):
        self.at, self.how = at, how

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.at:
            if self.how == "exception":
                raise RuntimeError("out of luck")
            os.kill(os.getpid(), getattr(signal, self.how))


def stop(at: int, how: str) -> str:
    return f"+callbacks.stop={{_target_: test_resume.Stop, at: {at}, how: {how}}}"


@pytest.fixture(autouse=True)
def sigint_handler():
    """Lightning ignores SIGINT once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def config(folder, *overrides):
    """Five steps an epoch (four where epochs end the run): STOP lies within the second or at its end. Dropout, accumulation, cosine."""
    return compose_tiny(
        folder,
        "data.batch_size=2",
        "data.seq_len=16",
        "trainer.limit_train_batches=10",
        "trainer.limit_val_batches=4",
        "batch_tokens=64",
        "model.dropout=0.2",
        "model.attention_dropout=0.1",
        "callbacks.last.every_n_steps=3",
        "callbacks.sample=null",
        "trainer.val_check_interval=5",
        *overrides,
    )


LENGTHS = {"steps": ["trainer.max_steps=12"], "epochs": ["trainer.max_steps=-1", "trainer.max_epochs=3", "trainer.limit_train_batches=8"]}


@pytest.fixture(scope="module", params=LENGTHS)
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runner.train(config(folder, *LENGTHS[request.param]))
    assert len(column(folder, "train/loss")) == STEPS
    return LENGTHS[request.param], folder


@pytest.mark.slow
@pytest.mark.parametrize(("uninterrupted", "how", "error"), [  # each signal once: it ends both lengths alike
    ("steps", "exception", RuntimeError), ("steps", "SIGINT", SystemExit),
    ("epochs", "exception", RuntimeError), ("epochs", "SIGTERM", SystemExit),
], indirect=["uninterrupted"])
def test_resumed_run_equals_one_that_never_stopped(tmp_path, uninterrupted, how, error):
    length, whole = uninterrupted
    with pytest.raises(error):
        runner.train(config(tmp_path, *length, stop(STOP, how)))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == (6 if how == "exception" else STOP)  # an exception may strike within a step: the last interval counts

    runner.train(config(tmp_path, *length, "resume=auto"))

    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert column(tmp_path, name)[-4:] == column(whole, name)[-4:], name
    assert column(tmp_path, "train/loss") == column(whole, "train/loss")
    assert [step for step, _ in read_metrics(tmp_path / "run" / "metrics.csv")["train/loss"]] == list(range(1, STEPS + 1))
    ours, theirs = (torch.load(folder / "run" / "checkpoints" / "last.ckpt", weights_only=True) for folder in (tmp_path, whole))
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]


@pytest.mark.parametrize("uninterrupted", ["epochs"], indirect=True)
def test_a_run_that_goes_on_from_an_epochs_end_can_be_stopped_again(tmp_path, uninterrupted):
    length, whole = uninterrupted
    for at in (4, 6):
        with pytest.raises(SystemExit):
            runner.train(config(tmp_path, *length, "resume=auto", stop(at, "SIGTERM")))
    runner.train(config(tmp_path, *length, "resume=auto"))
    assert column(tmp_path, "train/loss") == column(whole, "train/loss")


@pytest.mark.slow
@pytest.mark.parametrize("uninterrupted", ["steps"], indirect=True)
def test_a_finished_run_can_be_made_longer(tmp_path, uninterrupted):
    length, whole = uninterrupted
    runner.train(config(tmp_path, "trainer.max_steps=7", "optimizer.total_steps=12"))
    first = tmp_path / "run" / "checkpoints" / "last.ckpt"
    runner.train(config(tmp_path / "other", *length, f"data.paths=[{tmp_path / 'corpus'}]", f"ckpt_path={first}"))
    assert column(tmp_path / "other", "train/loss") == column(whole, "train/loss")[7:]


@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_the_numbers_of_the_optimizer_are_those_of_the_command(tmp_path, caplog, optimizer):
    """A whole run that has them from its beginning shows the schedule."""
    numbers = f"optimizer={optimizer}", "optimizer.lr=0.01", "optimizer.final_lr=0.002", "optimizer.weight_decay=0.25"
    runner.train(config(tmp_path / "whole", "trainer.max_steps=9", *numbers))
    runner.train(config(tmp_path, "trainer.max_steps=5", f"optimizer={optimizer}"))
    with caplog.at_level("INFO", logger="attnzoo.training.module"):
        runner.train(config(tmp_path, "trainer.max_steps=9", "resume=auto", *numbers))
    assert column(tmp_path, "train/lr")[5:] == column(tmp_path / "whole", "train/lr")[5:]
    groups, whole = (torch.load(folder / "run" / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
                     for folder in (tmp_path, tmp_path / "whole"))
    assert groups == whole
    assert "optimizer.lr=0.01 from here on, it was 0.003" in caplog.text and "optimizer.weight_decay=0.25 from here on" in caplog.text


@pytest.mark.parametrize(
    ("length", "limit"),
    [
        (["trainer.max_steps=2"], "max_steps"),
        (["trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.limit_train_batches=2"], "max_epochs"),
        (["schedule=constant", "trainer.max_steps=-1", "trainer.max_epochs=9", "+trainer.max_time=00:00:00:01"], "max_time"),
    ],
    ids=["steps", "epochs", "time"],
)
def test_a_finished_run_says_that_nothing_is_left(tmp_path, caplog, length, limit):
    runner.train(config(tmp_path, *length))
    record = (tmp_path / "run" / "record.json").read_text()
    with caplog.at_level("INFO", logger="attnzoo.runner"):
        assert runner.train(config(tmp_path, *length, "resume=auto")) == {}
    assert (tmp_path / "run" / "record.json").read_text() == record
    assert re.search(rf"nothing left to train: .*last.ckpt is at the last step, \d+; raise trainer.{limit}", caplog.text)


def test_early_stopping_has_the_patience_of_the_command(tmp_path, caplog):
    """A run that it has ended stays so, until the patience is raised."""
    early = ["callbacks=early_stopping", "callbacks.early_stopping.min_delta=100", "trainer.val_check_interval=1",
             "callbacks.last.every_n_steps=1", "callbacks.progress=null", "trainer.max_steps=12"]
    runner.train(config(tmp_path, *early, "callbacks.early_stopping.patience=2"))
    assert len(column(tmp_path, "train/loss")) == 3
    with caplog.at_level("INFO", logger="attnzoo.runner"):
        assert runner.train(config(tmp_path, *early, "callbacks.early_stopping.patience=2", "resume=auto")) == {}
    assert "is at the last step, 3; raise callbacks.early_stopping.patience" in caplog.text
    runner.train(config(tmp_path, *early, "callbacks.early_stopping.patience=4", "resume=auto"))
    assert len(column(tmp_path, "train/loss")) == 5


def test_early_stopping_counts_the_validation_at_an_epochs_end(tmp_path):
    early = ["callbacks=early_stopping", "callbacks.early_stopping.min_delta=100", "callbacks.early_stopping.patience=2",
             "trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=1", "trainer.limit_train_batches=4", "trainer.max_steps=12"]
    with pytest.raises(SystemExit):
        runner.train(config(tmp_path, *early, stop(4, "SIGTERM")))
    runner.train(config(tmp_path, *early, "resume=auto"))
    assert len(column(tmp_path, "train/loss")) == 6


def test_a_run_without_a_step_says_so(tmp_path, caplog):
    with caplog.at_level("INFO", logger="attnzoo.runner"):
        assert runner.train(config(tmp_path, "trainer.limit_train_batches=0")) == {}
    assert "nothing was trained; raise trainer.limit_train_batches" in caplog.text
    record = RunFolder(tmp_path / "run").read_record()
    assert (record["status"], record["steps"]) == ("finished", 0)


def test_a_fast_dev_run_makes_no_run_and_changes_none(tmp_path):
    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    runner.train(config(tmp_path, "trainer.fast_dev_run=2"))
    assert not RunFolder(tmp_path / "run").holds_a_run()
    runner.train(config(tmp_path, "trainer.max_steps=1"))
    before = files()
    runner.train(config(tmp_path, "trainer.fast_dev_run=2", "resume=auto", "optimizer.lr=1e-4"))
    assert files() == before


def test_the_best_checkpoint_can_be_resumed_too(tmp_path, uninterrupted):
    length, whole = uninterrupted
    with pytest.raises(RuntimeError):
        runner.train(config(tmp_path, *length, stop(STOP, "exception")))
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"  # written in the validation after step 5
    runner.train(config(tmp_path, *length, f"ckpt_path={best}"))
    assert column(tmp_path, "train/loss") == column(whole, "train/loss")


@pytest.mark.parametrize("uninterrupted", ["steps"], indirect=True)
def test_auto_without_a_checkpoint_starts_from_the_beginning(tmp_path, uninterrupted):
    length, whole = uninterrupted
    runner.train(config(tmp_path, *length, "resume=auto"))
    assert column(tmp_path, "train/loss") == column(whole, "train/loss")


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, capsys):
    runner.train(config(tmp_path, "trainer.max_steps=1"))
    kept = [(tmp_path / "run" / name).read_text() for name in ("config.yaml", "record.json")]
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(config(tmp_path, "resume=auto", "model.dim=64", "trainer.max_steps=2"))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "does not fit this run" in line and "model.dim=32, not 64" in line
    with pytest.raises(UserError, match=r"_target_=.*FlashAttention, not .*SigmoidAttention\. Set .*init_from"):
        runner.train(config(tmp_path, "resume=auto", "model.attention_dropout=0", "attention=sigmoid", "trainer.max_steps=2"))
    with pytest.raises(UserError, match=r"optimizer\._target_=.*AdamWRecipe, not .*MuonRecipe\. Set .*init_from"):
        runner.train(config(tmp_path, "resume=auto", "optimizer=muon", "trainer.max_steps=2"))
    with pytest.raises(ValueError, match="rows is .*; seq_len is 32, it must be 16 as in the checkpoint"):
        runner.train(config(tmp_path, "resume=auto", "data.seq_len=32", "trainer.max_steps=2"))
    assert [(tmp_path / "run" / name).read_text() for name in ("config.yaml", "record.json")] == kept  # evaluations read the first
