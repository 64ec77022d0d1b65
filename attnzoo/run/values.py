"""Checks of a composed config by itself: values out of range, contradictions, files and names that do not exist. No torch here.

The arguments of a class are checked against its signature, see attnzoo.run.checks. The tables here hold the types and ranges of options
that other libraries do not check, and of our own options that should be checked before torch and Lightning are imported.
"""

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from attnzoo import layers as by_layer
from attnzoo.errors import UserError
from attnzoo.run.command_line import RENAMED
from attnzoo.signatures import Count, Natural, NonNegative, Positive, PositiveShare, Share, ShareBelowOne, check_options, check_value, fits

log = logging.getLogger(__name__)

GROUPS = ("task", "data", "attention", "model", "optimizer", "trainer")
Batches = Natural | Share | None
Range = Annotated[float, Field(gt=0, lt=1)]

TOP = {
    "seed": Annotated[int, Field(ge=0, lt=2**32)],
    "tags": list[str],
    "ckpt_path": str | None,
    "matmul_precision": Literal["highest", "high", "medium"],
    "resume": Literal["auto"] | None,
    "batch_tokens": Count | None,
    "activation_checkpointing": Count | None,
    "init_from": str | None,
    "init_new": list[str],
    "init_positions": Literal["interpolate", "interpolate_image", "repeat"] | None,
    "compile": bool | str,
    "fused_loss": bool | None,
}
TASK = {"objective": Literal["lm", "mlm", "classification"], "pooling": Literal["cls", "mean"]}
TRAINER = {
    "context_parallel": Count,
    "num_nodes": Count,
    "max_steps": Literal[-1] | Count,
    "max_epochs": Literal[-1] | Count | None,
    "val_check_interval": Count | PositiveShare | str | dict | None,
    "check_val_every_n_epoch": Count | None,
    "limit_train_batches": Batches,
    "limit_val_batches": Batches,
    "overfit_batches": Batches,
    "accumulate_grad_batches": Count,
    "log_every_n_steps": Count,
    "gradient_clip_val": NonNegative | None,
    "gradient_clip_algorithm": Literal["norm"] | None,
    "num_sanity_val_steps": Literal[-1] | Natural,
}
MODEL = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "pad_vocab_multiple", "train_context"), Count),
    **dict.fromkeys(("vocab_size", "n_kv_heads", "head_dim", "mlp_dim", "max_positions", "original_context"), Count | None),
    **dict.fromkeys(("norm_eps", "rope_base", "rope_factor", "init_std"), Positive),
    **dict.fromkeys(("dropout", "attention_dropout"), ShareBelowOne),
    **dict.fromkeys(("tie_embeddings", "bias", "qk_norm", "autocast_residual", "split_residual"), bool),
    "type_vocab_size": Natural,
    "mlp": Literal["gelu", "gelu_tanh", "swiglu"],
    "norm": Literal["layernorm", "rmsnorm"],
    "norm_position": Literal["pre", "post"],
    "positions": Literal["learned", "rotary", "alibi", "none"],
    "rope_scaling": Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"],
    "rope_options": dict | None,
    "partial_rotary_factor": PositiveShare,
    "rope_proportion": PositiveShare,
    "attention_temperature": Literal["none", "ssmax", "log", "yarn", "llama4"] | dict,
    "attention_gate": Literal["none", "elementwise", "head"],
    "layers": dict | None,
}
DATA = {
    **dict.fromkeys(("batch_size", "n_train", "n_validation", "n_numbers", "n_continuations", "vocab_size", "max_depth", "min_length",
                     "max_length"), Count),
    **dict.fromkeys(("eval_batch_size", "max_documents", "max_val_documents"), Count | None),
    **dict.fromkeys(("seed", "num_workers", "n_test", "generator_seed"), Natural),
    **dict.fromkeys(("mask_rate", "eval_mask_rate", "share"), PositiveShare),
    **dict.fromkeys(("shuffle", "packed", "cross_documents", "streaming", "random_fill", "trees",
                     "predict_prompts"), bool),
    **dict.fromkeys(("tokenizer", "column", "label_column", "split"), str),
    **dict.fromkeys(("cache_dir", "val_split", "config", "revision", "document_start", "name", "path", "val_path"), str | None),
    "batching": Literal["random", "by_length", "scheduled", "balanced"],
    "step_tokens": Natural,
    "seq_len": Annotated[int, Field(ge=2)],
    "min_seq_len": Annotated[int, Field(ge=3)] | None,
    "val_fraction": Range,
    "paths": str | list[str] | None,
    "val_paths": str | list[str] | None,
    "packages": str | list[str],
    "n_pairs": Count | list[Count],
    "n_tokens": Count | list[Count] | None,
    "power": Positive,
    "max_args": Annotated[int, Field(ge=2)],
    "targets": Literal["answer", "all"],
    "depth": Share | None,
    "keys": tuple[Natural, Natural],
    "distractors": Natural | list[Natural],
    "questions": Count | list[Count],
    "noise": Share,
}
CALLBACKS = {
    "last": {"every_n_steps": Count | None},
    "early_stopping": {"monitor": str, "patience": Natural, "min_delta": NonNegative},
    "sample": {"prompt": Annotated[str, Field(min_length=1)] | None, "max_new_tokens": Count, "temperature": NonNegative},
}
WANDB = {"project": str, "entity": str | None, "name": str | None, "group": str | None, "offline": bool | None}
EVALUATION = {
    "ckpt_path": str | None,
    "runs": str | list[str] | None,
    "checkpoint": Literal["best", "last"],
    "accelerator": Literal["auto", "cpu", "gpu", "cuda", "mps"],
    "precision": str | int | None,
    "devices": Count,
    "part": tuple[Natural, Count] | None,
    "store": str | None,
    "remeasure": bool,
    "trust": list[str],
    "tags": list[str],
}
GENERATION = {
    **{key: EVALUATION[key] for key in ("checkpoint", "accelerator", "precision", "trust")},
    "ckpt_path": str,
    "prompt_file": str | None,
    "interactive": bool,
    **dict.fromkeys(("max_new_tokens", "num_samples", "beams"), Count),
    "temperature": NonNegative,
    "top_k": Count | None,
    "top_p": PositiveShare | None,
    "seed": Annotated[int, Field(ge=0, lt=2**64)],
    "graph": bool | None,
}
# what may differ between readings without new weights
READ_MODEL = {key: MODEL[key] | None for key in ("positions", *by_layer.ROTARY, "original_context", "attention_temperature", "layers")}
BY_LAYER = {**{key: MODEL[key] for key in by_layer.BY_LAYER if key != "attention"}, "attention": dict | None}
TASKS = {"examples": Count, "batch_tokens": Count, "seed": Natural, "distractors": Natural, "one_text": bool, "questions": Count,
         "batch_size": Count, "repeats": Count, "new_tokens": Count, "min_tokens": Count, "max_tokens": Count | None,
         "effective_threshold": ShareBelowOne}


