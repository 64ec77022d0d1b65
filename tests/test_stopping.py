"""Whatever stops a run, and wherever, the resumed one gives the losses of one that never stopped, step by step."""

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from commands import Command, as_torchrun
from tiny_run import ROOT, TINY, column, compose_tiny

from attnzoo import runner
from attnzoo.run import files
from attnzoo.run.command_line import one_line_errors
from attnzoo.run.folder import RunFolder
from attnzoo.run.stopping import StopSignals
from attnzoo.training.loggers import MetricsCSV, read_metrics

# four micro-batches a step, five steps an epoch, dropout; STOP lies within the second epoch
RUN = [
    "data.batch_size=2",
    "data.seq_len=16",
    "batch_tokens=128",
    "trainer.limit_train_batches=20",
    "trainer.limit_val_batches=4",
    "trainer.max_steps=11",
    "trainer.val_check_interval=5",
    "model.dropout=0.2",
    "callbacks.last.every_n_steps=3",
    "callbacks.sample=null",
    "callbacks.plot=null",
]
STOP = 8


def config(folder: Path, *overrides: str):
    return compose_tiny(folder, *RUN, *overrides)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    runner.train(config(folder))
    assert [step for step, _ in read_metrics(RunFolder(folder / "run").metrics)["val/loss"]] == [5, 10, 11]
    return folder


def assert_equal(folder: Path, whole: Path) -> None:
    """Every metric of every step that is no time, and the weights."""
    ours, theirs = (read_metrics(RunFolder(f / "run").metrics) for f in (folder, whole))
    for name in theirs:
        if not name.startswith("perf/"):
            assert ours[name] == theirs[name], name
    ours, theirs = (torch.load(RunFolder(f / "run").last, weights_only=True) for f in (folder, whole))
    assert ours["global_step"] == theirs["global_step"] and ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())
    ours, theirs = (torch.load(RunFolder(f / "run").best, weights_only=True) for f in (folder, whole))
    assert ours["global_step"] == theirs["global_step"]


class Send(lightning.Callback):
    """Sends a signal to this process (rank: to this one alone) at the nth call of a hook after so many optimizer steps."""

    def __init__(self, hook: str, step: int, nth: int, number: int, rank: int | None = None):
        self.calls = 0
        self.step, self.nth, self.number, self.rank = step, nth, number, rank
        setattr(self, hook, self._count)

    def _count(self, trainer, *_):
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            self.calls += 1
            if self.calls == self.nth:
                os.kill(os.getpid(), self.number)


def send(hook: str, step: int, nth: int, name: str, **more: int) -> str:
    values = {"hook": hook, "step": step, "nth": nth, "number": int(getattr(signal, name)), **more}
    return f"+callbacks.send={{_target_: test_stopping.Send, {', '.join(f'{key}: {value}' for key, value in values.items())}}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "step", "nth", "name", "saved"),
    [
        ("on_train_batch_start", 7, 1, "SIGINT", 8),
        ("on_train_batch_end", 7, 2, "SIGTERM", 8),
        ("on_train_batch_end", 7, 3, "SIGINT", 8),
        ("on_train_batch_end", 7, 4, "SIGTERM", 8),
        ("on_before_optimizer_step", 7, 1, "SIGUSR1", 8),
        ("on_train_batch_end", 8, 1, "SIGINT", 8),
        ("on_validation_batch_end", 5, 1, "SIGTERM", 5),
        ("on_validation_end", 5, 1, "SIGINT", 5),
        ("on_save_checkpoint", 6, 1, "SIGTERM", 7),
    ],
)
def test_a_signal_stops_at_the_end_of_its_step(tmp_path, whole, hook, step, nth, name, saved, caplog):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(SystemExit) as left, caplog.at_level("INFO", logger="attnzoo"):
        runner.train(config(tmp_path, send(hook, step, nth, name)))
    assert left.value.code == 128 + getattr(signal, name)
    folder = RunFolder(tmp_path / "run")
    assert f"stopped by {name} after step {saved}, saved {folder.last}; go on with the same command" in caplog.text
    assert torch.load(folder.last, weights_only=True)["global_step"] == saved
    assert column(tmp_path, "train/loss") == column(whole, "train/loss")[:saved] and folder.read_record()["status"] == "interrupted"
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

    caplog.clear()
    with caplog.at_level("INFO", logger="attnzoo"):
        runner.train(config(tmp_path, "resume=auto"))
    assert f"goes on from step {saved} of {folder.last}" in caplog.text
    assert_equal(tmp_path, whole)


