"""Comparisons that are interrupted, repeated, changed, short of memory, read in several ways, or of several seeds."""

import csv
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import initialize_config_dir
from tiny_run import ROOT, compose_tiny

from attnzoo import checkpoint, runner
from attnzoo.errors import UserError
from attnzoo.evaluation import compare, memory, perplexity, report
from attnzoo.evaluation.measurement import FILE, Store, digest, key
from attnzoo.evaluation.progress import Progress
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.validation import validation_loss
from attnzoo.run.loggers import shared_folder

QUICK = [
    "accelerator=cpu",
    "precision=32",
    "evaluation.lengths=[16,64]",
    "evaluation.tasks.perplexity.min_tokens=1",
    "evaluation.tasks.perplexity.max_tokens=500",
    "evaluation.tasks.perplexity.protocols=[windows,sliding]",
]
N = 5  # measurements of that: validation, and two protocols at two lengths


def train(folder: Path, name: str, *overrides: str) -> Path:
    shorter = ["trainer.max_steps=2", "callbacks.sample=null", "callbacks.plot=null", "model.n_layers=1"]
    runner.train(compose_tiny(folder, *shorter, f"run_dir={folder / name}", *overrides))
    return folder / name


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A sweep of a seed each, and beside it a run with learned positions."""
    folder = tmp_path_factory.mktemp("trained")
    for seed in (1, 2):
        train(folder, f"sweep/{seed}", f"seed={seed}")
    train(folder, "other/learned", "model.positions=learned", "attention=sdpa")
    return folder


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    """A copy, so that no test finds what another has measured."""
    shutil.copytree(trained / "sweep", tmp_path / "sweep")
    shutil.copytree(trained / "other", tmp_path / "sweep" / "other")
    return tmp_path / "sweep"


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """(task, length) of every measurement that is really done."""
    done, measure = [], compare._measure

    def count(one, *rest):
        done.append((one.task, one.length))
        return measure(one, *rest)

    monkeypatch.setattr(compare, "_measure", count)
    return done


@pytest.fixture
def evaluate(tmp_path):
    def evaluate(*overrides: str, quick: list[str] = QUICK) -> list[dict]:
        folder = tmp_path / "result"
        shutil.rmtree(folder, ignore_errors=True)
        runner.evaluate(compose_tiny(tmp_path, f"run_dir={folder}", *quick, *overrides, config="eval"))
        return table(folder / "results.csv")

    return evaluate


def table(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(runs, evaluate, measured):
    first = evaluate(f"runs={runs}")
    assert len(measured) == 3 * N
    measured.clear()
    assert evaluate(f"runs={runs}") == first
    # the learned positions end at 32: what failed is tried again
    assert measured == [("perplexity_windows", 64), ("perplexity_sliding", 64)]
    measured.clear()
    (runs / "3").mkdir()
    shutil.copytree(runs / "1", runs / "3", dirs_exist_ok=True, ignore=shutil.ignore_patterns(FILE))
    assert len(evaluate(f"runs=[{runs / '1'},{runs / '3'}]")) > 0
    assert len(measured) == N, "only the new run is measured"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "+attention.window_size=[8,0]",
        "model.rope_scaling=linear model.rope_factor=2.0",
        "evaluation.tasks.perplexity.stride=0.25",
        "precision=64",
        "remeasure=true",
    ],
)
def test_what_changes_the_result_is_measured_again(runs, evaluate, measured, change):
    evaluate(f"ckpt_path={runs / '1'}")
    measured.clear()
    evaluate(f"ckpt_path={runs / '1'}", *change.split())
    assert len(measured) == (4 if "stride" in change else N)


@pytest.mark.slow
def test_other_weights_are_measured_again(runs, evaluate, measured):
    evaluate(f"ckpt_path={runs / '1'}")
    shutil.copy(runs / "2" / "checkpoints" / "best.ckpt", runs / "1" / "checkpoints" / "best.ckpt")
    measured.clear()
    evaluate(f"ckpt_path={runs / '1'}")
    assert len(measured) == N


def test_an_interrupted_comparison_loses_nothing(runs, evaluate, measured, monkeypatch, tmp_path, caplog):
    whole = evaluate(f"runs={runs}", f"store={tmp_path / 'elsewhere'}")
    measured.clear()
    counted = compare._measure

    def interrupted(one, *rest):
        if len(measured) == N + 2:
            raise KeyboardInterrupt
        return counted(one, *rest)

    monkeypatch.setattr(compare, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt), caplog.at_level("INFO"):
        evaluate(f"runs={runs}")
    assert "the same command goes on" in caplog.text
    part = table(tmp_path / "result" / "results.csv")
    assert part == whole[: len(part)] and {row["run"] for row in part} == {"1", "2"}
    monkeypatch.setattr(compare, "_measure", counted)
    assert evaluate(f"runs={runs}") == whole
    assert len(measured) == 3 * N


def test_a_line_that_was_cut_off_is_measured_again(runs, evaluate, measured):
    whole = evaluate(f"ckpt_path={runs / '1'}")
    store = runs / "1" / FILE
    store.write_bytes(store.read_bytes()[:-20])
    measured.clear()
    assert evaluate(f"ckpt_path={runs / '1'}") == whole and len(measured) == 1
    lines = store.read_text().splitlines()
    assert len(lines) == N + 1 and json.loads(lines[-1])["rows"]
    measured.clear()
    evaluate(f"ckpt_path={runs / '1'}")
    assert measured == []


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_a_row_and_the_rest_goes_on(runs, evaluate, measured, monkeypatch):
    score = perplexity.score

    def short_of_memory(model, documents, windows, length, **options):
        if length == 64:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        return score(model, documents, windows, length, **options)

    monkeypatch.setattr(perplexity, "score", short_of_memory)
    rows = evaluate(f"runs=[{runs / '1'},{runs / '2'}]")
    failed = [row for row in rows if row["length"] == "64"]
    assert len(failed) == 4 and all("out of GPU memory" in row["note"] and row["value"] == "" for row in failed)
    assert {row["run"] for row in rows if row["value"] and row["task"] == "perplexity_sliding"} == {"1", "2"}
    monkeypatch.setattr(perplexity, "score", score)
    measured.clear()
    assert not any("memory" in row["note"] for row in evaluate(f"runs=[{runs / '1'},{runs / '2'}]"))
    assert len(measured) == 4


def test_a_length_that_no_memory_holds_is_a_row_that_says_why(runs, evaluate, measured):
    asked = ["evaluation=passkey", "evaluation.lengths=[320,99999999]", "evaluation.tasks.passkey.depths=1",
             "evaluation.tasks.passkey.examples=1", "accelerator=cpu", "precision=32", "+attention.impl=reference"]
    rows = evaluate(f"ckpt_path={runs / '1'}", quick=asked)
    assert {row["length"] for row in rows if row["value"] and row["task"] == "passkey"} == {"320"}
    (long,) = [row for row in rows if row["length"] == "99999999"]
    assert re.match(r"not tried: a row of 99999999 tokens needs at least .*B of memory, and about .* GB are free", long["note"])


def test_what_a_row_takes_grows_with_the_pairs_only_where_they_are_held(trained):
    flash, sdpa = (checkpoint.load(trained / name / "checkpoints" / "best.ckpt").model for name in ("sweep/1", "other/learned"))
    assert all(memory.least_bytes(model, 2000) == 2 * memory.least_bytes(model, 1000) for model in (flash, sdpa))
    flash.blocks[0].attention.impl = "reference"
    assert memory.least_bytes(flash, 10**6) > 1000 * memory.least_bytes(sdpa, 10**6)
    assert memory.shortage(sdpa, 1000) is None and memory.free_bytes(torch.device("cpu")) > 10**8


def test_a_containers_limit_counts_without_its_cache_of_files(monkeypatch, tmp_path):
    for name, text in {"max": "1000", "current": "900", "stat": "anon 100\nfile 800\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_bytes(torch.device("cpu")) == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 10**8


def test_weights_of_nan_give_rows_that_say_so(runs, evaluate, tmp_path):
    path = runs / "1" / "checkpoints" / "best.ckpt"
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.blocks.0.mlp.up_proj.weight"][0, 0] = math.nan
    torch.save(content, path)
    asked = ["evaluation=passkey", "evaluation.lengths=[320]", "evaluation.tasks.passkey.depths=1", "evaluation.tasks.passkey.examples=2",
             "accelerator=cpu", "precision=32"]
    rows = evaluate(f"runs=[{runs / '1'},{runs / '2'}]", quick=asked)
    broken = [row for row in rows if row["run"] == "1"]
    assert {(row["value"], row["stderr"]) for row in broken} == {("nan", "")}
    assert all("1 of " in row["note"] and "up_proj.weight" in row["note"] for row in broken if row["depth"])
    assert {row["value"] for row in rows if row["run"] == "2" and row["metric"] == "exact_match"} <= {"0.0", "0.5", "1.0"}
    assert "training diverged" in (tmp_path / "result" / "summary.md").read_text()


def test_a_device_that_is_not_there_is_one_line(runs, evaluate):
    for accelerator in ("tpu", "mps"):
        with pytest.raises((UserError, ValueError), match=f"accelerator='?{accelerator}") as error:
            evaluate(f"ckpt_path={runs / '1'}", quick=[f"accelerator={accelerator}"])
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_is_read_in_several_ways(runs, evaluate):
    ways = '["","attention=dual_chunk","model.rope_scaling=ntk model.rope_factor=4","attention=flash"]'
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        from hydra import compose

        cfg = compose("eval", [f"run_dir={runs / 'result'}", f"ckpt_path={runs / '1'}", *QUICK, f"readings={ways}"])
        runner.evaluate(cfg)
    rows = table(runs / "result" / "results.csv")
    expected = [("flash", ""), ("dual_chunk", "attention=dual_chunk"), ("flash", "model.rope_scaling=ntk model.rope_factor=4")]
    assert list(dict.fromkeys((row["attention"], row["reading"]) for row in rows)) == expected
    losses = [row for row in rows if row["task"] == "perplexity_sliding" and row["metric"] == "loss"]
    value = {(row["reading"], row["length"]): row["value"] for row in losses}
    assert len({value[reading, "64"] for _, reading in expected}) == 3
    # within one chunk dual chunk attention is ordinary attention, and NTK is not
    assert float(value["", "16"]) == pytest.approx(float(value["attention=dual_chunk", "16"]), rel=1e-5)


@pytest.mark.parametrize(
    "readings, message",
    [
        ("[]", "readings="),
        ("attention=sdpa", "readings="),
        ("al", "readings=al: there is no such list; it must be one of all, methods, training_free, .*like it: all"),
        ('["attention=flush"]', "attention=flush: there is no such option; like it: flash; it must be one of block_sparse, .*flash"),
        ('["model.rope_scalin=ntk"]', "model.rope_scalin: there is no such key; like it: rope_scaling"),
        ('["model.rope_scaling=nkt"]', "model.rope_scaling='nkt': must be none or linear or ntk"),
        ('["+attention.window_size=[{context},0]", "model.rope_scaling=ntk model.rope_factor=0"]', "model.rope_factor=0: must be"),
        ('["data=text"]', "'data=text' must override attention, layers or model"),
        ('["model.dim=3"]', "dim"),
        ('["model.rope_scaling=\\"ntk"]', "quotation"),
    ],
)
def test_wrong_ways_are_one_line(runs, readings, message):
    from hydra import compose

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        quoted = f"'{readings}'" if not readings.startswith("[") else readings
        cfg = compose("eval", [f"run_dir={runs / 'result'}", f"ckpt_path={runs / '1'}", *QUICK, f"readings={quoted}"])
        with pytest.raises(UserError, match=message) as error:
            runner.evaluate(cfg)
    assert "\n" not in str(error.value)


def test_seeds_are_averaged(runs, evaluate, tmp_path, monkeypatch):
    drawn, tables = [], {}

    class Recorder:
        def log_table(self, key, columns, data):
            tables[key] = [dict(zip(columns, line, strict=True)) for line in data]

        log_metrics = log_image = save = log_hyperparams = lambda *_, **__: None

    draw = report.draw
    monkeypatch.setattr(report, "draw", lambda rows, folder: drawn.extend(rows) or draw(rows, folder))
    monkeypatch.setattr(runner, "build_loggers", lambda *_: [Recorder()])
    rows = evaluate(f"runs={runs}")
    averages = table(tmp_path / "result" / "averages.csv")
    for average in averages:
        same = [row for row in rows if all(row[name] == average[name] for name in ("task", "length", "depth", "metric"))]
        values = [float(row["value"]) for row in same if row["run"] in "12"]
        assert len(values) == 2 and float(average["value"]) == pytest.approx(sum(values) / 2)
        assert float(average["stderr"]) == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert {row["settings"] for row in rows if row["run"] in "12"} == {averages[0]["run"]}
    text = (tmp_path / "result" / "summary.md").read_text()
    assert text.index("# Averages over seeds") < text.index("# Runs")
    # the plots show the averages, and runs that have no second seed themselves
    assert {row.run for row in drawn} == {averages[0]["run"], "other/learned"}
    told = [line for key, lines in tables.items() if key.startswith("eval_averages/") for line in lines]
    assert sorted((line["task"], line["value"]) for line in told) == sorted((row["task"], float(row["value"])) for row in averages)


def test_unlike_tokenizers_are_compared_by_bits_per_byte(trained, runs, evaluate, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    texts = [path.read_text() for path in (trained / "corpus").iterdir()]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"]))
    backend.save(str(tmp_path / "tokenizer.json"))
    bpe = train(trained, "bpe", f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    evaluate(f"runs=[{runs / '1'},{bpe}]")
    text = (tmp_path / "result" / "summary.md").read_text()
    assert "perplexity_sliding: bits_per_byte by length" in text and "perplexities cannot be" in text
    assert "perplexity by length" not in text


def test_a_configuration_that_does_not_resolve_is_one_row(runs, evaluate):
    (runs / "2" / "config.yaml").write_text("seed: 2\ndata: {seq_len: 32, batch_size: '${missing}'}\n")
    rows = evaluate(f"runs=[{runs / '1'},{runs / '2'}]")
    (failed,) = [row for row in rows if row["run"] == "2"]
    assert "missing" in failed["note"] and any(row["value"] for row in rows)


def test_an_evaluation_without_tasks_is_refused(runs, evaluate):
    for empty in (["evaluation.tasks=null"], ["evaluation.tasks.validation=null", "evaluation.tasks.perplexity=null"]):
        with pytest.raises(UserError, match="evaluation.tasks is empty"):
            evaluate(f"ckpt_path={runs / '1'}", *empty, quick=[])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("evaluation.tasks.perplexity.stride=half", "evaluation.tasks.perplexity.stride='half': must be"),
        ("evaluation.tasks.perplexity.protocols=3", "evaluation.tasks.perplexity.protocols=3: must be a list"),
        ("store=3", "store=3: must be a text or null"),
        ("trust=mine", "trust=.mine.: must be a list of texts"),
    ],
)
def test_options_of_a_wrong_kind_are_refused_by_name(runs, evaluate, override, says):
    with pytest.raises((UserError, ValueError), match=says):
        evaluate(f"ckpt_path={runs / '1'}", override)


def test_results_that_cannot_be_kept_are_an_error_at_once(runs, evaluate, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="store="):
        evaluate(f"ckpt_path={runs / '1'}", f"store={tmp_path / 'file' / 'below'}")


@pytest.mark.slow
def test_everything_at_once(runs, evaluate, tmp_path):
    small = [
        "evaluation=long_context",
        "accelerator=cpu",
        "precision=32",
        "evaluation.lengths=[32,400]",
        "evaluation.tasks.perplexity.min_tokens=1",
        "evaluation.tasks.passkey.depths=2",
        "evaluation.tasks.passkey.examples=2",
        "evaluation.tasks.needle.depths=[0.5]",
        "evaluation.tasks.needle.examples=2",
        "evaluation.tasks.ruler.tasks=[niah_single_1]",
        "evaluation.tasks.ruler.examples=1",
        "evaluation.tasks.cost.repeats=1",
        "evaluation.tasks.cost.new_tokens=2",
    ]
    rows = evaluate(f"runs=[{runs / '1'},{runs / 'other'}]", quick=small)
    done = {(row["run"], row["task"], row["length"]) for row in rows if row["value"]}
    assert {task for _, task, _ in done} >= {"validation", "perplexity_windows", "passkey", "needle", "cost"}
    learned = {row["task"]: row["note"] for row in rows if row["run"] == "other/learned" and row["length"] == "400" and not row["value"]}
    assert {"perplexity_windows", "passkey", "needle", "cost"} <= learned.keys() and "max_positions=32" in learned["cost"]
    plots = {path.name for path in (tmp_path / "result").glob("*.png")}
    assert {"passkey.png", "needle.png", "answers_by_length.png", "cost_by_length.png", "quality_against_cost.png"} <= plots


def test_cost_of_training_in_the_runs_precision(runs, evaluate):
    short = ["accelerator=cpu", "precision=bf16-mixed", "evaluation=cost", "evaluation.lengths=[16]", "evaluation.tasks.cost.repeats=1"]
    rows = evaluate(f"runs={runs / '1'}", "evaluation.tasks.cost.training_tokens=64", quick=short)
    (trained,) = [row for row in rows if row["metric"] == "training_tokens_per_second"]
    assert float(trained["value"]) > 0 and trained["note"] == "steps of 4 rows"


def test_the_bar_covers_all_runs_and_ends_full():
    with Progress(3) as progress:
        progress.begin_reading("first")
        progress.plan(100)
        assert progress.bar.total == 300
        progress.advance(100)
        progress.end_reading()
        progress.begin_reading("second, that fails before it is planned")
        progress.end_reading()
        progress.begin_reading("third")
        progress.plan(50)
        progress.advance(20)
        progress.end_reading()
        assert progress.bar.total == progress.done == 150


def test_without_a_terminal_a_line_says_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level("INFO")
    with Progress(2, seconds=0.0) as progress:
        progress.begin_reading("first, that cannot be read")
        progress.end_reading()
        progress.begin_reading("second")
        progress.plan(4000)
        progress.begin("second: validation 128")
        progress.advance(1000)
    assert [record.message for record in caplog.records] == ["second: validation 128: 25% of all 4.00k tokens read"]


def test_the_store_reads_rows_with_old_names_of_columns(tmp_path):
    (tmp_path / FILE).write_text('{"key": "k", "rows": [{"overrides": "attention=sdpa", "task": "validation", "value": 1.5}]}\n')
    assert Store(tmp_path / FILE).finished == {"k": [Row(reading="attention=sdpa", task="validation", value=1.5)]}


def test_the_store_keeps_rows_as_they_are(tmp_path):
    rows = [Row(task="a", length=3, value=1 / 3, stderr=float("nan"), note="é"), Row(task="b"), Row(value=float("inf"), depth=0.0)]
    store = Store(tmp_path / "below" / FILE)
    store.add("k", rows)
    assert repr(Store(store.path).finished["k"]) == repr(rows)
    assert key({"a": 1, "b": [2]}) == key({"b": [2], "a": 1}) != key({"a": 1, "b": [3]})
    assert digest(store.path) != digest(store.path, store.path)


@pytest.mark.parametrize(
    ("runs", "name"),
    [("multirun/a", "a"), (["multirun/a/0", "multirun/a/1"], "a"), (["multirun/a", "multirun/b"], "multirun"), (None, None), ([], None)],
)
def test_the_folder_of_the_runs_is_the_group(runs, name):
    assert shared_folder(runs) == name


@pytest.mark.parametrize("other", [{"min_seq_len": 5}, {"predict_prompts": True}, {"cross_documents": True}])
def test_validation_of_other_rows_is_another_measurement(other):
    def settings(**options):
        data = SimpleNamespace(objective="lm", seq_len=8, eval_batch_size=2, val_dataloader=lambda: [], **options)
        return dict(validation_loss(None, data).measurements[0].settings)

    assert settings(**other) == settings() | other != settings()
