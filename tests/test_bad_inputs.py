"""Values that no run can take: each is refused before anything is built, in one line with the key, what it was and what it must be."""

import re
import subprocess
import sys
from functools import cache

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from tiny_run import ROOT

from attnzoo.errors import UserError
from attnzoo.run import checks, values

COUNT, NATURAL, NUMBER = ["0", "-1", "1.5", "abc", "true"], ["-1", "1.5", "abc"], ["abc", "true", "nan", "-1"]
SHARE = ["0", "1.5", "-0.1", "nan", "abc"]
TEXT = ["3", "true", "[a]"]
WORD = ["nonsense", "3"]
# group choices, keys, values and what each message says the value must be
TRAINING = [
    ([], ["seed"], ["-1", "4294967296", "1.5", "abc", "true", "null"], "a whole number of at least 0"),
    ([], ["tags"], ["abc", "3", "[1]"], "a list of texts"),
    ([], ["ckpt_path"], ["3", "true"], "a text or null"),
    ([], ["matmul_precision"], [*WORD, "null"], "highest or high or medium"),
    ([], ["resume"], [*WORD, "true"], "auto or null"),
    ([], ["batch_tokens", "activation_checkpointing"], COUNT, "a whole number of at least 1 or null"),
    ([], ["compile"], ["3", "null"], "true or false or a text"),
    ([], ["trainer.max_steps", "trainer.max_epochs"], ["0", "-2", "1.5", "abc"], "-1 or a whole number of at least 1"),
    ([], ["trainer.val_check_interval"], ["0", "-1", "1.5", "0.0"], "a whole number of at least 1 or a number above 0 and at most 1"),
    ([], ["trainer.log_every_n_steps", "trainer.num_nodes", "+trainer.accumulate_grad_batches"], COUNT, "a whole number of at least 1"),
    ([], ["trainer.gradient_clip_val"], [*NUMBER, "inf"], "a number of at least 0 or null"),
    ([], ["+trainer.gradient_clip_algorithm"], ["value", "3"], "norm or null"),
    ([], ["trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.overfit_batches"], ["-1", "1.5", "abc"], "a whole number"),
    ([], ["trainer.num_sanity_val_steps"], ["-2", "abc"], "-1 or a whole number of at least 0"),
    ([], ["trainer.check_val_every_n_epoch"], COUNT, "a whole number of at least 1 or null"),
    ([], ["trainer.precision"], ["17", "half"], "64 or 32 or 16"),
    ([], ["trainer.devices"], ["1.5", "{a: 1}"], "a list of whole numbers or a text or a whole number"),
    ([], ["trainer.deterministic"], ["3", "maybe"], "true or false or warn or null"),
    ([], ["model.dim", "model.n_layers", "model.n_heads", "model.pad_vocab_multiple"], COUNT, "a whole number of at least 1"),
    ([], ["model.n_kv_heads", "model.head_dim", "model.mlp_dim", "model.max_positions", "model.vocab_size"], ["0", "abc"], "or null"),
    ([], ["model.dropout", "model.attention_dropout"], ["1", "-0.1", "abc"], "a number of at least 0 and below 1"),
    ([], ["model.norm_eps", "model.rope_base", "model.rope_factor"], ["0", *NUMBER], "a number above 0"),
    ([], ["model.bias", "model.tie_embeddings"], ["3", "maybe"], "true or false"),
    ([], ["model.mlp"], WORD, "gelu or gelu_tanh or swiglu"),
    ([], ["model.norm"], WORD, "layernorm or rmsnorm"),
    ([], ["model.norm_position"], WORD, "pre or post"),
    ([], ["model.positions"], WORD, "learned or rotary or alibi"),
    ([], ["model.rope_scaling"], [*WORD, "null"], "none or linear or ntk"),
    ([], ["model.rope_proportion", "model.partial_rotary_factor"], SHARE, "a number above 0 and at most 1"),
    ([], ["model.attention_temperature"], [*WORD, "null"], "none or ssmax or log or yarn or llama4 or a mapping"),
    ([], ["model.attention_gate"], [*WORD, "null"], "none or elementwise or head"),
    (["layers=nope"], ["layers.nope.positions"], WORD, "learned or rotary or alibi"),
    (["layers=nope"], ["+layers.nope.rope_base"], ["0", *NUMBER], "a number above 0"),
    (["layers=nope"], ["layers.pattern"], ["nope", "[]", "3"], "a list of kinds of layers"),
    (["layers=nope"], ["layers.pattern"], ["[nop]"], "one of rotary, nope"),
    (["layers=local_global"], ["layers.local.attention.window_size"], ["5", "[a,b]"], "a list of whole numbers"),
    (["layers=differential_last"], ["layers.differential.attention.version"], ["two"], "a whole number"),
    (["model=bert_tiny"], ["model.type_vocab_size"], NATURAL, "a whole number of at least 0"),
    ([], ["attention.impl"], ["glon", "3"], "gluon or triton or cpu or reference or null"),
    ([], ["attention.window_size"], ["5", "[a,b]"], "a list of whole numbers"),
    ([], ["attention.softcap"], ["abc", "true"], "a number"),
    (["attention=differential"], ["attention.version"], ["two"], "a whole number"),
    (["attention=block_sparse"], ["attention.pattern"], ["3"], "a text or a mapping or a list"),
    ([], ["optimizer.lr"], ["0", *NUMBER, "inf"], "a number above 0"),
    ([], ["optimizer.betas"], ["[0.9]", "[1.5,2]", "0.9", "[0.9,1.0]", "[a,b]"], "a list of 2 numbers of at least 0 and below 1"),
    ([], ["optimizer.eps", "optimizer.weight_decay", "optimizer.final_lr"], NUMBER, "a number of at least 0"),
    ([], ["optimizer.warmup_steps"], ["-1", "1.5", "abc"], "a whole number of at least 0 or a number of at least 0 and below 1"),
    ([], ["optimizer.total_steps"], COUNT, "a whole number of at least 1 or null"),
    ([], ["optimizer.schedule"], ["linear"], "choose a schedule with schedule=linear"),
    ([], ["optimizer.schedule.decay"], WORD, "cosine or linear or 1-sqrt"),
    ([], ["optimizer.schedule.decay_share"], ["1.5", "-0.1", "abc"], "a number of at least 0 and at most 1"),
    (["optimizer=muon"], ["optimizer.momentum"], ["1", "-0.1", "abc"], "a number of at least 0 and below 1"),
    (["optimizer=muon"], ["optimizer.ns_steps"], COUNT, "a whole number of at least 1"),
    ([], ["data.seq_len"], ["1", "abc", "1.5"], "a whole number of at least 2"),
    ([], ["data.batch_size", "data.num_workers"], ["-1", "abc", "1.5"], "a whole number of at least"),
    ([], ["data.eval_batch_size"], COUNT, "a whole number of at least 1 or null"),
    ([], ["data.val_fraction"], ["0", "1", "half", "nan"], "a number above 0 and below 1"),
    ([], ["data.mask_rate", "data.eval_mask_rate"], SHARE, "a number above 0 and at most 1"),
    ([], ["data.min_seq_len"], ["2", "abc"], "a whole number of at least 3 or null"),
    ([], ["data.shuffle", "data.packed", "data.cross_documents"], ["3", "maybe"], "true or false"),
    ([], ["data.tokenizer"], [*TEXT, "null"], "a text"),
    ([], ["data.cache_dir"], ["3"], "a text or null"),
    (["data=recall"], ["data.n_pairs"], ["abc", "0", "-4", "[0]"], "a whole number of at least 1 or a list of whole numbers of at least 1"),
    (["data=recall"], ["data.power"], NUMBER, "a number above 0"),
    (["data=recall"], ["data.vocab_size", "data.n_train", "data.n_validation"], COUNT, "a whole number of at least 1"),
    (["data=recall"], ["data.random_fill"], ["3"], "true or false"),
    (["data=copying"], ["data.n_tokens"], ["0", "abc"], "a whole number of at least 1"),
    (["data=passkey"], ["data.share"], SHARE, "a number above 0 and at most 1"),
    (["data=passkey"], ["data.keys"], ["[9]", "9", "[1,a]", "[-1,5]"], "a list of 2 whole numbers of at least 0"),
    (["data=passkey"], ["data.targets"], WORD, "answer or all"),
    (["data=passkey"], ["data.depth"], ["2", "abc"], "a number of at least 0 and at most 1 or null"),
    (["data=passkey"], ["data.distractors"], ["-1", "abc"], "a whole number of at least 0 or a list"),
    (["data=passkey"], ["data.questions"], ["0", "abc"], "a whole number of at least 1 or a list"),
    (["data=passkey"], ["data.noise"], ["2", "abc"], "a number of at least 0 and at most 1"),
    (["data=passkey"], ["data.text.val_fraction"], ["2"], "a number above 0 and below 1"),
    (["data=continuations"], ["data.trees", "data.predict_prompts"], ["3", "maybe"], "true or false"),
    (["data=continuations"], ["data.n_numbers", "data.n_continuations"], COUNT, "a whole number of at least 1"),
    (["data=python_packages"], ["data.packages"], ["3"], "a text or a list of texts"),
    (["data=listops", "task=classification", "model=bert_tiny"], ["data.n_train", "data.max_depth"], COUNT, "a whole number of at least 1"),
    (["data=listops", "task=classification", "model=bert_tiny"], ["data.max_args"], ["1", "abc"], "a whole number of at least 2"),
    (["data=listops", "task=classification", "model=bert_tiny"], ["task.pooling"], WORD, "cls or mean"),
    ([], ["task.objective"], WORD, "lm or mlm or classification"),
    ([], ["callbacks.last.every_n_steps"], ["0", "0.5", "abc"], "a whole number of at least 1"),
    ([], ["callbacks.sample.prompt"], ["3", "''"], "a text of length 1 or more or null"),
    ([], ["callbacks.best.monitor"], ["3"], "a text or null"),
    ([], ["callbacks.best.save_on_train_epoch_end"], ["abc"], "true or false or null"),
    (["callbacks=early_stopping"], ["callbacks.early_stopping.patience"], NATURAL, "a whole number of at least 0"),
    (["callbacks=early_stopping"], ["callbacks.early_stopping.min_delta"], NUMBER, "a number of at least 0"),
    (["logger=wandb"], ["logger.wandb.offline"], ["3", "maybe"], "true or false or null"),
    (["logger=wandb"], ["logger.wandb.project"], ["3", "null"], "a text"),
]
EVALUATION = [
    ([], ["ckpt_path"], ["3"], "a text or null"),
    ([], ["runs"], ["3", "[1]"], "a text or a list of texts or null"),
    ([], ["checkpoint"], [*WORD, "null"], "best or last"),
    ([], ["accelerator"], ["tpu", "3", "null"], "auto or cpu or gpu or cuda or mps"),
    ([], ["store"], ["3"], "a text or null"),
    ([], ["remeasure"], ["3", "maybe"], "true or false"),
    ([], ["trust"], ["mine", "[3]"], "a list of texts"),
    ([], ["evaluation.lengths"], ["[0]", "[]", "[a]", "512", "abc"], "a list of positive whole numbers"),
    ([], ["model.rope_scaling"], WORD, "none or linear or ntk or dynamic"),
    ([], ["+data.batch_size"], COUNT, "a whole number of at least 1"),
    ([], ["model.rope_factor"], ["0", "-1", "abc"], "a number above 0 or null"),
    ([], ["model.rope_proportion"], SHARE, "a number above 0 and at most 1 or null"),
    ([], ["model.attention_temperature"], WORD, "none or ssmax or log or yarn or llama4 or a mapping or null"),
    (["layers=nope"], ["layers.pattern"], ["nope", "[]"], "a list of kinds of layers"),
    (["layers=nope"], ["layers.nope.positions"], WORD, "learned or rotary or alibi"),
    (["evaluation=passkey"], ["evaluation.tasks.passkey.examples", "evaluation.tasks.passkey.batch_tokens"], COUNT, "at least 1"),
    (["evaluation=passkey"], ["evaluation.tasks.passkey.seed", "evaluation.tasks.passkey.distractors"], NATURAL, "at least 0"),
    (["evaluation=passkey"], ["evaluation.tasks.passkey.depths"], ["abc", "1.5"], "a whole number or a list of numbers"),
    (["evaluation=perplexity"], ["evaluation.tasks.perplexity.protocols"], ["3"], "a list of texts"),
]


