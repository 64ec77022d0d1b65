"""A run folder of an earlier version (commit f64c05a) is resumed, evaluated and compared as it was."""

import csv
import shutil

import pytest
import torch
from tiny_run import ROOT, compose_tiny

from attnzoo import checkpoint, runner
from attnzoo.evaluation.runs import find
from attnzoo.run.folder import RunFolder
from attnzoo.training.loggers import read_metrics

EARLIER = ROOT / "tests" / "data" / "earlier_run"
# what the run was started with, and goes on to twice the steps
TRAINED = [
    *("data.seq_len=16", "model.dim=8", "model.n_layers=1", "model.n_heads=1", "trainer.val_check_interval=3", "optimizer.total_steps=12"),
    *("trainer.max_steps=12", "callbacks.sample=null", "callbacks.plot=null", f"data.paths=[{EARLIER / 'corpus'}]"),
]


@pytest.fixture
def earlier(tmp_path):
    shutil.copytree(EARLIER / "run", tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_it_is_resumed_with_the_losses_of_then(tmp_path, earlier):
    score = min(value for _, value in read_metrics(earlier.metrics)["val/loss"])
    runner.train(compose_tiny(tmp_path, *TRAINED, "resume=auto"))
    ours, theirs = read_metrics(earlier.metrics), read_metrics(EARLIER / "whole_metrics.csv")
    for name in ("train/loss", "val/loss"):
        assert [step for step, _ in ours[name]] == [step for step, _ in theirs[name]]
        assert [value for _, value in ours[name]] == pytest.approx([value for _, value in theirs[name]], rel=1e-4)
    rates, rates_then = (dict(run["train/lr"]) for run in (ours, theirs))
    assert [rates[step] for step in range(7, 13)] == pytest.approx([rates_then[step - 1] for step in range(7, 13)])  # then the next step's
    best = torch.load(earlier.best, weights_only=True)["callbacks"]
    assert any(state["best_model_score"] <= score for state in best.values() if "best_model_score" in state)
    assert earlier.read_record()["status"] == "finished"


def test_it_is_loaded(earlier):
    loaded = checkpoint.load(earlier.last)
    assert (loaded.task, loaded.context, loaded.model.n_parameters) == ("lm", 16, 2928)
    (run,) = find(str(earlier.path), None)
    assert run.checkpoint == earlier.best and run.context() == 16


def test_it_is_evaluated_with_the_loss_of_then_beside_a_run_of_now(tmp_path, earlier):
    kept = (earlier.path / "evaluations.jsonl").read_text()
    config = earlier.config.read_text().replace("tests/data", str(ROOT / "tests" / "data"))
    earlier.config.write_text(config.replace("cache_dir: cache", f"cache_dir: {tmp_path / 'cache'}"))
    runner.train(compose_tiny(tmp_path / "now", *TRAINED, "seed=1"))
    runs = f"runs=[{earlier.path},{tmp_path / 'now' / 'run'}]"
    where = f"run_dir={tmp_path / 'evaluated'}"
    runner.evaluate(compose_tiny(tmp_path, where, runs, "evaluation=validation", "accelerator=cpu", config="eval"))
    with open(tmp_path / "evaluated" / "results.csv", newline="") as file:
        losses = {row["run"]: float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "loss" and row["value"]}
    name = next(name for name in losses if not name.startswith("now"))
    assert losses[name] == pytest.approx(read_metrics(EARLIER / "run" / "metrics.csv")["val/loss"][-1][1], rel=1e-4)
    assert len(losses) >= 2 and (earlier.path / "evaluations.jsonl").read_text().startswith(kept)
