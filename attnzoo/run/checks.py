"""Checks every group of a composed config against the signature of the class that it configures, before anything is built."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from attnzoo import layers as by_layer
from attnzoo.errors import UserError
from attnzoo.run import values
from attnzoo.run.config import plain
from attnzoo.run.values import check_target


def check_training(cfg: DictConfig) -> None:
    """Raises UserError or ValueError for a config of train.py that cannot be run."""
    values.check_training(cfg)
    if not isinstance(cfg.compile, bool):
        from torch._inductor import list_mode_options  # takes a second to import

        if cfg.compile not in list_mode_options():
            raise UserError(f"compile={cfg.compile} must be false, true, or a mode of torch.compile: {', '.join(list_mode_options())}")
    _check_partial("attention", plain(cfg.attention))
    for where, config in _targets("", cfg):
        check_target(where, config)
    if cfg.init_from is None:  # otherwise the trained weights determine the model and its attention
        check_layers(cfg)


def check_layers(cfg: DictConfig) -> None:
    """Checks the attention of each kind of layer against its signature, and against what the variant supports in this model."""
    from attnzoo.attention.temperature import make_temperature  # imports torch

    for kind, model in by_layer.by_kind(plain(cfg.model), plain(cfg.attention)).items():
        _check_partial(by_layer.key(kind), model["attention"])
        check_target(by_layer.key(kind), OmegaConf.create(model["attention"]))
        if not values.is_known({"model": model}, "model"):
            continue
        try:
            get_class(model["attention"]["_target_"]).check_supported(
                get_class(model["_target_"]).causal, model.get("positions", "rotary"), model.get("attention_dropout", 0.0))
            make_temperature(model.get("attention_temperature", "none"), model.get("original_context") or model["train_context"])
        except ValueError as error:
            raise UserError(f"layers.{kind}: {error}" if kind else str(error)) from error


def check_monitors(cfg: DictConfig, module: Any) -> None:
    """Raises UserError where a callback monitors a validation metric that the task does not have. Lightning would notice only after the
    first validation."""
    callbacks = {name: options for name, options in plain(cfg.get("callbacks")).items() if options}
    if not type(module).__module__.startswith("attnzoo.") or not all(values.is_known(callbacks, name) for name in callbacks):
        return  # a user's own class may log it
    known = module.validation_metrics(torch.ones(()), torch.ones(())).keys()
    for name, options in callbacks.items():
        if str(monitor := options.get("monitor")).startswith("val/") and monitor not in known:
            raise UserError(f"callbacks.{name}.monitor={monitor}: must be a metric of task={module.record['task']}: {', '.join(known)}")


def _check_partial(where: str, config: Mapping[str, Any]) -> None:
    if "_target_" not in config or config.get("_partial_") is not True:
        raise UserError(f"{where}: its file must have `_target_`, the layer's class, and `_partial_: true`, because the model builds each "
                        f"layer with an AttentionSpec, got the keys {', '.join(config)}")


def check_evaluation(cfg: DictConfig) -> None:
    """Raises UserError or ValueError for a config of eval.py that cannot be run."""
    values.check_evaluation(cfg)
    for where, config in _targets("", cfg):
        check_target(where, config)


def _targets(where: str, config: Any) -> Iterator[tuple[str, DictConfig]]:
    """Every mapping that has a `_target_`, with its dotted path."""
    if not OmegaConf.is_dict(config):
        return
    if config.get("_target_") is not None:
        yield where, config
    for key in config:
        if not OmegaConf.is_missing(config, key):
            yield from _targets(f"{where}.{key}".lstrip("."), config[key])
