"""`python eval.py` on runs that were really trained: equal to training, overridable, and unshaken by runs that fail."""

import csv
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from attnzoo import runner
from attnzoo.data.tokenizers import NumberTokenizer
from attnzoo.errors import UserError
from attnzoo.evaluation import subject
from attnzoo.evaluation.results import COLUMNS

CONFIGS = str(Path(__file__).parents[1] / "configs")
SEQ_LEN = 32
SUPPORTS = {path.stem: get_class(OmegaConf.load(path)["_target_"]).supports for path in sorted(Path(CONFIGS, "attention").glob("*.yaml"))}


def config(name: str, *overrides: str):
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose(name, list(overrides))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Thirty texts of 100 to 1500 bytes, out of few words."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(20)]
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=20 + 10 * i)))
    return folder


@pytest.fixture(scope="module")
def train(corpus, tmp_path_factory):
    """Trains a run of four steps in the folder `name`; returns the folder and the last metrics."""
    root = tmp_path_factory.mktemp("runs")

    def train(name: str, *overrides: str) -> tuple[Path, dict]:
        sizes = [
            "model.dim=32",
            "model.n_layers=1",
            "model.n_heads=2",
            f"data.seq_len={SEQ_LEN}",
            "data.batch_size=4",
            "data.val_fraction=0.3",
        ]
        quick = ["trainer=cpu", "trainer.max_steps=4", "trainer.val_check_interval=2", "callbacks.sample=null", "callbacks.plot=null"]
        where = [f"run_dir={root / name}", f"data.cache_dir={root / '.cache'}", "data=text", f"data.paths=[{corpus}]"]
        return root / name, runner.train(config("train", *where, *sizes, *quick, *overrides))

    return train


@pytest.fixture(scope="module")
def flash(train):
    return train("sweep/0_flash")


@pytest.fixture(scope="module")
def bert(train):
    return train("sweep/1_bert", "model=bert_tiny")


@pytest.fixture
def evaluate(tmp_path):
    """Evaluates quickly; returns the rows of results.csv."""

    def evaluate(*overrides: str) -> list[dict]:
        quick = ["evaluation.lengths=[16,64]", "accelerator=cpu"]
        if "evaluation=validation" not in overrides:
            quick.append("evaluation.tasks.perplexity.min_tokens=1")
        runner.evaluate(config("eval", f"run_dir={tmp_path}", *quick, *overrides))
        with open(tmp_path / "results.csv", newline="") as file:
            return list(csv.DictReader(file))

    return evaluate


def value(rows: list[dict], task: str, metric: str = "loss", **columns) -> float:
    (row,) = [row for row in rows if row["task"] == task and row["metric"] == metric and all(row[k] == v for k, v in columns.items())]
    return float(row["value"])


@pytest.mark.parametrize("kind", ["flash", "bert"])
def test_validation_equals_what_training_reported(request, evaluate, kind):
    folder, metrics = request.getfixturevalue(kind)
    rows = evaluate(f"ckpt_path={folder}", "checkpoint=last", "evaluation=validation")
    assert value(rows, "validation") == pytest.approx(metrics["val/loss"])
    assert value(rows, "validation", "perplexity") == pytest.approx(metrics["val/ppl"])
    assert value(rows, "validation", "bits_per_byte") == pytest.approx(metrics["val/bpb"])