@cache
def composed(name: str, *choices: str):
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return hydra.compose(name, overrides=["run_dir=outputs/test", *choices])


def changed(name: str, choices: list[str], *overrides: str):
    """The config with these values, which are read as on the command line."""
    cfg = composed(name, *choices).copy()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        with open_dict(cfg):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
    return cfg


def said(name: str, choices: list[str], *overrides: str) -> str:
    check = {"train": checks.check_training, "eval": checks.check_evaluation}[name]
    with pytest.raises((UserError, ValueError, OSError)) as error:
        check(changed(name, choices, *overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_all_options_pass():
    for name, table in (("train", TRAINING), ("eval", EVALUATION)):
        for choices in {tuple(choices) for choices, *_ in table}:
            (checks.check_training if name == "train" else checks.check_evaluation)(composed(name, *choices))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "table"), [("train", TRAINING), ("eval", EVALUATION)])
def test_what_is_out_of_range_is_named_with_what_it_must_be(name, table):
    unanswered = []
    for choices, keys, given, must in table:
        for key in keys:
            for value in given:
                line = said(name, choices, f"{key}={value}")
                path = key.lstrip("+")
                if not (line.startswith(f"{path}=") and " must be " in line and must in line):
                    unanswered.append((path, value, line))
    assert not unanswered, unanswered
    if name == "train":
        assert sum(len(keys) * len(given) for _, keys, given, _ in [*TRAINING, *EVALUATION]) >= 276


