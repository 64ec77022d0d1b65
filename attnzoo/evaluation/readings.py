"""Readings: the ways in which a checkpoint is read, each a line of overrides such as "attention=dual_chunk", "" for none."""

import shlex
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from attnzoo.errors import UserError
from attnzoo.run.config import plain


@dataclass(frozen=True)
class Reading:
    """line: the overrides as on the command line. attention, model: what they change in the checkpoint's, as plain dicts."""

    line: str
    attention: dict[str, Any]
    model: dict[str, Any]


def compose_readings(cfg: DictConfig) -> list[Reading]:
    """What `readings` asks for, each composed over the command's other overrides; without it one reading, with the overrides of cfg itself.

    cfg: configs/eval.yaml, composed. Raises UserError for a line that cannot be composed, or overrides anything but attention and model.
    """
    given = cfg.readings
    if given is None:
        return [_reading("", cfg)]
    if not OmegaConf.is_list(given) or not given or any(not isinstance(line, str) for line in given):
        raise UserError(f"readings={given} must be a list of overrides of attention and model, such as ['', attention=dual_chunk]")
    command = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    shared = [override for override in command if not override.lstrip("+").startswith("readings=")]
    return [_reading(line, _compose(line, shared)) for line in dict.fromkeys(given)]


def _compose(line: str, shared: list[str]) -> DictConfig:
    try:
        overrides = shlex.split(line)
    except ValueError as error:
        raise UserError(f"readings: {line!r} must be overrides as on the command line: {error}") from error
    for override in overrides:
        if not override.lstrip("+").startswith(("attention=", "attention.", "model.")):
            raise UserError(f"readings: {override!r} must override attention or model.rope_*, nothing else differs between readings")
    try:
        return hydra.compose("eval", [*shared, *overrides])
    except HydraException as error:
        reason = " ".join(str(error).split()).partition(" Config search path")[0]
        raise UserError(f"readings: {line!r}: {reason}") from error


def _reading(line: str, config: DictConfig) -> Reading:
    model = {key: value for key, value in plain(config.model).items() if value is not None}
    return Reading(line, plain(config.get("attention")), model)