def test_one_checkpoint(flash, evaluate, tmp_path):
    folder, _ = flash
    rows = evaluate(f"ckpt_path={folder / 'checkpoints' / 'best.ckpt'}")
    assert tuple(rows[0]) == COLUMNS
    assert {(row["run"], row["attention"], row["reading"], row["tokenizer"], row["context"]) for row in rows} == {
        ("0_flash", "flash", "", "bytes", str(SEQ_LEN))
    }
    assert {row["length"] for row in rows if row["task"] == "perplexity_sliding"} == {"16", "64"}
    assert len({row["count"] for row in rows if row["task"] in ("perplexity_windows", "perplexity_sliding")}) == 1
    assert all(math.isfinite(float(row["value"])) for row in rows if row["value"])
    assert "0_flash" in (tmp_path / "summary.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"validation.png", "perplexity_by_length.png", "loss_by_position.png"}


def test_another_variant_replaces_the_checkpoints(flash, evaluate):
    folder, _ = flash
    as_trained = evaluate(f"ckpt_path={folder}", "precision=32", "evaluation=validation")
    replaced = evaluate(f"ckpt_path={folder}", "precision=32", "evaluation=validation", "attention=sdpa")
    assert {(row["attention"], row["reading"]) for row in replaced} == {("sdpa", "attention=sdpa")}
    assert value(replaced, "validation") == pytest.approx(value(as_trained, "validation"))


def test_of_another_variant_only_what_is_not_default_is_named(train, evaluate):
    folder, _ = train("alone/sdpa", "attention=sdpa")
    rows = evaluate(f"ckpt_path={folder}", "evaluation=validation", "attention=flash", "attention.window_size=[4,0]")
    assert {(row["attention"], row["reading"]) for row in rows} == {("flash", "attention=flash attention.window_size=[4, 0]")}


@pytest.mark.parametrize(
    "override, label",
    [
        (["+attention.window_size=[4,0]"], "attention.window_size=[4, 0]"),
        (["model.rope_scaling=linear", "model.rope_factor=2.0"], "model.rope_scaling=linear model.rope_factor=2.0"),
    ],
)
def test_overridden_options_stand_in_every_row(flash, evaluate, override, label):
    folder, _ = flash
    as_trained = evaluate(f"ckpt_path={folder}", "evaluation=validation")
    changed = evaluate(f"ckpt_path={folder}", "evaluation=validation", *override)
    assert {(row["attention"], row["reading"]) for row in changed} == {("flash", label)}
    assert value(changed, "validation") != value(as_trained, "validation")


def test_data_on_the_command_line_reach_the_text_within_and_bring_no_keys_of_other_data():
    checkpoint, text = SimpleNamespace(task="lm", context=32), {"_target_": "attnzoo.data.text", "paths": "a", "val_fraction": 0.1}
    passkey = {"_target_": "attnzoo.data.passkey", "seq_len": 32, "text": text}
    assert subject._data_config(None, passkey, {"text": {"val_fraction": 0.5}}, checkpoint, ())["text"] == {**text, "val_fraction": 0.5}
    with pytest.raises(ValueError, match="data.paths: passkey has no such option"):
        subject._data_config(None, passkey, {"paths": "b"}, checkpoint, ())
    other = subject._data_config(None, {**text, "cross_documents": True}, {**passkey, "objective": None}, checkpoint, ())
    assert other == {**passkey, "text": {**text, "objective": "lm"}, "objective": "lm"}


def test_data_of_other_tokens_are_refused(flash, evaluate):
    with pytest.raises(UserError, match=r"data=recall: must be made of the model's tokens, bytes \(259\), got numbers \(8192\)"):
        evaluate(f"ckpt_path={flash[0]}", "evaluation=validation", "data=recall")
    with pytest.raises(UserError, match=r"data=text: must be made of the model's tokens, numbers \(64\), got text"):
        subject._check_tokens(SimpleNamespace(kind="text"), NumberTokenizer(64))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name, can in SUPPORTS.items() if can.causal and "rotary" in can.positions])
def test_every_variant_reads_beyond_its_training_context(variant, train, evaluate):
    rows_of = [] if SUPPORTS[variant].packed else ["data.packed=false", "data.cross_documents=true"]
    folder, _ = train(f"beyond/{variant}", f"attention={variant}", *rows_of)
    for override in ([], ["model.rope_scaling=ntk", "model.rope_factor=2.0"]):
        rows = evaluate(f"ckpt_path={folder}", "evaluation.tasks.perplexity.protocols=[windows]", *override)
        assert all((row["attention"], row["reading"]) == (variant, " ".join(override)) for row in rows)
        beyond = [row for row in rows if row["task"] == "perplexity_windows" and row["length"] == "64"]
        assert beyond and all(math.isfinite(float(row["value"])) and row["context"] == str(SEQ_LEN) for row in beyond)


