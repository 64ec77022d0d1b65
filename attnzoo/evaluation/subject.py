"""Prepares a run for evaluation: its model with its weights on a device, its data, and the columns that identify it in the table."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

import attnzoo.data
from attnzoo import checkpoint as checkpoints
from attnzoo.attention.supports import check_path
from attnzoo.data.tokenizers import NumberTokenizer
from attnzoo.errors import UserError
from attnzoo.evaluation import together
from attnzoo.evaluation.measurement import digest
from attnzoo.evaluation.measurement import key as name_of
from attnzoo.evaluation.runs import Run, find
from attnzoo.run.config import plain
from attnzoo.run.values import check_target
from attnzoo.targets import check_targets, resolve, targets
from attnzoo.training.record import versions

# names of source files that do not influence any number
SHOWING = ("plots.py", "heatmaps.py", "summary.py", "overview.py", "seeds.py", "compare.py", "progress.py", "report.py", "page.py")
# keys of a run's `data` that belong to the objective and not to the text
OBJECTIVE = ("cross_documents", "packed", "mask_rate", "eval_mask_rate")


@dataclass(frozen=True)
class Subject:
    """A run that is ready for evaluation.

    model: on its device, in eval mode.
    data: a data module after `setup`.
    context: the training context in tokens.
    columns: columns that are the same in every row.
    identity: plain JSON of everything that decides what is measured, except the task.
    broken: the reason why none of its numbers has a meaning, "" if they do.
    reader: called with the path of a checkpoint (None for the run's own) and overrides of attention and model. Returns a key that
        identifies that model, and a function that loads it onto the device in the same precision.
    """

    model: torch.nn.Module
    data: Any
    context: int
    columns: dict[str, Any]
    identity: dict[str, Any]
    broken: str = ""
    reader: Callable[[str | None, Mapping, Mapping], tuple[str, Callable[[], torch.nn.Module]]] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def prepare(run: Run, attention: dict, model: dict, cfg: DictConfig, build_data: Callable[[dict], Any]) -> Subject:
    """Loads a run's checkpoint with these overrides of attention and model, and its data, or the data that cfg names instead."""
    path = run.existing_checkpoint()
    checkpoint = checkpoints.load(path, attention=attention, model=model, trust=tuple(cfg.trust))
    trained = run.config() or {}
    layer = attention if "_target_" in attention else {**checkpoint.record["attention"], **attention}
    precision = cfg.precision or trained.get("trainer", {}).get("precision", "32")
    if precision == "fp8":  # this is for training only; such a run is validated in bf16-mixed
        precision = "bf16-mixed"
    matmul_precision = trained.get("matmul_precision", "highest")
    torch.set_float32_matmul_precision(matmul_precision)
    together.check(checkpoint.model)
    placed = _place(checkpoint.model, cfg.accelerator, precision)
    device = next(placed.parameters()).device
    check_path(layer.get("impl"), device)
    data = build_data(_data_config(run, trained.get("data"), plain(cfg.get("data")), checkpoint, cfg.trust))
    _check_tokens(data, checkpoint.tokenizer)
    data.tokenizer = checkpoint.tokenizer  # the one that the model was trained with, even if the data's configuration names another
    data.prepare_data()
    data.setup("validate")
    identity = {
        "checkpoint": digest(path),
        "model": {**checkpoint.record["model"], **model},
        "attention": layer,
        "data": data.record()["sha256"],
        "precision": [str(precision), matmul_precision],
        **_machine(device),
        "code": _code(checkpoint.model),
    }

    def reader(ckpt_path: str | None, attention: Mapping, model: Mapping) -> tuple[str, Callable[[], torch.nn.Module]]:
        other = path if ckpt_path is None else find(ckpt_path, None, cfg.checkpoint)[0].existing_checkpoint()
        load = partial(_load_beside, checkpoint, other, attention, model, cfg, precision)
        return name_of(digest(other), dict(attention), dict(model)), load

    columns = _columns(run, checkpoint, data.record())
    return Subject(placed, data, checkpoint.context, columns, identity, _not_finite(checkpoint.model), reader)


def _load_beside(checkpoint: checkpoints.Checkpoint, path: Path, attention: Mapping, model: Mapping, cfg: DictConfig,
                 precision: str | int) -> torch.nn.Module:
    other = checkpoints.load(path, attention=attention, model=model, trust=tuple(cfg.trust))
    if other.tokenizer.record() != checkpoint.tokenizer.record():
        raise UserError(f"{path} has the tokenizer {other.tokenizer.name}, and not that of the evaluated checkpoint")
    return _place(other.model, cfg.accelerator, precision)


def _not_finite(model: torch.nn.Module) -> str:
    weights = dict(model.named_parameters())
    bad = [name for name, weight in weights.items() if not weight.isfinite().all()]
    return f"{len(bad)} of {len(weights)} weights hold NaN or infinity, first {bad[0]}: training diverged" if bad else ""


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "versions": {name: found for name, found in versions().items() if name in ("torch", "triton")}}


