"""evaluation=classification: accuracy on the test split; what it refuses."""

import pytest
import torch
from test_classification import LISTOPS, build_data, compose
from tiny_run import compose_tiny

from attnzoo import checkpoint, runner
from attnzoo.evaluation.classification import accuracy


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listops")
    sizes = ["data.n_train=300", "data.n_validation=40", "data.n_test=30"]
    metrics = runner.train(compose(folder, *LISTOPS, *sizes, "data.eval_batch_size=7"))
    return checkpoint.load(folder / "run" / "checkpoints" / "last.ckpt").model, build_data(folder, *LISTOPS, *sizes), metrics


def rows_of(plan):
    return [row for measurement in plan.measurements for row in measurement.measure(lambda tokens: None)]


def test_accuracy_is_that_of_the_split(run):
    model, data, metrics = run
    (hits, loss) = rows_of(accuracy(model, data, split="validation"))
    assert (hits.metric, hits.count, hits.note) == ("accuracy", 40, "validation split")
    assert hits.value == pytest.approx(metrics["val/accuracy"]) and loss.value == pytest.approx(metrics["val/loss"])
    (hits, _) = rows_of(accuracy(model, data))
    answers = []
    for batch in data.test_dataloader():
        scores = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], max_seqlen=batch["max_seqlen"])
        answers.append(scores.argmax(-1) == batch["labels"])
    answers = torch.cat(answers).double()
    assert hits.value == pytest.approx(answers.mean().item()) and hits.count == 30
    assert hits.stderr == pytest.approx((answers.std() / 30**0.5).item())


def test_other_models_and_splits_are_a_row_that_says_why(run, tmp_path):
    model, data, _ = run
    (row,) = rows_of(accuracy(model, data, split="train"))
    assert row.value is None and "split='train' must be test or validation" in row.note
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=1"))
    (row,) = rows_of(accuracy(checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt").model, data))
    assert row.value is None and "task=classification" in row.note


@pytest.mark.slow
def test_the_command_writes_the_table(run, tmp_path, capsys):
    from hydra import compose as compose_config
    from hydra import initialize_config_dir
    from tiny_run import ROOT

    runner.train(compose(tmp_path, *LISTOPS, "trainer.max_steps=2"))
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose_config(
            "eval",
            ["evaluation=classification", f"ckpt_path={tmp_path / 'run'}", "accelerator=cpu", f"run_dir={tmp_path / 'evaluation'}"],
        )
    runner.evaluate(cfg)
    assert "accuracy" in (tmp_path / "evaluation" / "results.csv").read_text()