def test_other_text_is_read_in_trainings_way_and_said(flash, evaluate, tmp_path):
    folder, _ = flash
    text = tmp_path / "other.txt"
    text.write_text("other text " * 200)
    rows = evaluate(
        f"ckpt_path={folder}", "data=text", f"data.paths=[{text}]", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=none"
    )
    assert all(row["data"].endswith("(not that of training)") for row in rows)
    assert {row["length"] for row in rows if row["task"] == "validation"} == {str(SEQ_LEN)}


@pytest.mark.slow
def test_a_sweep_goes_on_where_runs_fail(train, flash, bert, evaluate, tmp_path):
    sweep = flash[0].parent
    train("sweep/2_learned", "model.positions=learned", "attention=sdpa")
    shutil.copytree(flash[0], sweep / "3_damaged")
    for path in (sweep / "3_damaged" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    shutil.copytree(flash[0], sweep / "4_without", ignore=shutil.ignore_patterns("*.ckpt"))
    shutil.copytree(flash[0], sweep / "5_unreadable")
    (sweep / "5_unreadable" / "config.yaml").write_text("data: [")

    rows = evaluate(f"runs={sweep}")
    runs = {name: [row for row in rows if row["run"] == name] for name in dict.fromkeys(row["run"] for row in rows)}
    assert list(runs) == ["0_flash", "1_bert", "2_learned", "3_damaged", "4_without", "5_unreadable"]
    for name, reason in (("3_damaged", "damaged"), ("4_without", "no checkpoint"), ("5_unreadable", "config.yaml")):
        (row,) = runs[name]
        assert row["value"] == "" and reason in row["note"]
    (refused,) = [row for row in runs["1_bert"] if row["task"] == "perplexity"]
    assert refused["value"] == "" and "causal" in refused["note"]
    learned = {(row["task"], row["length"]): row for row in runs["2_learned"]}
    assert learned["perplexity_sliding", "64"]["value"] == "" and "max_positions=32" in learned["perplexity_sliding", "64"]["note"]
    counts = {row["count"] for row in rows if row["task"] == "perplexity_sliding" and row["value"]}
    assert len(counts) == 1
    summary = (tmp_path / "summary.md").read_text()
    assert all(name in summary for name in runs)


def test_a_path_that_the_device_does_not_have_leaves_nothing(flash, evaluate, tmp_path):
    with pytest.raises(ValueError, match="attention.impl=gluon: needs a Hopper GPU, got cpu"):
        evaluate(f"ckpt_path={flash[0]}", "+attention.impl=gluon")
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_failures_is_an_error(flash, evaluate, tmp_path):
    for name in "ab":
        shutil.copytree(flash[0], tmp_path / "runs" / name, ignore=shutil.ignore_patterns("*.ckpt"))
    with pytest.raises(UserError, match="nothing could be evaluated"):
        evaluate(f"runs={tmp_path / 'runs'}")
    assert "no checkpoint" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    "data",
    [
        "{seq_len: 32, _target_: os.system, command: 'touch %s'}",
        "{seq_len: 32, _target_: attnzoo.data.sources.glob.os.system, command: 'touch %s'}",
        "{seq_len: 32, _target_: attnzoo.data.text, paths: {_target_: os.system, command: 'touch %s'}}",
    ],
)
def test_a_strangers_run_folder_runs_no_code(flash, evaluate, tmp_path, data):
    stranger = tmp_path / "stranger"
    shutil.copytree(flash[0], stranger)
    (stranger / "config.yaml").write_text(f"data: {data % (tmp_path / 'ran')}\n")
    with pytest.raises(UserError, match="outside attnzoo"):
        evaluate(f"ckpt_path={stranger}")
    assert not (tmp_path / "ran").exists()