def check_training(cfg: DictConfig) -> None:
    """Raises UserError or ValueError for a config of train.py that cannot be run."""
    plain = _plain(cfg)
    for group in GROUPS:
        if not isinstance(plain.get(group), dict):
            raise UserError(f"{group}={plain.get(group)} must be an option of configs/{group}: --help lists them")
    _check_group(plain, "", TOP)
    for group, table in (("trainer", TRAINER), ("data", DATA), ("data.text", DATA), ("model", MODEL)):
        if is_known(plain, group):
            _check_group(plain, group, table)
    if is_known(plain, "task.module"):
        _check_group(plain, "task", TASK)
    for name, table in CALLBACKS.items():
        _check_group(plain, f"callbacks.{name}", table)
    _check_group(plain, "logger.wandb", WANDB)
    _check_optimizer(cfg, plain)
    _check_accumulation(plain)
    _check_beginning(plain)
    if plain["init_from"] is None:  # else the weights say what the model is
        check_model(plain)
    _check_places(plain)
    _check_context_parallel(plain)


def _check_context_parallel(plain: Mapping[str, Any]) -> None:
    ranks = plain["trainer"].get("context_parallel", 1)
    if ranks == 1:
        return
    for said, refused, way_out in (
        ("compile", plain["compile"], "compile=false"), ("task=classification", plain["task"]["objective"] == "classification", "task=lm"),
        ("data.packed=false", plain["data"].get("packed") is False, "data.packed=true"),
        ("data=continuations", "predict_prompts" in plain["data"], "data=text"),
    ):
        if refused:
            raise UserError(f"trainer.context_parallel={ranks} does not go with {said}; set {way_out} or trainer.context_parallel=1")


def check_generation(cfg: DictConfig) -> None:
    """The same for a config of generate.py."""
    plain = _plain(cfg)
    _check_group(plain, "", GENERATION)
    _check_precision(plain)
    _check_group(plain, "model", READ_MODEL)
    _check_layers(plain["model"]["layers"])
    if plain["prompt"] is not None and plain["prompt_file"] is not None:
        raise UserError("prompt, prompt_file: set only one of them")
    if plain["prompt"] is None and plain["prompt_file"] is None and not plain["interactive"]:
        raise UserError("prompt must be set: add prompt=<text>, prompt_file=<file> or interactive=true")
    if (beams := plain["beams"]) > 1:
        for key in ("top_k", "top_p", "graph"):
            if plain[key]:
                raise UserError(f"beams={beams} does not go with {key}={plain[key]}; leave {key} out, or set beams=1")
        if plain["num_samples"] > beams:
            raise UserError(f"num_samples={plain['num_samples']}: must be at most the beams={beams}")
    elif plain["num_samples"] > 1 and plain["temperature"] == 0:
        raise UserError(f"num_samples={plain['num_samples']}: all would be the same text with temperature=0; set temperature above 0")