CONTRADICTIONS = [
    (["model=bert_tiny"], ["task.objective=lm"], "task=lm must go with a GPT, .*take model=gpt_tiny"),
    ([], ["task.objective=mlm"], "task=mlm must go with a BERT, .*take model=bert_tiny"),
    ([], ["model.dim=33"], "model.dim=33 is not divisible by model.n_heads=4"),
    ([], ["model.n_kv_heads=3"], "model.n_heads=4 must be a multiple of model.n_kv_heads=3"),
    (["model=gpt2_small"], ["data.seq_len=2048"], r"model.train_context=2048 .*is longer than model.max_positions=1024"),
    ([], ["trainer.max_steps=-1"], "optimizer.schedule needs an end: set trainer.max_steps"),
    (["schedule=constant"], ["trainer.max_steps=-1", "optimizer.warmup_steps=0.1"], "optimizer.schedule needs an end"),
    (["data=text"], ["data.paths=[/does/not/exist]"], "data.paths: '/does/not/exist' does not exist"),
    (["data=text"], [], "data.paths must be set: add data.paths=..."),
    ([], ["data.seq_len=${nowhere}"], "nowhere"),
    ([], ["data.tokenizer=./none/tokenizer.json"], "data.tokenizer='./none/tokenizer.json' must be \"bytes\", a tokenizer.json"),
    ([], ["model=null"], "model=None must be an option of configs/model"),
    ([], ["+trainer.steps=3"], "trainer.steps: Trainer has no such option; like it: .*max_steps"),
    ([], ["+callbacks.best.monitr=x"], "callbacks.best.monitr: ModelCheckpoint has no such option; like it: monitor"),
    ([], ["+callbacks.sample.prompts=x"], "callbacks.sample.prompts: Sample has no such option; like it: prompt"),
    ([], ["+logger.csv.path=x"], "logger.csv.path: MetricsCSV has no such option"),
    ([], ["+data.bach_size=3"], "data.bach_size: python_stdlib has no such option; like it: batch_size"),
    (["data=recall"], ["+data.npairs=3"], "data.npairs: recall has no such option; like it: n_pairs"),
    ([], ["+optimizer.learning_rate=3"], "optimizer.learning_rate: AdamWRecipe has no such option"),
    ([], ["callbacks.best._target_=lightning.pytorch.callbacks.Checkpint"], "callbacks.best._target_=.* cannot be imported"),
]


