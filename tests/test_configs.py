"""Every file of configs/ composes and builds what it names; the command line behaves as a user expects."""

import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from commands import Command
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_run import ROOT, compose_tiny

from attnzoo import runner
from attnzoo.run import checks
from attnzoo.run.command_line import one_line_errors

CONFIGS = ROOT / "configs"
TRAIN_GROUPS = ("attention", "callbacks", "data", "debug", "experiment", "layers", "logger", "model", "optimizer", "recipe", "schedule",
                "task", "trainer")
# what a user must say beside the option
TEXT = [f"data.paths=[{ROOT / 'pyproject.toml'}]"]
NEEDS = {
    "text": TEXT,
    "shakespeare_nanogpt": TEXT,
    "hf": ["data.name=parquet"],
    **dict.fromkeys(("listops", "pathfinder", "pathx", "images", "imdb", "movie_reviews"), ["task=classification", "model=bert_tiny"]),
    "text_classification": ["task=classification", "model=bert_tiny", "data.name=parquet"],
    **dict.fromkeys(("retrieval", "lra_retrieval"), ["task=classification", "model=bert_tiny", f"data.path={ROOT}/tests/data/retrieval"]),
    "same_package": ["task=classification", "model=bert_tiny", "data.packages=[torch,transformers]"],
    "classification": ["model=bert_tiny"],
    "mlm": ["model=bert_tiny"],
    "drope": ["init_from=runs/a"],
    "yarn": ["init_from=runs/a"],
    "gemma3": ["model.n_layers=6"],
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def compose(*overrides: str, name: str = "train"):
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose(name, overrides=["run_dir=outputs/test", *overrides])


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in TRAIN_GROUPS for option in options(group)])
def test_every_option_composes_and_builds(group, option, monkeypatch):
    cfg = compose(f"{group}={option}", *NEEDS.get(option, []))
    monkeypatch.setattr("attnzoo.data.tokenizers.check_name", lambda name: None)  # no hub
    checks.check_training(cfg)
    if group in ("data", "experiment"):
        data = instantiate(cfg.data, _convert_="all")
        assert data.objective == cfg.task.objective
    if group in ("attention", "layers", "model", "experiment", "task"):
        with torch.device("meta"):
            model = instantiate(cfg.model, vocab_size=cfg.model.vocab_size or 259, _convert_="all")
        assert model.train_context == cfg.data.seq_len
    hydra.utils.get_class(cfg.task.module._target_)
    assert instantiate(cfg.optimizer, _convert_="all").lr > 0
    assert all(callback is None or instantiate(callback, _convert_="all") for callback in cfg.callbacks.values())
    if OmegaConf.is_config(cfg.trainer.strategy):
        assert instantiate(cfg.trainer.strategy, _convert_="all") is not None
    if cfg.trainer.accelerator in ("auto", "cpu"):
        runner.build_trainer(cfg, runner.build_loggers(OmegaConf.merge(cfg, {"logger": None}), Path("outputs"), "train"))


@pytest.mark.parametrize(("group", "option"), [("evaluation", option) for option in options("evaluation")])
def test_every_evaluation_composes_and_builds(group, option):
    tasks = ["evaluation.tasks.lm_eval.tasks=[a]"] if option == "lm_eval" else []
    cfg = compose(f"{group}={option}", f"ckpt_path={ROOT}", *tasks, name="eval")
    checks.check_evaluation(cfg)
    assert all(callable(task) for task in instantiate(cfg.evaluation.tasks, _convert_="all").values())


@pytest.mark.parametrize("model", options("model"))
def test_a_model_chooses_its_task(model):
    assert compose(f"model={model}").task.objective == ("mlm" if model.startswith("bert") else "lm")


