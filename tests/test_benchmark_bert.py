"""The BERT benchmark runs, checks its models against each other, and trains them to the same loss."""

import csv
import re
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import batching, bert, fused, kernels

ROOT = Path(__file__).parent.parent
TINY = ["--dry-run", "--backends", "attnzoo-eager", "huggingface-eager"]


def test_dry_run_prints_figures_that_were_checked(capsys):
    assert bert.main(["speed", *TINY]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "Error" not in printed and "allowed error" not in printed


def test_dry_run_encodes_and_trains_with_and_without_padding(capsys):
    assert fused.main(TINY) == 0
    printed = capsys.readouterr().out
    assert printed.count("encode") >= 2 and printed.count("train") >= 2
    assert "Error" not in printed and "allowed error" not in printed


def test_packed_and_padded_batches_hold_the_same_tokens():
    case = bert.Case(4, 64, 16, 500, 2, 128)
    data = bert.random_data(case, 4)
    for step in range(6):  # into a second epoch
        packed, padded = (data.batch(step, layout, "cpu") for layout in (True, False))
        tokens = packed["input_ids"][: packed["n_tokens"]]
        assert tokens.tolist() == padded["input_ids"][padded["attention_mask"]].tolist()
        assert packed["n_targets"] == padded["n_targets"]


@pytest.mark.parametrize("kernel, kind", [("nvjet_sm90_tst_192x128", "matrix products"), ("flash_bwd_dq_kernel", "attention"),
                                          ("triton_per_fused_add_native_layer_norm_5", "norms and residuals"),
                                          ("triton_poi_fused__to_copy_3", "casts"), ("column_sums_kernel", "reductions of gradients"),
                                          ("cross_entropy_kernel", "loss")])
def test_kernels_have_kinds(kernel, kind):
    assert kernels.kind_of(kernel) == kind


def test_kernels_of_flash_are_attention():
    folders = [ROOT / "kernels" / "attnzoo_kernels" / name for name in ("_triton", "_gluon", "flash")]
    sources = chain.from_iterable(folder.rglob("*.py") for folder in folders)
    names = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), flags=re.M)}
    names.remove("column_sums_kernel")  # which norms and GELU launch
    assert len(names) > 8 and {kernels.kind_of(name) for name in names} == {"attention"}, names


@pytest.mark.slow
def test_batching_is_timed(tmp_path, capsys):
    tiny = ["--sequences", "80", "--layers", "1", "--width", "64", "--rounds", "1", "--output", str(tmp_path)]
    assert batching.main(["time", *tiny]) == 0
    with (tmp_path / "batching-time.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["way"] for row in rows} == set(batching.WAYS) and all(int(row["tokens_a_second"]) > 0 for row in rows)


def test_batching_is_counted(tmp_path, capsys):
    assert batching.main(["--sequences", "700", "--output", str(tmp_path)]) == 0
    with (tmp_path / "batching.csv").open(newline="") as file:
        padding = {row["way"]: float(row["padding"]) for row in csv.DictReader(file) if row["lengths"] == "uniform"}
    assert padding["random"] > padding["by_length"] and padding["scheduled, step_tokens=512"] < padding["random"]
