"""`init_from`: a run that starts from trained weights. Optimizer state, schedule, data and the step count start anew."""

import fnmatch
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from attnzoo import layers as by_layer
from attnzoo.data import tokenizers
from attnzoo.errors import UserError
from attnzoo.run import checks, values
from attnzoo.run.config import plain
from attnzoo.signatures import Count, check_value
from attnzoo.targets import check_targets, resolve, targets
from attnzoo.trained import Trained

log = logging.getLogger(__name__)

VOCABULARY = ("token_embedding.*", "head.*", "head_bias")
POSITIONS = "position_embedding.weight"
BY_TASK = {"_target_", "attention", "vocab_size"}  # keys of a model that the task and the tokenizer decide
PARTS = {"vocabulary": VOCABULARY, "positions": (POSITIONS,)}


def configure(cfg: DictConfig, trained: Trained) -> DictConfig:
    """The run's config with the model, the attention and the task of the trained weights, except for what the command itself sets.

    What the command sets is on its command line, or in an experiment or debug file. An option of a group (`model=gpt2_small`) sets all keys
    of the group, a key (`model.rope_scaling=yarn`) only itself. Outside of a Hydra application, the command sets everything.
    """
    record, named = trained.record, _Named(cfg)
    taken = [group for group in ("model", "attention") if not named.chosen(group)]
    _check_record(trained, taken)
    if not named.chosen("task") and record["task"] != cfg.task.objective:
        cfg = named.compose_again(f"task={record['task']}")
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    for group in taken:
        theirs = _encoder(record["model"]) if group == "model" else {**record["attention"], "_partial_": True}
        cfg[group] = {**theirs, **named.keys(group)}
    cfg.model.attention, cfg.model.train_context, cfg.model.layers = "${attention}", "${data.seq_len}", "${oc.select:layers}"
    if "model" in taken and not named.chosen("layers"):
        cfg.model.layers = by_layer.merged(record["model"].get("layers"), plain(cfg.get("layers")))
    if "vocabulary" in cfg.init_new and "vocab_size" not in named.keys("model"):
        cfg.model.vocab_size = None
    _set_contexts(cfg, trained, named)
    values.check_model(OmegaConf.to_container(cfg, resolve=True))
    checks.check_layers(cfg)
    return cfg


def _encoder(model: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a classifier's encoder, of which the task makes a classifier again; other models' configs unchanged."""
    if not model["_target_"].endswith(".BERTClassifier"):
        return dict(model)
    return {**{k: v for k, v in model.items() if k not in ("n_classes", "pooling")}, "_target_": "attnzoo.models.BERT"}


def _check_record(trained: Trained, groups: Iterable[str]) -> None:
    """Raises UserError for a record with other contents than attnzoo's classes and plain values: a checkpoint may be untrusted."""
    record = trained.record
    try:
        check_value("task", record.get("task"), values.TASK["objective"])
        check_value("context", record.get("context"), Count)
        for group in groups:
            check_value(group, record.get(group), dict)
            check_targets(record[group], ("attnzoo",), group)
            for _, target in targets(record[group], group):
                resolve(target, ("attnzoo",))
            if "_target_" not in record[group] or "${" in json.dumps(record[group]):
                raise ValueError(f"{group} must have a `_target_` and plain values, as attnzoo writes it")
    except (ValueError, TypeError) as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"init_from={trained.where}: {reason}; set it on the command line, such as attention=...") from error


def _set_contexts(cfg: DictConfig, trained: Trained, named: "_Named") -> None:
    """Sets what sequences longer than the trained ones need: max_positions for learned positions, or original_context for rotary ones."""
    record, model, seq_len = trained.record, cfg.model, cfg.data.seq_len
    table = trained.weights.get(POSITIONS)
    if table is not None and model.get("positions") == "learned" and named.keys("model").get("max_positions") is None:
        if seq_len > len(table) and cfg.init_positions is None and not _begins_anew(POSITIONS, cfg.init_new):
            raise UserError(f"init_from={trained.where} has {len(table)} learned positions, data.seq_len={seq_len} needs more; set "
                            f"init_positions=interpolate (or repeat), init_new=[positions], or data.seq_len={len(table)}")
        model.max_positions = max(seq_len, len(table))
    before = record["model"]
    scaled_alike = model.get("rope_scaling", "none") == before.get("rope_scaling", "none")
    origin = (scaled_alike and before.get("original_context")) or record["context"]
    extends = any(map(_extends, by_layer.by_kind(plain(model), plain(cfg.attention)).values()))
    if extends and seq_len > origin and named.keys("model").get("original_context") is None:
        model.original_context = origin


