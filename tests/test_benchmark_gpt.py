"""The GPT benchmark runs, checks its models against each other, and reads what a run in the Trainer logged."""

import pytest

from benchmarks import gpt
from benchmarks.report import Row


def test_dry_run_prints_figures_that_were_checked(capsys):
    assert gpt.main(["speed", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "nanogpt-eager" in printed
    assert "Error" not in printed and "allowed error" not in printed


def test_a_wrong_model_gets_no_figure(capsys, monkeypatch):
    forward = gpt.NanoBlock.forward
    monkeypatch.setattr(gpt.NanoBlock, "forward", lambda self, x: 1.05 * forward(self, x))
    assert gpt.main(["speed", "--dry-run", "--backends", "attnzoo-eager"]) == 1
    assert "times the allowed error" in capsys.readouterr().out


def test_figures_of_a_run_leave_out_the_first_which_compiles():
    row = Row("gpt", "trainer", "inside the Trainer", 12, "fused loss", "12x1024", "step", "tokens/s")
    read = {"perf/tokens_per_second": [(25, 1.0), (50, 400e3), (75, 500e3), (100, 600e3)], "train/loss": [(25, 9.0)]}
    (found,) = gpt.of_run(row, gpt.Case(), read)
    assert (found.value, found.ms, found.spread) == (500e3, pytest.approx(12288 / 500), pytest.approx(0.4))


@pytest.mark.slow
def test_runs_in_the_trainer_are_measured(tmp_path, capsys):
    assert gpt.main(["trainer", "loss", "--dry-run", "--runs", "usual", "--seeds", "1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "failed" not in printed and "usual, seed 1: mean loss of each tenth of 10 steps: 5." in printed
    assert len((tmp_path / "gpt-trainer.csv").read_text().splitlines()) == 1 + 1
    assert len((tmp_path / "gpt-loss.csv").read_text().splitlines()) == 1 + 10


def test_8_bit_products_need_a_gpu_that_has_them(capsys):
    if gpt.DEVICE == "cpu":
        gpt.main(["speed", "--dry-run", "--backends", "attnzoo-eager", "attnzoo-fp8"])
        assert "attnzoo-fp8: needs an NVIDIA GPU of compute capability 8.9 or later, got cpu" in capsys.readouterr().out