@pytest.mark.parametrize(("choices", "overrides", "message"), CONTRADICTIONS)
def test_contradictions_and_what_is_not_there(choices, overrides, message):
    if overrides == ["data.seq_len=${nowhere}"]:
        cfg = composed("train").copy()
        cfg.data.seq_len = "${nowhere}"
        with pytest.raises(Exception, match=message):
            checks.check_training(cfg)
        return
    assert re.search(message, said("train", choices, *overrides))


def test_evaluation_takes_tokenizer_and_objective_from_the_checkpoint():
    checks.check_evaluation(composed("eval", "data=text", f"data.paths=[{ROOT}]", "data.tokenizer=none"))


def test_evaluation_asks_for_what_is_there():
    assert "missing.ckpt does not exist" in said("eval", [], "ckpt_path=missing.ckpt")
    assert "evaluation.tasks.passkey.example: passkey has no such option; like it: examples" in said(
        "eval", ["evaluation=passkey"], "+evaluation.tasks.passkey.example=3")


@pytest.mark.parametrize(("warmup", "warns"), [(20, True), (600, True), (19, False), (0.5, False)])
def test_a_warm_up_beyond_the_run_is_told(caplog, warmup, warns):
    values.warn(changed("train", [], "trainer.max_steps=20", f"optimizer.warmup_steps={warmup}"))
    assert (f"optimizer.warmup_steps={warmup} is not below the 20 steps of the run" in caplog.text) is warns


def test_a_config_is_checked_without_torch():
    code = f"""
import hydra, sys
from attnzoo.run import values
with hydra.initialize_config_dir({str(ROOT / "configs")!r}, version_base="1.3"):
    values.check_training(hydra.compose("train", overrides=["run_dir=x"]))
    values.check_evaluation(hydra.compose("eval", overrides=["run_dir=x"]))
    try:
        values.check_training(hydra.compose("train", overrides=["run_dir=x", "optimizer.lr=-1"]))
    except ValueError as error:
        print(error, {{"torch", "lightning", "transformers", "datasets"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "optimizer.lr=-1: must be a number above 0 set()", done.stderr