def _check_precision(plain: Mapping[str, Any]) -> None:
    if plain["precision"] == "fp8":
        raise UserError("precision=fp8 is for training only; evaluate or generate with precision=bf16-mixed")


def _check_accumulation(plain: Mapping[str, Any]) -> None:
    given = plain["trainer"].get("accumulate_grad_batches")
    if plain["batch_tokens"] is not None and given is not None:
        raise UserError(f"batch_tokens={plain['batch_tokens']}, trainer.accumulate_grad_batches={given}: both say how many micro-batches a "
                        "step has; set one of them")


def _check_beginning(plain: Mapping[str, Any]) -> None:
    if plain["init_from"] is None and (plain["init_new"] or plain["init_positions"]):
        raise UserError("init_new and init_positions say how init_from is read; set init_from, or leave them out")
    if plain["init_from"] is not None and plain["ckpt_path"] is not None:
        raise UserError("init_from begins a new run with trained weights, ckpt_path goes on with an earlier run; set one of them "
                        "(resume=auto goes with init_from, which is then read only if the run folder has no checkpoint yet)")


def check_evaluation(cfg: DictConfig) -> None:
    """The same for a config of eval.py."""
    plain = _plain(cfg)
    for old in RENAMED.keys() & plain.keys():  # added with +
        raise UserError(f"{old}: there is no such key; it is called {RENAMED[old]} now")
    _check_group(plain, "", EVALUATION)
    _check_precision(plain)
    _check_group(plain, "model", READ_MODEL)
    _check_layers(plain["model"]["layers"])
    lengths = plain["evaluation"]["lengths"]
    if lengths is not None and not fits(lengths, Annotated[list[Count], Field(min_length=1)]):
        raise UserError(f"evaluation.lengths={lengths} must be a list of positive whole numbers, such as [512,2048], or null")
    if (part := plain["part"]) is not None and part[0] >= part[1]:
        raise UserError(f"part={part}: must be [i, n] with i from 0 to {part[1] - 1}, as in part=[0,{part[1]}]")
    for name, task in (plain["evaluation"]["tasks"] or {}).items():
        if task:
            _check_group(plain, f"evaluation.tasks.{name}", TASKS)
    _check_group(plain, "logger.wandb", WANDB)
    if "_target_" not in (plain.get("data") or {}) or is_known(plain, "data"):  # keys alone go to the run's own data
        _check_group(plain, "data", DATA)
        _check_places(plain, tokenizer=False)  # the checkpoint's is taken
    given = [plain["ckpt_path"]] if plain["runs"] is None else plain["runs"] if isinstance(plain["runs"], list) else [plain["runs"]]
    for path in filter(None, given):
        if not Path(path).expanduser().exists():
            raise UserError(f"{path} does not exist; it must be a checkpoint (*.ckpt), a run folder, or a folder of runs")


def check_target(where: str, config: DictConfig) -> None:
    """check_options for a config with a `_target_`. vocab_size and objective may be null: the tokenizer or the checkpoint sets them."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    given = {key: value for key, value in plain.items() if value is not None or key not in ("vocab_size", "objective")}
    module, _, name = str(config.get("_target_")).rpartition(".")
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}._target_={config.get('_target_')} cannot be imported: {error}") from error
    if where != "trainer.strategy":  # a strategy passes further options on to torch
        check_options(where, target, given)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(f"{missing[0]} must be set: add {missing[0]}=... to the command")
    return OmegaConf.to_container(cfg, resolve=True)


def _check_there(plain: Mapping[str, Any], where: str, *keys: str) -> None:
    for key in keys:
        if key not in (_select(plain, where) or {}):
            path = f"{where}.{key}".lstrip(".")
            raise UserError(f"{path} must be set, but the config does not have it")


def _select(plain: Mapping[str, Any], path: str) -> Any:
    for key in filter(None, path.split(".")):
        plain = plain.get(key) if isinstance(plain, Mapping) else None
    return plain


def is_known(plain: Mapping[str, Any], group: str) -> bool:
    """Whether the group's `_target_` is of this project or of Lightning, so that its keys are those of the tables."""
    target = (_select(plain, group) or {}).get("_target_")
    return isinstance(target, str) and target.startswith(("attnzoo.", "lightning."))


def _check_group(plain: Mapping[str, Any], group: str, table: Mapping[str, Any]) -> None:
    for key, value in (_select(plain, group) or {}).items():
        if key in table:
            check_value(f"{group}.{key}".lstrip("."), value, table[key])