def test_data_modules_of_a_trusted_module(flash, evaluate, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nimport attnzoo.data\n\ndef texts(**options):\n    return attnzoo.data.text(**options)\n")
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(flash[0], tmp_path / "run")
    settings = tmp_path / "run" / "config.yaml"
    settings.write_text(settings.read_text().replace("attnzoo.data.text", "mine.texts"))
    with pytest.raises(UserError, match="say trust=\\[mine\\]"):
        evaluate(f"ckpt_path={tmp_path / 'run'}", "evaluation=validation")
    assert evaluate(f"ckpt_path={tmp_path / 'run'}", "evaluation=validation", "trust=[mine]")
    settings.write_text(settings.read_text().replace("mine.texts", "mine.os.system"))
    with pytest.raises(UserError, match="mine.os.system"):
        evaluate(f"ckpt_path={tmp_path / 'run'}", "evaluation=validation", "trust=[mine]")


def test_a_checkpoint_without_its_folder_needs_data(flash, evaluate, corpus, tmp_path):
    shutil.copy(flash[0] / "checkpoints" / "best.ckpt", tmp_path / "lone.ckpt")
    with pytest.raises(UserError, match="say it with data="):
        evaluate(f"ckpt_path={tmp_path / 'lone.ckpt'}")
    text = ["data=text", f"data.paths=[{corpus}]", "data.val_fraction=0.3", f"data.cache_dir={tmp_path / 'cache'}"]
    rows = evaluate(f"ckpt_path={tmp_path / 'lone.ckpt'}", *text)
    assert not any("not that of training" in row["data"] for row in rows)
    assert {row["length"] for row in evaluate(f"ckpt_path={tmp_path / 'lone.ckpt'}", *text, "evaluation.lengths=null")} >= {"8", "256"}
    assert math.isfinite(value(rows, "validation"))


def test_what_is_no_checkpoint(evaluate, tmp_path):
    (tmp_path / "letter.txt").write_text("Dear Sir or Madam")
    with pytest.raises(UserError, match="letter.txt is not a checkpoint"):
        evaluate(f"ckpt_path={tmp_path / 'letter.txt'}", "evaluation.lengths=null")


@pytest.mark.parametrize("lengths", ["[]", "[0]", "[16,x]", "512", "long"])
def test_wrong_lengths_are_refused(flash, evaluate, lengths):
    with pytest.raises(UserError, match="evaluation.lengths"):
        evaluate(f"ckpt_path={flash[0]}", f"evaluation.lengths={lengths}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(flash, evaluate):
    with pytest.raises(UserError, match="accelerator=gpu"):
        evaluate(f"ckpt_path={flash[0]}", "accelerator=gpu")


class Recorder:
    """What a W&B logger is told."""

    def __init__(self):
        self.metrics, self.tables, self.images = {}, {}, {}

    def log_metrics(self, metrics):
        self.metrics |= metrics

    def log_table(self, key, columns, data):
        self.tables[key] = [columns, *data]

    def log_image(self, key, images):
        self.images[key] = images

    def log_hyperparams(self, params):
        pass

    def save(self):
        pass


@pytest.mark.slow
def test_loggers_get_the_metrics_the_table_and_the_plots(flash, bert, evaluate, monkeypatch):
    recorder = Recorder()
    without = evaluate(f"ckpt_path={flash[0]}")
    monkeypatch.setattr(runner, "build_loggers", lambda *_: [recorder])
    rows = evaluate(f"ckpt_path={flash[0]}")
    assert rows == without
    assert recorder.metrics["eval/validation/32"] == value(rows, "validation", "perplexity")
    assert recorder.metrics["eval/perplexity_sliding/64"] == value(rows, "perplexity_sliding", "perplexity", length="64")
    assert recorder.tables.keys() == {f"eval_tables/{task}" for task in {row["task"] for row in rows}}
    assert all(tuple(head) == COLUMNS for head, *_ in recorder.tables.values())
    assert sum(len(lines) for _, *lines in recorder.tables.values()) == len(rows)
    assert recorder.images.keys() == {f"eval_plots/{name}" for name in ("validation", "perplexity_by_length", "loss_by_position")}
    assert not recorder.metrics.keys() & (recorder.tables.keys() | recorder.images.keys())
    evaluate(f"runs=[{flash[0]},{bert[0]}]", "evaluation=validation")
    assert {"eval/validation/32/0_flash", "eval/validation/32/1_bert"} <= recorder.metrics.keys()


def test_wandb_offline(flash, evaluate, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    without = evaluate(f"ckpt_path={flash[0]}")
    rows = evaluate(f"ckpt_path={flash[0]}", "logger=wandb", "logger.wandb.offline=true")
    assert rows == without
    assert list(tmp_path.rglob("*.wandb"))
    assert list(tmp_path.rglob("*.table.json"))