def test_a_model_chooses_its_recipe_and_the_command_line_wins():
    rates = {model: compose(f"model={model}").optimizer.lr for model in options("model")}
    assert (rates["gpt_tiny"], rates["bert_tiny"], rates["gpt2_small"], rates["gpt2_xl"]) == (3e-3, 3e-3, 6e-4, 2e-4)
    bert = compose("model=bert_large").optimizer
    assert (bert.lr, bert.schedule.decay, bert.final_lr) == (1e-4, "linear", 0)
    chosen = compose("model=bert_large", "recipe=tiny", "schedule=wsd", "optimizer.warmup_steps=7").optimizer
    assert (chosen.lr, chosen.schedule.decay, chosen.warmup_steps) == (3e-3, "1-sqrt", 7)


def test_a_preset_is_what_was_published():
    model = compose("model=gpt2_xl").model
    assert (model.dim, model.n_layers, model.n_heads, model.mlp, model.positions) == (1600, 48, 25, "gelu_tanh", "learned")
    model = compose("model=bert_large").model
    assert (model.dim, model.type_vocab_size, model.norm_eps, model.norm_position) == (1024, 2, 1e-12, "post")


@pytest.mark.parametrize("option", options("experiment"))
def test_an_experiment_begins_with_its_command(option):
    package, command, *_ = (CONFIGS / "experiment" / f"{option}.yaml").read_text().splitlines()
    assert package == "# @package _global_"
    assert command.startswith("# python train.py ") and f"experiment={option}" in command


@pytest.mark.slow
def test_presets_have_no_dropout_and_runs_are_reproducible_by_default():
    for model in options("model"):
        cfg = compose(f"model={model}")
        assert (cfg.model.dropout, cfg.model.attention_dropout, cfg.data.seed) == (0.0, 0.0, cfg.seed)


def test_a_misspelt_variant_lists_what_exists():
    with pytest.raises(MissingConfigException) as error:
        compose("attention=flush")
    assert all(option in str(error.value) for option in options("attention"))


@pytest.mark.parametrize("override", ["model.dimm=64", "attention.windows=3", "dropout=0.1", "trainer.steps=3"])
def test_an_unknown_key_is_refused(override):
    with pytest.raises(ConfigCompositionException, match=override.partition("=")[0]):
        compose(override)


def test_a_key_of_another_variant_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose_tiny(tmp_path, "attention=sdpa", "+attention.window_size=[8,0]"))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "window_size" in line


@pytest.mark.parametrize("override", ["attention._partial_=false", "~attention._partial_", "~attention._target_"])
def test_an_attention_that_a_model_cannot_build_is_refused_in_one_line(tmp_path, capsys, override):
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose_tiny(tmp_path, override))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "must have `_target_`, the layer's class, and `_partial_: true`" in line


@pytest.mark.parametrize("script", ["train.py", "eval.py", "generate.py", "attnzoo/show.py"])
def test_help_lists_the_groups_and_imports_nothing_slow(script):
    code = f"""
import runpy, sys
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    print({{"torch", "lightning", "datasets", "transformers"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "attention: " + ", ".join(options("attention")) in done.stdout
    assert done.stdout.strip().endswith("set()"), "a library was imported before the command line was read"


@pytest.mark.slow
def test_a_job_of_a_sweep_that_fails_does_not_stop_the_others(tmp_path):
    done = Command("train.py", "-m", "model.n_heads=3,4", "debug=fast_dev_run", "trainer=cpu", "data.seq_len=32",
                   f"hydra.sweep.dir={tmp_path}").wait()
    assert done.returncode == 1
    assert "not divisible by model.n_heads=3" in done.stderr and "Traceback" not in done.stderr
    assert "M parameters" in (tmp_path / "1_gpt_tiny_flash" / "train.log").read_text()


@pytest.mark.parametrize("option", [option for option in options("experiment") if option.startswith("lra_")])
def test_long_range_arena_goes_with_block_sparse_attention(option):
    cfg = compose(f"experiment={option}", "attention=block_sparse", *NEEDS.get(option, []))
    checks.check_training(cfg)
    with torch.device("meta"):
        instantiate(cfg.model, vocab_size=320, _convert_="all")