def _check_optimizer(cfg: DictConfig, plain: Mapping[str, Any]) -> None:
    if not is_known(plain, "optimizer"):
        return
    check_target("optimizer", cfg.optimizer)
    _check_there(plain, "optimizer", "lr", "betas", "eps", "weight_decay", "schedule", "warmup_steps", "final_lr")
    optimizer, trainer = plain["optimizer"], plain["trainer"]
    schedule, warmup, steps = optimizer["schedule"], optimizer["warmup_steps"], optimizer.get("total_steps") or trainer.get("max_steps", -1)
    if isinstance(schedule, str):
        raise UserError(f"optimizer.schedule={schedule!r}: must be a mapping of options; choose a schedule with schedule={schedule}")
    if is_known(plain, "optimizer.schedule"):
        check_target("optimizer.schedule", cfg.optimizer.schedule)
    endless = steps == -1 and trainer.get("max_epochs") in (-1, None) and not trainer.get("fast_dev_run")
    if endless and (0 < warmup < 1 or schedule.get("decay_share") != 0):
        raise UserError("optimizer.schedule needs an end: set trainer.max_steps or optimizer.total_steps, or take schedule=constant "
                        "and optimizer.warmup_steps in steps")


def warn(cfg: DictConfig) -> None:
    """Logs a warning for settings that can be run but are probably a mistake."""
    warmup, steps = cfg.optimizer.get("warmup_steps", 0), cfg.optimizer.get("total_steps") or cfg.trainer.get("max_steps", -1)
    if 0 < steps <= warmup:
        log.warning(f"optimizer.warmup_steps={warmup} is not below the {steps} steps of the run: optimizer.lr is never reached")


def check_model(plain: Mapping[str, Any]) -> None:
    """Raises UserError where a resolved config's model contradicts itself or its task."""
    model, objective = plain["model"], plain["task"]["objective"]
    for target, needed, others in (("attnzoo.models.GPT", "BERT", ("mlm", "classification")), ("attnzoo.models.BERT", "GPT", ("lm",))):
        if model.get("_target_") == target and objective in others:
            way_out = {"BERT": "take model=bert_tiny, or task=lm", "GPT": "take model=gpt_tiny, or task=mlm"}[needed]
            raise UserError(f"task={objective} must go with a {needed}, got model._target_={target}; {way_out}")
    if not is_known(plain, "model"):
        return
    _check_there(plain, "model", "dim", "n_layers", "n_heads", "train_context")
    dim, n_heads, n_kv_heads = model["dim"], model["n_heads"], model.get("n_kv_heads") or model["n_heads"]
    if model.get("head_dim") is None and dim % n_heads:
        raise UserError(f"model.dim={dim} is not divisible by model.n_heads={n_heads}; change one of them or set model.head_dim")
    if n_heads % n_kv_heads:
        raise UserError(f"model.n_heads={n_heads} must be a multiple of model.n_kv_heads={n_kv_heads}")
    _check_layers(model.get("layers"))
    try:
        by_layer.kinds(model.get("layers"), model["n_layers"])
        by_layer.check_positions(model.get("layers"), model.get("positions", "rotary"))
    except ValueError as error:
        raise UserError(str(error)) from error
    context, rows = model["train_context"], model.get("max_positions")
    if model.get("positions") == "learned" and rows is not None and context > rows:
        raise UserError(f"model.train_context={context} (data.seq_len) is longer than model.max_positions={rows}; "
                        f"set model.max_positions={context}, or model.positions=rotary")


def _check_layers(layers: Mapping[str, Any] | None) -> None:
    """Checks a description of layers, and the types of what its kinds override. A pattern without kinds is not checked here, because its
    kinds may be those of a checkpoint."""
    try:
        by_layer.check(layers if not layers or len(layers) > 1 else {**layers, "pattern": None})
    except ValueError as error:
        raise UserError(str(error)) from error
    for name, own in (layers or {}).items():
        if name != "pattern":
            _check_group({"layers": {name: own or {}}}, f"layers.{name}", BY_LAYER)


def _check_places(plain: Mapping[str, Any], *, tokenizer: bool = True) -> None:
    """Raises an error for a data file that does not exist, and if `tokenizer`, for an unknown tokenizer's name."""
    for data in ("data", "data.text"):
        if not is_known(plain, data):
            continue
        group = _select(plain, data)
        for key in ("paths", "val_paths", "path", "val_path"):
            for path in _texts(group.get(key)):
                if not (Path(path).expanduser().exists() or glob.has_magic(path)):
                    raise FileNotFoundError(f"{data}.{key}: {path!r} does not exist (relative to {Path.cwd()})")
        if tokenizer and isinstance(name := group.get("tokenizer"), str):
            from attnzoo.data.tokenizers import check_name

            check_name(name)


def _texts(value: Sequence[str] | str | None) -> Iterator[str]:
    yield from [value] if isinstance(value, str) else value or ()
