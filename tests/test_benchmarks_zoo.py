"""The zoo's own results: from folders of runs and evaluations to tables, a figure and a table for people."""

import csv
import json

import pytest

from attnzoo.errors import UserError
from attnzoo.evaluation.results import Row, write_csv
from benchmarks import zoo, zoo_tables

RECORD = {
    "attention": {"_target_": "attnzoo.attention.flash.FlashAttention"}, "model": {"positions": "rotary"}, "parameters": 12,
    "device": "cpu", "versions": {"torch": "2"}, "git": {"commit": "f" * 40},
}  # fmt: skip
CONFIG = """
seed: {seed}
tags: [{experiment}]
data: {{_target_: attnzoo.data.{data}, seq_len: 1024, batch_size: 2, n_pairs: 4}}
optimizer: {{lr: 0.01}}
"""
METRICS = "step,perf/tokens_per_second,train/loss,val/accuracy,val/loss\n4,100,3.0,,\n9,300,1.0,0.5,2.0\n"


def write_run(folder, seed, experiment="extrapolation", kind="passkey", **record):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({**RECORD, **record}))
    (folder / "config.yaml").write_text(CONFIG.format(seed=seed, experiment=experiment, data=kind))
    (folder / "metrics.csv").write_text(METRICS)


@pytest.fixture
def results(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"in/flash_{seed}", seed)
        rows = [
            Row(run=f"flash_{seed}", seed=seed, task="perplexity_windows", length=1024, value=1.0 + seed, count=9),
            Row(run=f"flash_{seed}", seed=seed, task="perplexity_windows", length=4096, value=5.0 + seed, count=9),
            Row(run=f"flash_{seed}", seed=seed, task="perplexity_windows", length=4096, metric="perplexity", value=9.0),
            Row(run=f"flash_{seed}", seed=seed, task="passkey", length=1024, metric="exact_match", value=0.5, count=4),
            Row(run=f"flash_{seed}", seed=seed, task="passkey", length=1024, depth=0.0, metric="exact_match", value=0.1, count=4),
            Row(run=f"flash_{seed}", seed=seed, reading="attention=dual_chunk", task="perplexity_windows", length=1024, value=3.0),
        ]
        (tmp_path / f"in/eval_{seed}").mkdir()
        write_csv(rows, path := tmp_path / f"in/eval_{seed}/results.csv")
    path.write_text(path.read_text().replace(",reading,", ",overrides,"))  # the column's old name
    write_run(tmp_path / "in/pairs", 1, "recall_zoology", "recall")
    (tmp_path / "out").mkdir()
    zoo.main(["collect", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    return tmp_path / "out"


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_collect_joins_runs_and_evaluations(results):
    rows = read(results / "zoo-evaluations.csv")
    assert len(rows) == 8 and {row["variant"] for row in rows} == {"flash"}
    assert {row["reading"] for row in rows} == {"", "attention=dual_chunk"} and not any(row["depth"] for row in rows)
    runs = read(results / "zoo-training.csv")
    assert len(runs) == 3 and {row["steps"] for row in runs} == {"10"} and {row["tokens"] for row in runs} == {str(10 * 2 * 1024)}
    assert {row["tokens_per_second"] for row in runs} == {"200"}
    assert [row["accuracy"] for row in read(results / "zoo-curves.csv")] == ["0.5"]


def test_the_table_has_means_and_spreads_of_seeds_and_the_figure_is_drawn(results, capsys):
    zoo.main(["show", "--output", str(results)])
    flash, dual = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| flash")][:2]
    assert flash.startswith("| flash | 2 | 2.500 ± 0.500 | 6.500 ± 0.500 |  | 4 of 8 |") and flash.endswith("| 0.00 M |")
    assert dual.startswith("| flash, read with dual_chunk | 2 | 3.000 ± 0.000 |")
    assert (results / "zoo.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("attention", "positions", "name"),
    [
        ({"_target_": "attnzoo.attention.flash.FlashAttention"}, "alibi", "flash ALiBi"),
        ({"_target_": "attnzoo.attention.differential.DifferentialAttention", "version": 1, "norm": False}, "rotary",
         "differential V1 without norm"),
        ({"_target_": "attnzoo.attention.differential.DifferentialAttention", "version": 2, "norm": True}, "rotary", "differential V2"),
        ({"_target_": "attnzoo.attention.distance_bias.DistanceBiasAttention", "kind": "t5"}, "none", "distance_bias t5"),
    ],
)  # fmt: skip
def test_variants_are_named_by_what_is_not_the_default(attention, positions, name):
    assert zoo.variant({"attention": attention, "model": {"positions": positions}}) == name


def test_runs_of_two_sweeps_are_told_apart_by_their_folders(tmp_path, capsys):
    """As eval.py names them, with all sweeps, and with one alone."""
    for sweep in ("a", "b"):
        write_run(tmp_path / sweep / "0_gpt", 1, model={"positions": "alibi" if sweep == "b" else "rotary"})
    rows = [Row(run=f"{sweep}/0_gpt", seed=1, task="passkey", length=64, value=float(sweep == "b"), count=2) for sweep in ("a", "b", "c")]
    (tmp_path / "eval").mkdir()
    write_csv(rows, tmp_path / "eval/results.csv")
    zoo.collect([str(tmp_path)], tmp_path)
    assert [(row["variant"], row["value"]) for row in read(tmp_path / "zoo-evaluations.csv")] == [("flash", "0.0"), ("flash ALiBi", "1.0")]
    assert "left out, no run of that name is below these folders: c/0_gpt in" in capsys.readouterr().err
    write_csv([Row(run="0_gpt", seed=1, task="passkey", length=64, value=0.5, count=2)], tmp_path / "eval/results.csv")
    with pytest.raises(UserError, match=r"eval.results.csv can be an evaluation of the runs in \S*a and of those in \S*b: give"):
        zoo.collect([str(tmp_path)], tmp_path)
    write_run(tmp_path / "b/1_gpt", 2)
    rows = [Row(run=f"{i}_gpt", seed=1 + i, task="passkey", length=64, value=0.5, count=2) for i in (0, 1)]
    write_csv(rows, tmp_path / "eval/results.csv")
    zoo.collect([str(tmp_path)], tmp_path)
    assert [row["variant"] for row in read(tmp_path / "zoo-evaluations.csv")] == ["flash ALiBi", "flash"]  # both below b


def test_a_second_tag_is_a_name(tmp_path):
    write_run(tmp_path / "run", 1, "extrapolation, learning rate 1e-3")
    zoo.collect([str(tmp_path)], tmp_path)
    (row,) = read(tmp_path / "zoo-training.csv")
    assert (row["experiment"], row["variant"]) == ("extrapolation", "flash learning rate 1e-3")


def test_collect_asks_for_folders(capsys):
    with pytest.raises(SystemExit):
        zoo.main(["collect"])
    assert "collect needs the folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "reading", "impl"),
    [
        ("", "", "gluon"),
        ("attention=dual_chunk attention.stages=['intra']", "attention=dual_chunk attention.stages=['intra']", "gluon"),
        ("attention.impl=triton", "", "triton"),
        ("attention.impl=None model.rope_scaling=ntk", "model.rope_scaling=ntk", ""),
    ],
)
def test_the_operators_path_is_no_other_reading(line, reading, impl):
    assert zoo._reading(line, "gluon") == (reading, impl)


def test_a_cell_that_broke_gives_no_number(results):
    path = results / "zoo-evaluations.csv"
    line = "flash,,,{seed},perplexity_windows,8192,,loss,{value},9,,\n"
    path.write_text(path.read_text() + line.format(seed=1, value="nan") + line.format(seed=2, value=7.0))
    assert zoo_tables.Table(results).values(("flash", ""), "perplexity_windows", 8192) == [7.0]


@pytest.mark.slow
def test_the_other_tables(results):
    write_run(results.parent / "in/butterfly_1", 1, "listops", "listops")
    texts = {"classes": ["0", "1"], "splits": {"train": {"tokens": 4000, "documents": 4}}}
    (results.parent / "in/butterfly_1/record.json").write_text(json.dumps({**RECORD, "data": texts}))
    (results.parent / "in/more").mkdir()
    run = {"run": "butterfly_1", "seed": 1}
    rows = [
        Row(**run, task="classification", metric="accuracy", value=0.25, count=8),
        Row(**run, task="cost", length=2048, metric="prefill_seconds", value=0.5),
        Row(**run, task="cost", length=2048, metric="peak_memory_gb", value=7.0),
        Row(**run, task="loss_by_position", length=32768, depth=1024, value=1.5),
        Row(**run, task="all_tokens", length=1024, value=0.75),
    ]
    write_csv(rows, results.parent / "in/more/results.csv")
    zoo.main(["collect", str(results.parent / "in"), "--output", str(results)])
    made = zoo_tables.tables(zoo_tables.Table(results))
    assert made["Seconds to read one sequence"].endswith("| flash | 0.5000 |") and made["GB of memory at most"].endswith("| flash | 7.00 |")
    assert made["Loss by position, in windows of 32768"].endswith("| flash |  | 1.500 |  |  |  |  |  |  |  |")
    # 200 tokens a second, 2 sequences of 1000 tokens a step
    assert made["ListOps"].endswith("| flash | 10 | 25.0 % | 50.0 % | 1 | 0.00 M | 0.1 |")
    assert made["Associative recall"].endswith("| flash | 1 | 0.01 | 50.0 % of 10 |")
    assert made["Losses and keys within the training context"].endswith("| flash | 0.7500 |  |  |  |  |  |  | 2.0000 ± 0.0000 | 2 |")


def test_speed_of_listops_is_that_of_runs_in_turn(results):
    texts = {"data": {"classes": ["0", "1"], "splits": {"train": {"tokens": 4000, "documents": 4}}}}
    write_run(results.parent / "in/long", 1, "listops", "listops", **texts)
    for name, attention in (("short_a", "flash.FlashAttention"), ("short_b", "flash.FlashAttention"), ("short_c", "sdpa.SDPAttention")):
        target = {"_target_": f"attnzoo.attention.{attention}"}
        write_run(results.parent / "in" / name, 1, zoo_tables.SPEED, "listops", **texts, attention=target)
    metrics = results.parent / "in/short_a/metrics.csv"
    metrics.write_text(metrics.read_text().replace("100", "2000000").replace("300", "2000000"))
    zoo.main(["collect", str(results.parent / "in"), "--output", str(results)])
    *_, flash, sdpa = zoo_tables.tables(zoo_tables.Table(results))["ListOps"].splitlines()
    assert flash == "| flash | 10 |  | 50.0 % | 1 | 1.00 ± 1.00 M | 500.1 ± 499.9 |"
    assert sdpa == "| sdpa |  |  |  | 0 | 0.00 M | 0.1 |"
    assert len(read(results / "zoo-curves.csv")) == 2  # the long run's and that of recall


def test_cost_beside_quality_and_in_a_figure_of_its_own(results, capsys):
    (results.parent / "in/cost").mkdir()
    values = {"prefill_seconds": 0.5, "peak_memory_gb": 7.0, "training_tokens_per_second": 300.0}
    rows = [
        Row(run="flash_1", seed=1, task="cost", length=length, metric=metric, value=value * length / 1024)
        for length in (1024, 32768) for metric, value in values.items()
    ]  # fmt: skip
    write_csv(rows, results.parent / "in/cost/results.csv")
    zoo.main(["collect", str(results.parent / "in"), "--output", str(results)])
    head, _, flash = capsys.readouterr().out.splitlines()[:3]
    assert head.endswith("| training tokens/s | s to read 32768 | GB |") and flash.endswith("| 16.00 | 224.00 |")
    assert zoo_tables.tables(zoo_tables.Table(results))["Training, tokens a second"].endswith("| flash | 300 | 9600 |")
    assert (results / "zoo-cost.png").read_bytes()[:4] == b"\x89PNG"


def test_checkpoints_read_in_many_ways_have_files_of_their_own(results, capsys):
    (results.parent / "in/many").mkdir()
    write_run(results.parent / "in/untagged", 1)  # of no experiment
    untagged = results.parent / "in/untagged/config.yaml"
    untagged.write_text(untagged.read_text().replace("[extrapolation]", "[]"))
    rows = [
        Row(run=f"flash_{seed}", seed=seed, reading=reading, task=task, metric=metric, length=length, value=value, count=4)
        for seed in (1, 2) for reading in ("", "attention=dual_chunk") for length in (1024, 4096, 32768) for task, metric, value in (
            ("perplexity_windows", "loss", 0.5), ("longppl_windows", "longppl", 1.0 + seed), ("needle_4_keys", "exact_match", seed / 4),
            ("cost", "prefill_seconds", 0.25))]
    write_csv(rows, results.parent / "in/many/results.csv")
    zoo.main(["collect", str(results.parent / "in"), "--name", zoo_tables.READINGS, "--output", str(results)])
    made = zoo_tables.readings(zoo_tables.Table(results, zoo_tables.READINGS))
    *_, trained, read_otherwise = made["Trained; the checkpoints of flash, read otherwise"].splitlines()
    assert trained.startswith("| as trained |") and read_otherwise.startswith("| dual_chunk | 2 |")
    assert "| 2.50 ± 0.50 | 2.50 ± 0.50 |" in read_otherwise and read_otherwise.endswith("| 38 % (25 to 50) | 250 |")
    assert (results / "readings.png").read_bytes()[:4] == b"\x89PNG" and not (results / "readings-curves.csv").exists()
    assert "dual_chunk" in capsys.readouterr().out


def test_long_range_arena_has_a_table_of_its_own(tmp_path, capsys):
    for seed in (1, 2):
        write_run(tmp_path / f"in/text_{seed}", seed, "lra, text", "movie_reviews")
        rows = [Row(run=f"text_{seed}", seed=seed, task="classification", length=1024, metric=metric, value=value)
                for metric, value in (("accuracy", 0.6 + seed / 100), ("training_steps_per_second", 7.0), ("training_memory_gb", 1.5))]
        (tmp_path / f"in/eval_{seed}").mkdir()
        write_csv(rows, tmp_path / f"in/eval_{seed}/results.csv")
    (tmp_path / "out").mkdir()
    zoo.main(["collect", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--name", "lra"])
    assert "| flash text | 10 | 61.5 ± 0.5 % | 50.0 ± 0.0 % | 2 | 7.0 ± 0.0 | 1.5 ± 0.0 |" in capsys.readouterr().out