def _extends(layer: Mapping[str, Any]) -> bool:
    """Whether layers of this description extend the context and, for that, need to know the trained context length."""
    temperature = layer.get("attention_temperature", "none")
    return (layer.get("rope_scaling", "none") != "none" or get_class(layer["attention"]["_target_"]).extends_context
            or (temperature.get("name") if isinstance(temperature, Mapping) else temperature) in ("log", "yarn"))


def data_tokenizer(cfg: DictConfig, trained: Trained) -> dict[str, Any]:
    """Arguments of the data module: the tokenizer of the weights, if the data have a choice of tokenizer and the command made none."""
    given = trained.record["tokenizer"]
    if given is None or "tokenizer" not in cfg.data or "vocabulary" in cfg.init_new or "tokenizer" in _Named(cfg).keys("data"):
        return {}
    return {"tokenizer": tokenizers.from_record(given)}


def check_tokenizer(cfg: DictConfig, trained: Trained, tokenizer: Any) -> None:
    """Raises UserError if the data's tokenizer is not the one that the weights were trained with."""
    given = trained.record["tokenizer"]
    if given is None or _begins_anew("token_embedding.weight", cfg.init_new):
        return
    theirs = tokenizers.from_record(given)
    if tokenizers.fingerprint(theirs) != tokenizers.fingerprint(tokenizer):
        raise UserError(
            f"init_from={trained.where} was trained with the tokenizer {theirs.name!r} ({theirs.vocab_size} tokens), the data have "
            f"{tokenizer.name!r} ({tokenizer.vocab_size}); leave out data.tokenizer to take that of the weights, or initialise the "
            "embedding and the output layer anew with init_new=[vocabulary]")


def load(model: nn.Module, trained: Trained, *, new: Sequence[str] = (), positions: str | None = None) -> dict[str, Any]:
    """Copies the weights into the model. Returns what was done, in plain types: `loaded`, a number, and the names `new` and `left_out`.

    new: parts ("vocabulary", "positions") and names of parameters, with wildcards, that keep their initial values. positions: how a table
    of learned positions of another length is made: "interpolate" between its rows; "interpolate_image", the same in two dimensions, for one
    token in front of the pixels of a square image; or "repeat" them. UserError for other shapes.
    """
    state = model.state_dict()
    if idle := [part for part in new if not any(_begins_anew(name, [part]) for name in state)]:
        raise UserError(f"init_new={idle}: no parameter of the model has such a name; they are {', '.join(_gathered(state))}")
    loaded = _fitting(state, model.vocab_size, trained, new, positions)
    if not loaded:
        raise UserError(f"init_from={trained.where}: none of its weights belong to this run's model, {type(model).__name__}")
    model.load_state_dict(loaded, strict=False)
    left_out = [name for name in trained.weights if name not in loaded]
    return {"loaded": len(loaded), "new": [name for name in state if name not in loaded], "left_out": left_out}


