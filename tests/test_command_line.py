"""The two commands as a user types them: what `--help` lists, and what refused commands say and leave behind."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import Command
from tiny_run import ROOT, compose_tiny

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.run.command_line import user_message


def command(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """The command, run in folder, where its `outputs` go."""
    return subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=folder, capture_output=True, text=True)


def left(folder: Path) -> list[Path]:
    return list(folder.glob("outputs/*"))


def test_each_help_lists_its_own_groups():
    listed = {}
    for script in ("train.py", "eval.py", "generate.py"):
        lines = command(ROOT, script, "--help").stdout.partition("Groups and their options")[2].partition("Keys (")[0].splitlines()[1:]
        listed[script] = dict(line.split(": ") for line in lines if line)
    assert {"model", "optimizer", "trainer", "experiment"} <= listed["train.py"].keys() and "evaluation" not in listed["train.py"]
    assert listed["eval.py"].keys() == {"evaluation", "attention", "layers", "data", "logger"}
    assert listed["generate.py"].keys() == {"attention", "layers"}
    for groups in listed.values():
        for group, options in groups.items():
            assert options.split(", ") == sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


def test_help_may_be_read_in_part():
    command = [sys.executable, ROOT / "train.py", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("eval.py", ["ckpt_path=missing.ckpt"], "missing.ckpt does not exist"),
        ("train.py", ["resume=auto"], "resume=auto needs a run folder that stays the same"),
        ("train.py", ["attention.impl=glon"], "attention.impl='glon': must be gluon or triton or cpu or reference or null"),
        ("train.py", ["attention.impl=gluon", "trainer=cpu"], "attention.impl=gluon: needs a Hopper GPU, got cpu"),
    ],
)
def test_a_refused_command_says_one_line_and_leaves_nothing(tmp_path, script, arguments, message):
    prepared = tmp_path / "prepared"
    done = command(tmp_path, script, *arguments, *([f"data.cache_dir={prepared}"] if script == "train.py" else []))
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and message in line
    assert left(tmp_path) == [] and not prepared.exists()


@pytest.mark.parametrize(
    ("script", "argument", "near"),
    [
        ("train.py", "model.n_head=2", "n_heads, n_kv_heads"),
        ("train.py", "atention=sdpa", "attention"),
        ("train.py", "lr=1e-3", "optimizer.lr"),
        ("eval.py", "ckpt_pth=x", "ckpt_path"),
    ],
)
def test_a_misspelt_key_names_those_like_it(tmp_path, script, argument, near):
    done = command(tmp_path, script, argument)
    key = argument.partition("=")[0]
    assert done.returncode == 1 and done.stderr == f"error: {key}: there is no such key; like it: {near}; --help lists all\n"


@pytest.mark.parametrize(
    ("script", "argument", "now"),
    [
        ("eval.py", "variants=[a]", "readings"),
        ("eval.py", "+again=true", "remeasure"),
        ("train.py", "data.group_by_length=true", "batching"),
    ],
)
def test_a_key_of_an_earlier_version_names_that_of_today(tmp_path, script, argument, now):
    done = command(tmp_path, script, argument)
    key = argument.partition("=")[0].lstrip("+")
    assert done.returncode == 1 and done.stderr == f"error: {key}: there is no such key; it is called {now} now\n"


def test_a_key_unlike_all_others_names_none(tmp_path):
    done = command(tmp_path, "train.py", "zzz=1")
    assert done.returncode == 1 and done.stderr == "error: zzz: there is no such key; --help lists all\n"


def test_a_sweep_says_how_to_set_a_key_that_only_swept_options_have(tmp_path):
    done = command(tmp_path, "train.py", "-m", "experiment=extrapolation_gpt_oss,extrapolation_alibi", "data.n_train=2000")
    assert done.returncode == 1
    assert "data.n_train: there is no such key; in a sweep over options that have it, write ++data.n_train" in done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("attention=flush", "attention=flush: there is no such option; like it: flash; it must be one of block_sparse, differential, "),
        ("trainer.max_steps=[", "trainer.max_steps=[: no viable alternative"),
        ("model=3", "model=3: must be the name of an option of configs/model, or a list of names"),
        ("logger=null", "logger=null: must be the name of an option of configs/logger, or a list of names; ~logger takes none"),
        pytest.param("hparams_search=optuna", "pip install -e '.[optuna]' brings it",
                     marks=pytest.mark.skipif(find_spec("optuna") is not None, reason="it is there")),
    ],
)
def test_what_hydra_refuses_is_one_line(tmp_path, argument, message):
    done = command(tmp_path, "train.py", argument)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and message in line and left(tmp_path) == []


def test_a_refused_command_leaves_alone_what_was_there(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").touch()
    done = command(tmp_path, "eval.py", "ckpt_path=missing.ckpt", f"hydra.run.dir={run}")
    assert done.returncode == 1 and (run / "notes.txt").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=abc", "trainer.max_steps='abc': must be -1 or a whole number of at least 1"),
        ("trainer.log_every_n_steps=x", "trainer.log_every_n_steps='x': must be a whole number of at least 1"),
        ("trainer.gradient_clip_val=x", "trainer.gradient_clip_val='x': must be a number of at least 0 or null"),
        ("trainer.precision=17", "trainer.precision=17: must be 64 or 32 or 16 or transformer-engine or (?!.* (64|32|16) or)"),
        ("+trainer.steps=3", "trainer.steps: Trainer has no such option; like it: .*max_steps"),
        ("attention._target_=attnzoo.attention.flash.Flesh", "attention._target_=.*Flesh cannot be imported: .* has no attribute 'Flesh'"),
        ("attention._target_=attnzoo.attention.flesh.Flash", "cannot be imported: No module named 'attnzoo.attention.flesh'"),
        ("attention._target_=flash", "attention._target_=flash cannot be imported"),
        ("+model.n_head=3", "model.n_head: GPT has no such option; like it: n_heads, n_kv_heads"),
        ("+attention.windowsize=3", "attention.windowsize: FlashAttention has no such option; like it: window_size"),
        ("+attention.version=2", "attention.version: FlashAttention has no such option$"),
    ],
)
def test_values_of_the_wrong_kind_are_one_line(tmp_path, override, message):
    with pytest.raises((UserError, ValueError), match=message.replace("+", "\\+")) as error:
        runner.train(compose_tiny(tmp_path, override))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_too_little_memory_is_one_line():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    message = user_message(raised.value)
    assert message.startswith(f"out of memory (you tried to allocate {2**60} bytes); lower data.batch_size")


def test_resuming_in_a_fixed_folder_starts_and_goes_on(tmp_path):
    arguments = ["resume=auto", f"hydra.run.dir={tmp_path / 'run'}", "data=text", f"data.paths=[{ROOT / 'README.md'}]", "data.seq_len=32"]
    arguments += [f"data.cache_dir={tmp_path}", "model.dim=16", "model.n_layers=1", "trainer=cpu", "callbacks.plot=null"]
    for steps in (2, 4):
        done = Command("train.py", *arguments, f"trainer.max_steps={steps}", "trainer.val_check_interval=2").wait()
        assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["steps"] == 4 and record["resumed_from"].endswith("last.ckpt")


def test_multirun_need_not_come_first(tmp_path):
    done = command(tmp_path, "train.py", "seed=1,2", "-m", "trainer.max_steps=abc")
    assert done.returncode == 1 and "trainer.max_steps='abc': must be -1 or a whole number" in done.stderr and "usage:" not in done.stderr


@pytest.mark.parametrize("library", ["hydra", "torch"])
def test_an_interrupt_before_the_run_begins_is_silent_and_leaves_nothing(tmp_path, library):
    code = f"""
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {library!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["train.py"]
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr, left(tmp_path)) == (130, "", [])


@pytest.mark.parametrize("given, spins", (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)))
def test_threads_are_told_when_to_sleep_before_torch_is_there(given, spins):
    code = "import os, sys; from attnzoo.run import command_line; command_line.let_threads_sleep(); " \
           "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(spins), "False"]


def test_warnings_are_in_the_log(tmp_path):
    tiny = ["trainer=cpu", "model.dim=16", "model.n_layers=1", "model.n_heads=2", "trainer.max_steps=1", "debug=limit", "data.seq_len=32"]
    done = subprocess.run([sys.executable, ROOT / "train.py", "attention=moba", *tiny, f"hydra.run.dir={tmp_path / 'run'}"], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert "queries read every block" in done.stdout and "queries read every block" in (tmp_path / "run" / "train.log").read_text()