def _code(model: torch.nn.Module) -> str:
    """sha256 of the code that computes: this project's sources except SHOWING, and the source files of the model's layers."""
    packages = (find_spec(name).submodule_search_locations for name in ("attnzoo", "attnzoo_kernels"))
    files = {path for (folder,) in packages for path in Path(folder).rglob("*.py") if path.name not in SHOWING}
    files |= {Path(path) for module in model.modules() if (path := getattr(sys.modules[type(module).__module__], "__file__", None))}
    return digest(*sorted(files))


def _place(model: torch.nn.Module, accelerator: str, precision: str | int) -> torch.nn.Module:
    """The model on a device and in eval mode. It computes in the precision that a Trainer with these settings would use."""
    from lightning.fabric import Fabric

    number = together.device_number(accelerator)
    try:
        fabric = Fabric(accelerator=accelerator, devices=1 if number is None else [number], precision=precision)
    except Exception as error:  # Lightning and the packages that it imports for a device raise many kinds of exceptions
        raise UserError(f"accelerator={accelerator}, precision={precision}: {' '.join(str(error).split())}") from error
    placed = fabric.setup_module(model).eval()
    placed.backward = fabric.backward  # Fabric requires that it starts a backward pass
    if hasattr(model, "generate"):
        placed.mark_forward_method("generate")
        placed.mark_forward_method("decoding")
    return placed


def _data_config(run: Run, trained: dict | None, override: dict, checkpoint: checkpoints.Checkpoint, trust: Sequence[str]) -> dict:
    """The run's `data` with the keys of an override, and likewise the text within it (`data.text`). An override with `_target_` replaces
    it, except for what belongs to the objective."""
    if trained is None and "_target_" not in override:
        raise UserError(f"{run.config_path} is missing, which says what data the run was validated on; say it with data=...")
    if "_target_" not in override:
        _check_data(trained, trust)
        check_target("data", OmegaConf.create({**override, "_target_": trained["_target_"]}))
        text = {"text": {**trained["text"], **override["text"]}} if "text" in override and "_target_" not in override["text"] else {}
        return {**trained, **override, **text}
    tied = {key: trained[key] for key in OBJECTIVE if key in (trained or {}) and key in override} | {"objective": checkpoint.task}
    text = {"text": {**override["text"], "objective": checkpoint.task}} if "text" in override else {}
    return {**override, **text, **tied, "seq_len": checkpoint.context}


def _check_tokens(data: Any, tokenizer: Any) -> None:
    """Raises UserError for numbers where the model reads text, for text where it reads numbers, and for more numbers than it knows."""
    own = vars(data).get("tokenizer")  # of data made of numbers, which no tokenizer is given
    numbers = isinstance(own, NumberTokenizer)
    if numbers != isinstance(tokenizer, NumberTokenizer) or (numbers and own.vocab_size > tokenizer.vocab_size):
        raise UserError(f"data={data.kind}: must be made of the model's tokens, {tokenizer.name} ({tokenizer.vocab_size}), got "
                        + (f"numbers ({own.vocab_size})" if numbers else "text"))


def _check_data(config: dict, trust: Sequence[str]) -> None:
    """Raises UserError for a run's data configuration that would call anything but attnzoo's data modules and what `trust` allows.

    The run may come from a source that is not trusted.
    """
    known = {f"attnzoo.data.{name}" for name in attnzoo.data.__all__}
    try:
        check_targets(config, trust, "data", known)
        for _, target in targets(config, "data"):
            if target not in known:
                resolve(target, trust)
    except ValueError as error:
        raise UserError(f"the run's {error}") from error


def _columns(run: Run, checkpoint: checkpoints.Checkpoint, data: dict) -> dict[str, Any]:
    trained_on_it = data["sha256"] == checkpoint.record["data"]["sha256"]
    return {
        "run": run.name,
        "attention": checkpoint.attention,
        "reading": " ".join(_overrides(checkpoint.overrides)),
        "tokenizer": checkpoint.tokenizer.name,
        "data": f"{data['source']['kind']}@{data['sha256'][:8]}" + ("" if trained_on_it else " (not that of training)"),
        "context": checkpoint.context,
    }


def _overrides(overrides: Mapping[str, Mapping]) -> Iterator[str]:
    """The overrides as on the command line. For a variant that replaced another, only the options that differ from its defaults."""
    for group, changes in overrides.items():
        defaults = {}
        if target := changes.get("_target_"):
            module, _, name = target.rpartition(".")
            defaults = {p.name: p.default for p in inspect.signature(getattr(import_module(module), name)).parameters.values()}
            yield f"{group}={_variant(target)}"
        for key, value in changes.items():
            default = defaults.get(key, inspect.Parameter.empty)
            if key not in ("_target_", "_partial_") and value != (list(default) if isinstance(default, tuple) else default):
                yield f"{group}.{key}={value}"


def _variant(target: str) -> str:
    """The short name of a variant: flash for attnzoo.attention.flash.FlashAttention."""
    return target.split(".")[-2]
