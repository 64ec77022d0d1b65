"""Checkpoint files: written completely or not at all, read without running code from them, and rebuilt into a model."""

import contextlib
import copy
import functools
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnzoo import layers as by_layer
from attnzoo.errors import UserError
from attnzoo.run.files import write_whole

FORMAT = 1
TASKS = ("lm", "mlm", "classification")
# options of model and attention that may change when a run is resumed; train_context is data.seq_len, which the data check themselves
CHANGEABLE = ("impl", "dropout", "attention_dropout", "train_context")
PREFIX = "model."  # of the model's weights in the state dict


@dataclass(frozen=True)
class Checkpoint:
    """A model in eval mode, as trained or with overrides, and what belongs to it."""

    model: nn.Module
    tokenizer: Any
    task: str  # lm, mlm or classification
    context: int  # the sequence length in training, in tokens
    record: dict  # the file's description of model, attention, tokenizer, data and versions
    overrides: dict = field(default_factory=dict)  # what differs from the record, by group: {"attention": {...}, "model": {...}}
    attention: str = ""  # the names of its variants


def save(content: dict, path: str | os.PathLike) -> None:
    """torch.save, which keeps an earlier file until the new one is complete. Raises UserError if that fails, as on a full disk."""
    write_whole(path, functools.partial(torch.save, content))


def existing_file(path: str | os.PathLike) -> Path:
    """The path of a checkpoint file. Raises UserError if there is no such file, and says what is there instead."""
    path = Path(path).expanduser()
    if path.is_dir():
        inside = sorted(path.glob("checkpoints/*.ckpt")) or sorted(path.glob("*.ckpt"))
        raise UserError(f"ckpt_path={path} is a folder; " + (f"set ckpt_path={inside[0]}" if inside else "it holds no checkpoints/*.ckpt"))
    if not path.is_file():
        beside = ", ".join(sorted(p.name for p in path.parent.glob("*.ckpt"))) if path.parent.is_dir() else "no such folder"
        raise UserError(f"ckpt_path={path} does not exist; beside it: {beside or 'no *.ckpt'}")
    return path


def read(path: str | os.PathLike, map_location: Any = "cpu") -> dict:
    """The content of a checkpoint of this project, which holds only tensors and plain types. Raises UserError for anything else."""
    path = existing_file(path)
    try:
        damaged = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None  # torch does not look at the checksums
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is not that of its bytes")
        content = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is not a checkpoint that holds only tensors and plain types, so it was not loaded: it could run code"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}".partition("\n")[0]
        raise UserError(f"{path} is damaged or no checkpoint ({reason}); take another one") from error
    record = content.get("attnzoo") if isinstance(content, dict) else None
    if not isinstance(record, dict) or "state_dict" not in content:
        raise UserError(f"{path} is not a checkpoint of attnzoo; weights from Hugging Face load with attnzoo.hub")
    if record.get("format") != FORMAT:
        raise UserError(f"{path} has checkpoint format {record.get('format')}, this version reads {FORMAT}; use the attnzoo that wrote it")
    weights = content["state_dict"]
    if not isinstance(weights, dict) or not all(isinstance(n, str) and isinstance(value, torch.Tensor) for n, value in weights.items()):
        raise UserError(f"{path} is damaged: its state_dict must hold tensors by name; take another one")
    return content


def load(
    path: str | os.PathLike,
    *,
    attention: Mapping | None = None,
    model: Mapping | None = None,
    trust: tuple[str, ...] = (),
    map_location: Any = "cpu",
) -> Checkpoint:
    """Rebuild the model of a checkpoint with its weights.

    attention: a dict with `_target_` replaces the variant; the keys of one without are merged over the checkpoint's. model: keys that are
    merged over the checkpoint's, such as rope_scaling. `layers` is merged as by `attnzoo.layers.merged`. trust: modules beside attnzoo
    whose classes the checkpoint may name.
    """
    return rebuild(read(path, map_location), path, attention=attention, model=model, trust=trust)


