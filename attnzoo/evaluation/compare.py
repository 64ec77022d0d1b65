"""A comparison runs every task on every run in every reading, and reuses measurements that are already stored."""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from attnzoo.errors import NoRoom, UserError
from attnzoo.evaluation import parts, together
from attnzoo.evaluation.cost import TASK as COST
from attnzoo.evaluation.logits import mark_nan, watched
from attnzoo.evaluation.measurement import FILE, Measurement, Store, key
from attnzoo.evaluation.memory import shortage
from attnzoo.evaluation.page import About
from attnzoo.evaluation.perplexity import default_lengths
from attnzoo.evaluation.progress import Progress
from attnzoo.evaluation.readings import Reading
from attnzoo.evaluation.report import conclude
from attnzoo.evaluation.results import Row, Table
from attnzoo.evaluation.runs import Run, find
from attnzoo.evaluation.seeds import name_settings
from attnzoo.evaluation.subject import Subject, prepare
from attnzoo.training.record import versions

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig,
    *,
    tasks: Mapping[str, Callable],
    build_data: Callable[[dict], Any],
    readings: Sequence[Reading],
    loggers: Iterable = (),
    folder: str | Path,
) -> list[Row]:
    """Evaluates the runs that cfg names. Writes results.csv, summary.md, report.html and plots into folder, logs them, and returns the
    rows.

    cfg: the keys of configs/eval.yaml. tasks: by name, each called as task(model, data, lengths=..., context=...) -> Plan, and with
    reader=... (of subject.Subject) where it has such an argument; a task that is None is skipped.
    build_data: a `data` configuration as a plain dict -> data module. readings: the ways in which each run is read in turn.
    loggers: Lightning's.

    Measurements that another or an interrupted comparison has finished are reused (attnzoo.evaluation.measurement.Store). A measurement
    or a run that fails gets a row without a value, whose note says why. If there is only one run in one reading and it cannot be loaded,
    the error is raised.
    """
    folder, found = Path(folder), find(cfg.ckpt_path, cfg.runs, cfg.checkpoint)
    chosen = {name: task for name, task in tasks.items() if task is not None}
    if not chosen:
        raise UserError("evaluation.tasks is empty: nothing would be measured; choose an evaluation=..., or leave one of its tasks in")
    lengths, of_run = _lengths(cfg.evaluation.lengths, found), _columns(found)
    pairs = parts.own([(one, reading) for one in found for reading in readings], cfg.part)
    table, devices = Table(folder / "results.csv"), set()
    log.info(f"{len(pairs)} to evaluate; results go to {folder}")
    try:
        with Progress(len(pairs)) as progress:
            for one, reading in pairs:
                title = " ".join(filter(None, (one.name, reading.line)))
                progress.begin_reading(title)
                columns = {**of_run[one.name], "reading": reading.line}
                try:
                    subject = prepare(one, reading.attention, reading.model, cfg, build_data)
                    columns |= subject.columns
                    devices.add(subject.identity["device"])
                    if (columns["run"], columns["reading"]) in {row.line for row in table.rows}:
                        log.info(f"{title}: nothing new, {reading.line or 'no override'} is how it was read before")
                    else:
                        place = Path(cfg.store).expanduser().absolute() if cfg.store else one.folder
                        store = Store(place / FILE, writes=together.is_first())
                        _evaluate(title, subject, chosen, lengths, store, cfg.remeasure, columns, table, progress)
                except Exception as error:
                    if len(pairs) == 1:
                        raise
                    row = Row(**columns, note=f"failed: {_reason(error)}")
                    table.add([row])
                    log.warning(f"{title} {row.note}")
                    log.debug("", exc_info=error)
                progress.end_reading()
    finally:  # also where the comparison is interrupted
        table.write()
    if not together.is_first():
        return table.rows
    about = About(OmegaConf.to_yaml(cfg, resolve=True), versions(), sorted(devices))
    return conclude(table.rows, loggers, folder, about)