@pytest.mark.slow
def test_a_signal_while_metrics_are_written(tmp_path, whole, monkeypatch):
    log_metrics = MetricsCSV.log_metrics

    def log_and_send(self, metrics, step=None):
        log_metrics(self, metrics, step)
        if step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsCSV, "log_metrics", log_and_send)
    with pytest.raises(SystemExit):
        runner.train(config(tmp_path))
    monkeypatch.undo()
    runner.train(config(tmp_path, "resume=auto"))
    assert_equal(tmp_path, whole)


def test_a_signal_after_the_terminal_is_gone_is_still_a_flag(monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)
        assert in_child(lambda: os.kill(os.getpid(), signal.SIGINT)) == 0  # a worker of the loader
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_ends_at_once(tmp_path):
    class Twice(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    build = runner.build_trainer

    def build_with(*arguments):
        trainer = build(*arguments)
        trainer.callbacks.append(Twice())
        return trainer

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(runner, "build_trainer", build_with)
        runner.train(config(tmp_path))
    assert left.value.code == 130 and not RunFolder(tmp_path / "run").last.exists()


@pytest.mark.slow
def test_a_signal_at_the_last_step_leaves_a_finished_run(tmp_path, whole):
    runner.train(config(tmp_path, send("on_validation_end", 11, 1, "SIGTERM")))
    assert RunFolder(tmp_path / "run").read_record()["status"] == "finished"
    assert_equal(tmp_path, whole)


class Crash(lightning.Callback):
    """As a machine without power: nothing is done any more, right behind a validation and its best.ckpt."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 5:
            raise RuntimeError("out of luck")


@pytest.mark.slow
def test_the_best_checkpoint_stays_the_best_after_a_crash(tmp_path, whole):
    """last.ckpt is older than best.ckpt, and what follows is worse."""
    crash = "+callbacks.crash={_target_: test_stopping.Crash}"
    with pytest.raises(RuntimeError):
        runner.train(config(tmp_path, "callbacks.last.every_n_steps=4", crash))
    folder = RunFolder(tmp_path / "run")
    best = folder.best.read_bytes()
    assert torch.load(folder.last, weights_only=True)["global_step"] == 4
    runner.train(config(tmp_path, "resume=auto", "+callbacks.spoil={_target_: test_stopping.Spoil}"))
    losses = [float(loss) for loss in column(tmp_path, "val/loss")]
    assert losses[0] > float(column(whole, "val/loss")[0]) and folder.best.read_bytes() == best


class Spoil(lightning.Callback):
    """Weights that are worse than before."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        with torch.no_grad():
            pl_module.model.token_embedding.weight.normal_()


def in_child(function) -> int:
    """What `function` did to a child process: its exit status, or minus the signal that killed it."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            function()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(operation: int, folder: Path) -> None:
    """This process dies at so many operations on files of the folder from now, before or behind it."""
    left, behind = [operation], operation % 2

    def counted(original):
        def call(path, *arguments, **options):
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            left[0] -= name.startswith(str(folder))
            if left[0] == 0 and not behind:
                os.kill(os.getpid(), signal.SIGKILL)
            done = original(path, *arguments, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    os.fsync, os.replace, Path.open = (counted(original) for original in (os.fsync, os.replace, Path.open))


@pytest.mark.slow
def test_kills_while_files_are_written(tmp_path, whole):
    choose, ends = random.Random(0), []
    compose_tiny(tmp_path)  # writes the corpus

    def run():
        kill_at(operations, tmp_path / "run")
        runner.train(config(tmp_path, "callbacks.last.every_n_steps=1", "resume=auto"))

    while 0 not in ends and len(ends) < 40:
        operations = choose.randint(8, 40)
        ends.append(in_child(run))
    assert set(ends) == {0, -signal.SIGKILL} and len(ends) > 3
    assert_equal(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "record.json", "metrics.csv", "loss.png", "last.ckpt", "best.ckpt"])
def test_a_disk_that_is_full_when_a_file_is_written(tmp_path, whole, monkeypatch, capsys, name):
    """Full from that file's second writing on; config.yaml is written once."""
    writes, fsync, opened = [], os.fsync, Path.open

    def full(path):
        if Path(path).name in (name, f".{name}.part"):
            writes.append(path)
            if len(writes) > (name not in ("config.yaml", "loss.png")):
                raise OSError(errno.ENOSPC, "No space left on device")

    def fsync_if_there_is_room(handle):
        full(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def open_if_there_is_room(self, mode="r", *arguments, **options):
        if mode == "ab":
            full(self)
        return opened(self, mode, *arguments, **options)

    monkeypatch.setattr(files.os, "fsync", fsync_if_there_is_room)
    monkeypatch.setattr(Path, "open", open_if_there_is_room)
    plot = [f"callbacks.plot={{_target_: attnzoo.training.plot.LossPlot, run_dir: '{tmp_path}/run'}}"]
    with pytest.raises(SystemExit) as left, one_line_errors():
        runner.train(config(tmp_path, *plot))
    assert left.value.code == 1 and len(writes) > 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert name in line and "No space left on device" in line
    assert not list((tmp_path / "run").rglob(".*.part"))
    monkeypatch.undo()
    runner.train(config(tmp_path, "resume=auto"))
    assert_equal(tmp_path, whole)


def test_a_fraction_of_an_epoch_between_validations_is_no_number_of_steps(tmp_path):
    """Half an epoch is ten micro-batches, the middle of a step: validation and checkpoint wait for its end."""
    overrides = ["trainer.val_check_interval=0.5", "trainer.check_val_every_n_epoch=1", "callbacks.last.every_n_steps=null"]
    saved, replace = [], os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda part, path: (saved.append(Path(path).name), replace(part, path))[1])
        runner.train(config(tmp_path, *overrides, "trainer.max_steps=5"))
    assert [step for step, _ in read_metrics(RunFolder(tmp_path / "run").metrics)["val/loss"]] == [3, 5]
    assert saved.count("last.ckpt") == 2


def test_without_validation_the_interval_still_saves(tmp_path):
    overrides = ["trainer.limit_val_batches=0", "trainer.val_check_interval=2", "callbacks.last.every_n_steps=null", "callbacks.best=null"]
    with pytest.raises(RuntimeError):
        runner.train(config(tmp_path, *overrides, "+callbacks.crash={_target_: test_stopping.Crash}"))
    assert torch.load(RunFolder(tmp_path / "run").last, weights_only=True)["global_step"] == 4


@pytest.mark.slow
def test_two_ranks_stop_together(tmp_path):
    """SIGTERM reaches one rank, then the other, in the middle of a step; both stop at its end, and the run goes on exactly. Once the
    command starts its second rank, else both are started as torchrun does it."""
    compose_tiny(tmp_path)  # writes the corpus
    command = [
        *("train.py", *TINY, *RUN, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "batch_tokens=256"),
        "trainer.limit_train_batches=12",  # three steps an epoch
        *(f"data.paths=[{tmp_path / 'corpus'}]", f"data.cache_dir={tmp_path / 'cache'}", "callbacks.progress=null", "resume=auto"),
    ]
    places = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": places}

    def train(name: str, *overrides: str) -> list[subprocess.CompletedProcess]:
        arguments = [*command, f"hydra.run.dir={tmp_path / name / 'run'}", *overrides]
        return [rank.wait() for rank in [Command(*arguments, environment=environment | of_rank) for of_rank in as_torchrun(2)]]

    def train_and_start_the_other(name: str, *overrides: str) -> list[subprocess.CompletedProcess]:
        arguments = [sys.executable, *command, f"hydra.run.dir={tmp_path / name / 'run'}", *overrides]
        return [subprocess.run(arguments, cwd=ROOT, timeout=200, capture_output=True, text=True, env=os.environ | environment)]

    assert [done.returncode for done in train("whole")] == [0, 0]
    for step, rank, start in ((3, 1, train_and_start_the_other), (7, 0, train)):
        stopped = start("parts", send("on_train_batch_end", step, 3, "SIGTERM", rank=rank))
        assert {done.returncode for done in stopped} == {128 + signal.SIGTERM}, stopped[0].stderr
        assert f"stopped by SIGTERM after step {step + 1}" in stopped[0].stdout
    assert [done.returncode for done in train("parts")] == [0, 0]
    assert_equal(tmp_path / "parts", tmp_path / "whole")