def check_shapes(model: nn.Module, trained: Trained, *, new: Sequence[str] = (), positions: str | None = None) -> None:
    """Raises UserError where `load` would because of shapes. The model may be on the meta device, and its vocabulary not known yet."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not _begins_anew(name, VOCABULARY)}
    _fitting(state, model.vocab_size, trained, new, positions)


def _fitting(state: Mapping[str, Tensor], vocab_size: int, trained: Trained, new: Sequence[str],
             positions: str | None) -> dict[str, Tensor]:
    """The trained tensors that go into a model with this state dict; UserError for other shapes."""
    weights, fitting = trained.weights, {}
    for name, ours in state.items():
        theirs = weights.get(name)
        if theirs is None or _begins_anew(name, new):
            continue
        if theirs.shape[1:] == ours.shape[1:] and len(theirs) != len(ours):
            if name == POSITIONS and positions is not None:
                theirs = _resized(theirs, len(ours), positions)
            elif _begins_anew(name, VOCABULARY) and trained.record["model"]["vocab_size"] == vocab_size:  # with other padding
                theirs = torch.cat([theirs[:vocab_size], ours[vocab_size:]])
        if theirs.shape != ours.shape:
            longer = name == POSITIONS and theirs.shape[1:] == ours.shape[1:]
            way = "init_positions=interpolate makes a longer one of it" if longer else f"init_new=[{name}] begins it anew"
            raise UserError(f"init_from={trained.where}: {name} has shape {tuple(theirs.shape)}, the run's model {tuple(ours.shape)}; "
                            f"leave the model's sizes to the weights, without model=..., model.* and attention=..., or {way}")
        fitting[name] = theirs
    return fitting


def _begins_anew(name: str, new: Iterable[str]) -> bool:
    """Whether a parameter belongs to one of the parts, or matches one of the patterns, in `new`."""
    patterns = [pattern for part in new for pattern in PARTS.get(part, (part,))]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _resized(table: Tensor, rows: int, how: str) -> Tensor:
    if how == "repeat":  # as Longformer's (Beltagy et al. 2020, arXiv:2004.05150)
        return table.repeat(-(-rows // len(table)), 1)[:rows]
    if how == "interpolate_image":
        old, new = (math.isqrt(n - 1) for n in (len(table), rows))
        if old**2 != len(table) - 1 or new**2 != rows - 1:
            raise UserError(f"init_positions=interpolate_image: both tables of learned positions must have one row and those of a square "
                            f"image, n * n + 1, got {len(table)} and {rows}")
        image = table[1:].float().T.view(1, -1, old, old)
        pixels = F.interpolate(image, (new, new), mode="bilinear").flatten(2)[0].T
        return torch.cat([table[:1], pixels.to(table.dtype)])
    return F.interpolate(table.float().T[None], rows, mode="linear", align_corners=True)[0].T.to(table.dtype)


def describe(trained: Trained, done: Mapping[str, Any], cfg: DictConfig) -> str:
    """What was loaded, what is new, what was left out, and how the model differs from the trained one."""
    step = trained.content.get("global_step")
    lines = [f"weights of {trained.where}" + (f" (step {step})" if step is not None else "") + f": {done['loaded']} tensors loaded"]
    lines += [f"{label}: {', '.join(_gathered(done[key]))}" for key, label in (("new", "new"), ("left_out", "left out")) if done[key]]
    if changed := changes(trained, cfg):
        lines.append("not as they were trained: " + ", ".join(f"{key}={new} (was {old})" for key, (old, new) in changed.items()))
    return "\n  ".join(lines)


def names(model: nn.Module, record: Mapping[str, Any]) -> list[str]:
    """The model's class and its attention, in place of the names of presets, which do not describe an initialised run."""
    return [type(model).__name__, by_layer.attention_name(record["model"], record["attention"])]


def changes(trained: Trained, cfg: DictConfig) -> dict[str, list[Any]]:
    """[value as trained, value now] of each key of model and attention that differs."""
    found = {}
    for group in ("model", "attention"):
        old, new = trained.record[group], OmegaConf.to_container(cfg[group], resolve=True)
        for key in new.keys() - (BY_TASK if group == "model" else set()):
            if old.get(key) != new[key]:
                found[f"{group}.{key}"] = [old.get(key), new[key]]
    return dict(sorted(found.items()))


def _gathered(names: Iterable[str]) -> list[str]:
    """Parameter names with `*` in place of a block's number, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in names))


class _Named:
    """What the command itself sets, on its command line or by an experiment or debug file, as opposed to defaults. See `configure`."""

    def __init__(self, cfg: DictConfig):
        self.cfg, self.application = cfg, HydraConfig.initialized()
        if self.application:
            job = HydraConfig.get()
            self.config, self.overrides = job.job.config_name, list(job.overrides.task)
            self.parsed = {override.key_or_group for override in OverridesParser.create().parse_overrides(self.overrides)}
            self.choices = dict(job.runtime.choices)
            self.defaults = dict(hydra.compose(self.config, return_hydra_config=True).hydra.runtime.choices)

    def is_on_command_line(self, key: str) -> bool:
        return not self.application or key in self.parsed

    def chosen(self, group: str) -> bool:
        """Whether the command chose an option of the group, be it the default one."""
        return self.is_on_command_line(group) or self.choices.get(group) != self.defaults.get(group)

    def keys(self, group: str) -> dict[str, Any]:
        """The group's keys that the command set, with their values, interpolations unresolved."""
        ours = OmegaConf.to_container(self.cfg[group], resolve=False)
        if not self.application:
            return ours
        plain = OmegaConf.to_container(hydra.compose(self.config, [f"{group}={self.choices[group]}"])[group], resolve=False)
        return {k: v for k, v in ours.items() if k not in plain or plain[k] != v or self.is_on_command_line(f"{group}.{k}")}

    def compose_again(self, *overrides: str) -> DictConfig:
        return hydra.compose(self.config, [*self.overrides, *overrides])
