"""The benchmark of transformers' engine: a dry run, and no figure for other tokens than eager attention's."""

import csv
from types import SimpleNamespace

import pytest
import torch

from benchmarks import serving

CASE = serving.Case("tiny", 2, 3, 12, 4, torch.float32, "cpu")


@pytest.mark.slow
def test_dry_run(tmp_path):
    assert serving.main(["--dry-run", "--backends", "attnzoo_flash", "--output", str(tmp_path), "--samples", "3"]) == 0
    (row,) = csv.DictReader((tmp_path / "serving-speed.csv").read_text().splitlines())
    assert float(row["value"]) > 0 and float(row["error"]) == 0
    assert row["unit"] == "tokens/s" and row["note"] == "flash forward by cpu"


def test_dry_run_of_samples(tmp_path):
    assert serving.main(["samples", "--dry-run", "--output", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "serving-samples.csv").read_text().splitlines()))
    assert [(row["label"], float(row["error"])) for row in rows] == [("the prompt's pages", 0), ("a copy each", 0)]


@pytest.mark.parametrize("model", ("gpt_tiny", "gpt2_small"))
def test_dry_run_of_tokens(model, tmp_path):
    assert serving.main(["tokens", "--dry-run", "--models", model, "--dtype", "bfloat16", "--output", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "serving-tokens.csv").read_text().splitlines()))
    assert [(row["label"], row["unit"]) for row in rows] == [("attnzoo", "TB/s"), ("copy", "TB/s"), ("attnzoo", "tokens/s")]
    rates = [float(row["value"]) for row in rows]
    assert float(rows[0]["error"]) <= 1 and float(rows[1]["ratio"]) == pytest.approx(rates[0] / rates[1], rel=1e-4)
    assert rates[2] == pytest.approx(16e3 / float(rows[0]["ms"]), rel=1e-4)


@pytest.mark.parametrize("changed", (False, True))
def test_other_tokens_get_no_figure(changed, monkeypatch):
    stub = SimpleNamespace(to=lambda dtype: None, destroy_cached_continuous_batching_manager=lambda: None)
    monkeypatch.setattr(serving, "model", lambda case, implementation: stub)
    found = torch.arange(64).view(4, 16).repeat_interleave(2, 0)[:4]
    found[3, 15] += changed
    monkeypatch.setattr(serving, "written", lambda *arguments, **options: found)
    monkeypatch.setattr(serving, "expected", lambda case: torch.arange(32).view(2, 16))
    (error,) = serving.BACKENDS["sdpa"].make(CASE, None).saved
    assert error.item() == (torch.inf if changed else 0)


def test_a_missing_package_is_the_reason():
    assert serving.backend("other", "no_such_package").missing() == "cannot run: the package no_such_package is not installed"
    assert serving.BACKENDS["sdpa"].missing() is None
