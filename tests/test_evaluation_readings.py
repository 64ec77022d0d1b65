"""Lists of readings: what their files hold, and a checkpoint read in all of these ways."""

import csv

import pytest
from commands import Command
from hydra import compose, initialize_config_dir
from tiny_run import ROOT, compose_tiny, write_checkpoint

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.evaluation import report
from attnzoo.evaluation.readings import compose_readings

LISTS = {path.stem for path in (ROOT / "configs" / "evaluation" / "readings").glob("*.yaml")}


def config(*overrides: str):
    return compose("eval", ["run_dir=none", *overrides])


@pytest.fixture
def hydra():
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield


def checkpoints(folder, **contexts: int) -> None:
    for name, context in contexts.items():
        write_checkpoint(folder / name / "checkpoints" / "best.ckpt", context=context)


@pytest.mark.parametrize("name", sorted(LISTS - {"all"}))  # which is read as a whole below
def test_every_list_composes(hydra, tmp_path, name):
    checkpoints(tmp_path, a=1024)
    readings = compose_readings(config(f"readings={name}", f"runs={tmp_path}"))
    assert readings[0].line == "" and len({one.line for one in readings}) == len(readings)
    assert not any("{context" in one.line for one in readings)
    (window,) = [one for one in readings if one.line == "attention=flash attention.window_size=[1023,0]"]
    assert window.attention["window_size"] == [1023, 0]


def test_a_list_of_lines_may_speak_of_the_context(hydra, tmp_path):
    checkpoints(tmp_path, a=48)
    lines = '["attention=flash attention.window_size=[{context/2-1},0]","model.original_context={context*2}"]'
    window, context = compose_readings(config(f"readings={lines}", f"runs={tmp_path}"))
    assert window.attention["window_size"] == [23, 0] and context.model == {"original_context": 96}
    divided = '["model.original_context={context/0}"]'
    with pytest.raises(UserError, match=r"readings: \{context/0\} must not divide by zero"):
        compose_readings(config(f"readings={divided}", f"runs={tmp_path}"))
    checkpoints(tmp_path, b=32)
    with pytest.raises(UserError, match="must be the same for all runs, got 32, 48"):
        compose_readings(config(f"readings={lines}", f"runs={tmp_path}"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with rotary positions, whose context holds two blocks of 64 tokens, and one with learned ones."""
    folder = tmp_path_factory.mktemp("readings")
    quick = ["trainer.max_steps=2", "model.n_layers=2", "model.dim=16", "callbacks.sample=null", "callbacks.plot=null", "data.seq_len=128"]
    for name, options in (("rotary", ["attention=flash"]), ("learned", ["attention=sdpa", "model.positions=learned"])):
        runner.train(compose_tiny(folder, *quick, *options, f"run_dir={folder / name}"))
    return folder


def evaluate(trained, folder, *overrides: str) -> list[dict]:
    task = "evaluation.tasks.perplexity"
    quick = ["accelerator=cpu", "precision=32", "evaluation=by_length", f"{task}.min_tokens=1", f"{task}.max_tokens=256",
             f"{task}.protocols=[windows]", f"{task}.longppl=null"]
    runner.evaluate(config(*quick, f"run_dir={folder}", *overrides))
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_one_checkpoint_is_read_in_all_ways(hydra, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda rows, folder: [])  # 37 curves take seconds
    rows = evaluate(trained, tmp_path / "result", f"ckpt_path={trained / 'rotary'}", "evaluation.lengths=[256]", "readings=all")
    read = {row["reading"] for row in rows if row["task"] == "perplexity_windows" and row["value"]}
    assert len(read) >= 16 and not [row for row in rows if row["note"].startswith("failed")]
    losses = [row["value"] for row in rows if row["task"] == "perplexity_windows" and row["metric"] == "loss"]
    assert len(set(losses)) >= 16, "readings that differ in nothing"


def test_a_reading_that_a_checkpoint_cannot_take_is_a_row_that_says_why(hydra, trained, tmp_path):
    rows = evaluate(trained, tmp_path / "result", f"ckpt_path={trained / 'learned'}", "evaluation.lengths=[64]",
                    'readings=["","model.rope_scaling=yarn model.rope_factor=8","attention=dual_chunk"]')
    notes = {row["reading"]: row["note"] for row in rows if not row["task"]}
    assert notes.keys() == {"model.rope_scaling=yarn model.rope_factor=8", "attention=dual_chunk"}
    assert all(note.startswith("failed: ") and "learned" in note for note in notes.values())
    assert {row["reading"] for row in rows if row["task"]} == {""}


TASK = "evaluation.tasks.perplexity"
QUICK = ["accelerator=cpu", "precision=32", "evaluation=by_length", "evaluation.lengths=[64,256]", f"{TASK}.longppl=null",
         f"{TASK}.min_tokens=1", f"{TASK}.max_tokens=256", f"{TASK}.protocols=[windows]",
         'readings=["","model.rope_scaling=ntk model.rope_factor=4","attention=dual_chunk"]']


@pytest.mark.slow
def test_processes_measure_a_part_each_and_one_reports(trained, tmp_path):
    def told(name: str, *more: str) -> list[str]:
        return ["eval.py", f"ckpt_path={trained / 'rotary'}", f"store={tmp_path / name}", f"hydra.run.dir={tmp_path / name}", *QUICK, *more]

    done = Command(*told("one")).wait()
    assert done.returncode == 0, done.stderr
    done = Command(*told("two", "devices=2", "logger=csv")).wait()
    assert done.returncode == 0 and "0 are at work" in done.stdout + done.stderr, done.stderr
    results = [csv_rows(tmp_path / name / "results.csv") for name in ("one", "two")]
    assert results[0] == results[1] and len(results[0]) > 10
    kept = [(tmp_path / name / "evaluations.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert sorted(kept[0]) == sorted(kept[1])  # the first process has measured nothing again


def csv_rows(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_what_a_process_leaves_is_measured_by_the_first(trained, tmp_path):
    """A process that has no memory, no disk or no library."""
    fails = tmp_path / "sitecustomize.py"
    text = "import os, sys\nif any('part=[1,' in argument for argument in sys.orig_argv):\n    os.write(1, b'no room')\n    os._exit(3)"
    fails.write_text(text)
    done = Command("eval.py", f"ckpt_path={trained / 'rotary'}", f"store={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}", *QUICK,
                   "devices=2", environment={"PYTHONPATH": str(tmp_path)}).wait()
    assert done.returncode == 0, done.stderr
    assert "process 1 ended with exit status 3; what it has not measured is measured here: no room" in done.stdout + done.stderr
    assert {row["reading"] for row in csv_rows(tmp_path / "run" / "results.csv") if row["value"]} == {
        "", "model.rope_scaling=ntk model.rope_factor=4", "attention=dual_chunk"}


@pytest.mark.parametrize("options, reason", (
    (["devices=0"], "devices=0: must be a whole number of at least 1"),
    (["part=[2,2]"], r"part=\[2, 2\]: must be \[i, n\] with i from 0 to 1"),
    (["devices=2", "part=[0,2]"], "devices=2, part=.*set one of them"),
))
def test_parts_that_do_not_exist_are_refused(hydra, trained, tmp_path, options, reason):
    with pytest.raises((UserError, ValueError), match=reason):
        runner.evaluate(config(f"ckpt_path={trained / 'rotary'}", f"run_dir={tmp_path / 'run'}", "accelerator=cpu", *options))