def _columns(found: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By run name, the columns that are known without the checkpoint: the run's name, its seed and its `settings`."""
    configs = {}
    for one in found:
        configs[one.name] = None
        with suppress(UserError):  # reported later, when the run is evaluated
            configs[one.name] = one.config()
    settings = name_settings(configs)
    return {
        name: {"run": name, "seed": (config or {}).get("seed"), "settings": settings[name]} for name, config in configs.items()
    }


def _lengths(given: Sequence[int] | None, found: Sequence[Run]) -> list[int]:
    """The lengths to evaluate. They are the same for all runs, because the longest length decides which tokens are predicted."""
    if given is not None:
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or not given or any(not isinstance(length, int) or length < 1 for length in given):
            raise UserError(f"evaluation.lengths={list(given) if is_list else given} must be a list of positive whole numbers, such as "
                            "[512,2048], or null")
        return sorted(set(given))
    contexts = []
    for one in found:
        with suppress(UserError):  # reported later, when the run is evaluated
            contexts.append(one.context())
    return default_lengths(contexts) if contexts else []


def _evaluate(
    title: str,
    subject: Subject,
    tasks: Mapping[str, Callable],
    lengths: list[int],
    store: Store,
    remeasure: bool,
    columns: dict[str, Any],
    table: Table,
    progress: Progress,
) -> None:
    given = {"lengths": lengths, "context": subject.context}
    plans = {
        name: task(subject.model, subject.data, **given, **({"reader": subject.reader} if _takes_reader(task) else {}))
        for name, task in tasks.items()
    }
    measurements = [measurement for plan in plans.values() for measurement in plan.measurements]
    keys = {id(one): key(subject.identity, one.task, one.length, dict(one.settings)) for one in measurements}
    known = together.of_first({} if remeasure else store.finished)
    n_known = sum(name in known for name in keys.values())
    log.info(f"{title}: {len(measurements)} measurements" + (f", {n_known} of them done before" if n_known else ""))
    if subject.broken:
        log.warning(f"{title}: {subject.broken}; all its results are NaN")
    progress.plan(sum(one.tokens for one in measurements))
    for task, plan in plans.items():
        begin, rows = time.monotonic(), []
        for one in plan.measurements:
            progress.begin(f"{title}: {one.task}" + (f" {one.length}" if one.length else ""))
            before = progress.done
            if (name := keys[id(one)]) in known:
                new = known[name]
            else:
                new = _measure(one, subject, progress)
                if any(row.value is not None for row in new):
                    store.add(name, new)
            progress.advance(max(0, one.tokens - (progress.done - before)))
            rows += new
            table.add([replace(row, **columns) for row in new])
        table.add([replace(row, **columns) for row in plan.conclude(rows)])
        if (seconds := time.monotonic() - begin) > 1:
            log.info(f"{title}: {task} took {seconds:.0f} s")


def _takes_reader(task: Callable) -> bool:
    return "reader" in inspect.signature(task).parameters


def _measure(one: Measurement, subject: Subject, progress: Progress) -> list[Row]:
    """The rows of the measurement, or one row whose note says why there are none."""
    if one.tokens and one.length and (note := together.of_first(shortage(subject.model, one.length // together.ranks()))):
        return [Row(task=one.task, length=one.length, note=f"not tried: {note}")]
    try:
        with torch.inference_mode():
            if one.task == COST:  # is timed, so its logits are not checked for NaN
                return one.measure(progress.advance)
            with watched(subject.model) as broken:
                rows = one.measure(progress.advance)
        if subject.broken:
            return [row if row.value is None else replace(row, value=math.nan, stderr=None, note=subject.broken) for row in rows]
        return mark_nan(rows, reason) if (reason := broken()) else rows
    except NoRoom as error:
        return [Row(task=one.task, length=one.length, note=f"no room: {error}")]
    except Exception as error:  # any error: the other measurements must go on
        if together.ranks() > 1 and not isinstance(error, UserError | ValueError):  # the other processes may not have had this error
            raise
        log.debug("", exc_info=error)
        note = f"could not run: {_reason(error)}"
        kind = one.task, one.length
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    return [Row(task=kind[0], length=kind[1], note=note)]


def _reason(error: Exception) -> str:
    """The error as one line, preceded by the name of its class where the message was not written for a user."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return f"out of GPU memory ({str(error).splitlines()[0]})"
    kind = "" if isinstance(error, UserError | ValueError) else f"{type(error).__name__}: "
    first = str(error).splitlines()[0] if str(error) else ""
    return kind + (" ".join(str(error).split()) if isinstance(error, UserError) else first)