def rebuild(content: dict, path: str | os.PathLike, *, attention: Mapping | None = None, model: Mapping | None = None,
            trust: tuple[str, ...] = ()) -> Checkpoint:
    """`load` for content that was already read from `path`."""
    from attnzoo.models import from_config

    record = content["attnzoo"]
    attention, model = dict(attention or {}), dict(model or {})
    try:
        attention_config = attention if "_target_" in attention else {**copy.deepcopy(record["attention"]), **attention}
        model_config = {**copy.deepcopy(record["model"]), **model}
        if "layers" in model:
            model_config["layers"] = by_layer.merged(record["model"].get("layers"), model["layers"])
        weights = {name.removeprefix(PREFIX): value for name, value in content["state_dict"].items() if name.startswith(PREFIX)}
        tokenizer, task, context = _tokenizer(record["tokenizer"]), record["task"], record["context"]
        if task not in TASKS or not isinstance(context, int) or context < 1:
            raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}, and context={context!r} a positive number of tokens")
        if _n_blocks(model_config) > len({name.split(".")[1] for name in weights if name.startswith("blocks.")}):
            raise ValueError(f"n_layers={model_config['n_layers']} are more than its weights have")
        build = functools.partial(from_config, model_config, attention_config, trust=trust)
        # shapes are checked first, on the meta device: a wrong size may need more memory than there is. A user's own layer may not work
        # there
        with contextlib.suppress(RuntimeError), torch.device("meta"):
            _check_fit(path, weights, build())
        built = build()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot build the model of {path}: {error}") from error
    _check_fit(path, weights, built)
    built.load_state_dict(weights)
    overrides = {
        group: changed
        for group, config, recorded in (("attention", attention_config, record["attention"]), ("model", model_config, record["model"]))
        if (changed := {key: value for key, value in config.items() if key not in recorded or recorded[key] != value})
    }
    if "layers" in overrides.get("model", {}):  # each key that differs, by its dotted name; another variant is a group of its own
        for key, value in by_layer.changes(record["model"].get("layers"), overrides["model"].pop("layers")).items():
            group, part = (key, value) if isinstance(value, Mapping) else ("model", {key: value})
            overrides[group] = {**overrides.get(group, {}), **part}
        overrides = {group: changed for group, changed in overrides.items() if changed}
    name = by_layer.attention_name(model_config, attention_config)
    return Checkpoint(built.eval(), tokenizer, task, context, record, overrides, name)


def _check_fit(path: Path, weights: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    if (mismatch := _first_mismatch(weights, {name: value.shape for name, value in model.state_dict().items()})) is not None:
        raise UserError(
            f"the weights of {path} do not fit the model: {mismatch}; drop the attention or model override, or train that variant"
        )


def _tokenizer(record: Any) -> Any:
    from attnzoo.data.tokenizers import from_record

    if not isinstance(record, Mapping):
        raise ValueError(f"tokenizer={record!r} must be the record of one")
    return from_record(record)


def _n_blocks(model: Mapping) -> int:
    n_layers = model.get("n_layers", 0)
    return n_layers if isinstance(n_layers, int) else 0


def check_same_model(content: dict, shapes: Mapping[str, torch.Size], record: dict) -> None:
    """Raises UserError, which says what differs, unless a checkpoint fits a run that resumes from it: its weights must have these shapes,
    and its settings and its optimizer must be those of `record`."""
    mismatch = _first_mismatch(content.get("state_dict", {}), shapes)
    theirs, differences = content["attnzoo"], []
    for group in ("model", "attention", "task"):
        old, new = (found if isinstance(found := r.get(group), dict) else {group: found} for r in (theirs, record))
        # if the shapes are the same, a key that only one of them has may be an option of a later version
        keys = old | new if mismatch else [key for key in old if key in new and key not in CHANGEABLE]
        differences += [f"{group}.{key}={old.get(key)}, not {new.get(key)}" for key in keys if old.get(key) != new.get(key)]
    old, new = theirs.get("optimizer"), record.get("optimizer")
    if old and new and old != new:  # earlier versions did not record it
        differences.append(f"optimizer._target_={old}, not {new}")
    if mismatch:
        raise UserError(f"the checkpoint does not fit this run: {mismatch}. It was trained with {'; '.join(differences) or 'other code'}")
    if differences:
        raise UserError(f"the checkpoint does not fit this run: it was trained with {'; '.join(differences)}. Set what it was, or begin a "
                        "new run with its weights by init_from")


def _first_mismatch(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> str | None:
    for name, shape in shapes.items():
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != shape:
            return f"{name} has shape {tuple(weights[name].shape)}, the model needs {tuple(shape)}"
    return next((f"{name} is unknown to the model" for name in weights if name not in shapes), None)
