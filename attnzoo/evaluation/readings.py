"""Readings: a reading is a way to run a checkpoint, given as a line of overrides such as "attention=dual_chunk" ("" for none)."""

import difflib
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from attnzoo.errors import UserError
from attnzoo.evaluation.runs import find
from attnzoo.run import checks
from attnzoo.run.command_line import composition_message
from attnzoo.run.config import plain

FOLDER = "evaluation/readings"  # of the lists, below configs/; a folder configs/readings would make `readings` a config group of Hydra
CONTEXT = re.compile(r"\{context((?:[-*/]\d+)*)\}")
GROUPS = ("attention=", "attention.", "layers=", "layers.", "model.")


@dataclass(frozen=True)
class Reading:
    """line: the overrides as on the command line. attention, model: the options that they change in the checkpoint, as plain dicts."""

    line: str
    attention: dict[str, Any]
    model: dict[str, Any]


def compose_readings(cfg: DictConfig) -> list[Reading]:
    """The readings that cfg.readings lists, each composed with the command's other overrides. None gives one reading with cfg's overrides.

    cfg: configs/eval.yaml, composed. Its `readings` is a list of lines, or the name of a file of configs/evaluation/readings with such a
    list. In a line {context} is the training context in tokens, and {context/2-1} is half of it less one. Raises UserError for a name
    that does not exist, and for a line that cannot be composed, has a value of a wrong kind, or overrides anything but attention, layers
    and model.
    """
    if cfg.readings is None:
        return [_reading("", cfg)]
    lines = _named(cfg.readings) if isinstance(cfg.readings, str) else cfg.readings
    if not OmegaConf.is_list(lines) or not lines or any(not isinstance(line, str) for line in lines):
        raise UserError(f"readings={cfg.readings} must be a list of overrides of attention and model, such as ['', attention=dual_chunk], "
                        "or the name of a file of configs/evaluation/readings")
    command = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    shared = [override for override in command if not override.lstrip("+").startswith("readings=")]
    return [_reading(line, _compose(line, shared, cfg.run_dir)) for line in dict.fromkeys(_for_context(lines, cfg))]


def _named(name: str) -> Sequence[str]:
    """The lines of a file of configs/evaluation/readings."""
    known = GlobalHydra.instance().config_loader().get_group_options(FOLDER)
    if name not in known:
        near = difflib.get_close_matches(name, known)
        raise UserError(f"readings={name}: there is no such list; it must be one of {', '.join(known)}, or lines of overrides in brackets"
                        + (f"; like it: {', '.join(near)}" if near else ""))
    return hydra.compose(f"{FOLDER}/{name}").get("lines")


def _for_context(lines: Sequence[str], cfg: DictConfig) -> list[str]:
    if not any(CONTEXT.search(line) for line in lines):
        return list(lines)
    contexts = set()
    for run in find(cfg.ckpt_path, cfg.runs, cfg.checkpoint):
        with suppress(UserError):  # reported later, when the run is evaluated
            contexts.add(run.context())
    if len(contexts) != 1:
        raise UserError("readings: {context} is the training context, which must be the same for all runs, got "
                        f"{', '.join(map(str, sorted(contexts))) or 'none'}; evaluate the runs of each by themselves")
    (context,) = contexts
    return [CONTEXT.sub(lambda found: str(_computed(context, found[1])), line) for line in lines]


def _computed(value: int, steps: str) -> int:
    """Applies the steps, such as "/2-1", from left to right in integer arithmetic."""
    for step, number in re.findall(r"([-*/])(\d+)", steps):
        if step == "/" and int(number) == 0:
            raise UserError(f"readings: {{context{steps}}} must not divide by zero")
        value = value - int(number) if step == "-" else value * int(number) if step == "*" else value // int(number)
    return value


def _compose(line: str, shared: list[str], run_dir: str) -> DictConfig:
    try:
        overrides = shlex.split(line)
    except ValueError as error:
        raise UserError(f"readings: {line!r} must be overrides as on the command line: {error}") from error
    for override in overrides:
        if not override.lstrip("+").startswith(GROUPS):
            raise UserError(f"readings: {override!r} must override attention, layers or model, nothing else differs between readings")
    try:
        config = hydra.compose("eval", [*shared, *overrides])
        config.run_dir = run_dir  # which depends on the time
        checks.check_evaluation(config)
    except HydraException as error:
        raise UserError(f"readings: {line!r}: {composition_message(error).partition(' Config search path')[0]}") from error
    except (UserError, ValueError) as error:
        raise UserError(f"readings: {line!r}: {error}") from error
    return config


def _reading(line: str, config: DictConfig) -> Reading:
    model = {key: value for key, value in plain(config.model).items() if value is not None}
    return Reading(line, plain(config.get("attention")), model)
