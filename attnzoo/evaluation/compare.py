"""One table for one checkpoint, or for all runs of a sweep: every task on every run, as CSV, summary, plots and W&B tables."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from attnzoo.errors import UserError
from attnzoo.evaluation.measurement import FILE, Measurement, Store, key
from attnzoo.evaluation.perplexity import default_lengths
from attnzoo.evaluation.plots import draw
from attnzoo.evaluation.results import COLUMNS, Row, shown_metrics, write_csv
from attnzoo.evaluation.runs import Run, find
from attnzoo.evaluation.seeds import average, name_settings, shown
from attnzoo.evaluation.subject import Subject, prepare
from attnzoo.evaluation.summary import summary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """A run, and how its checkpoint is read: overrides of attention and model as plain dicts. label: their command line."""

    run: Run
    label: str
    attention: dict
    model: dict

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.run.name, self.label)))


def run(
    cfg: DictConfig,
    *,
    tasks: Mapping[str, Callable],
    build_data: Callable[[dict], Any],
    variants: Mapping[str, DictConfig] | None = None,
    loggers: Iterable = (),
    folder: str | Path,
) -> list[Row]:
    """Evaluates what cfg names; writes results.csv, summary.md and plots into folder, tells the loggers, returns the table.

    cfg: the keys of configs/eval.yaml. tasks: by name, each called as task(model, data, lengths=..., context=...) -> Plan; None is skipped.
    build_data: a `data` configuration as a plain dict -> data module. variants: by label, configurations whose `attention` and `model` each
    run is read with in turn; None: cfg's own. loggers: Lightning's.

    Measurements that an earlier, interrupted or other comparison finished are taken over (attnzoo.evaluation.measurement.Store). What
    fails, a measurement or a run, gets a row without a value that says why; a single run that cannot be loaded raises.
    """
    folder, found = Path(folder), find(cfg.ckpt_path, cfg.runs, cfg.checkpoint)
    chosen = {name: task for name, task in tasks.items() if task is not None}
    if not chosen:
        raise UserError("evaluation.tasks is empty: nothing would be measured; choose an evaluation=..., or leave one of its tasks in")
    lengths = _lengths(cfg.evaluation.lengths, found)
    readings = _readings(cfg, found, variants)
    table = _Table(folder / "results.csv")
    log.info(f"{len(readings)} to evaluate; results go to {folder}")
    try:
        with _Progress(len(readings)) as progress:
            for reading, columns in zip(readings, _columns(readings), strict=True):
                progress.begin_reading(reading.title)
                try:
                    _evaluate(reading, cfg, chosen, build_data, lengths, columns, table, progress)
                except Exception as error:
                    if len(readings) == 1:
                        raise
                    row = Row(**columns, note=f"failed: {_reason(error)}")
                    table.add([row])
                    log.warning(f"{reading.title} {row.note}")
                    log.debug("", exc_info=error)
                progress.end_reading()
    finally:  # an interrupted comparison leaves what it has
        table.write()
    return _finish(table.rows, loggers, folder)


def _finish(rows: list[Row], loggers: Iterable, folder: Path) -> list[Row]:
    averages = average(rows)
    written = ["results.csv", "summary.md"]
    if averages:
        write_csv(averages, folder / "averages.csv")
        written.append("averages.csv")
    text = summary(rows, averages)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    plots = draw(shown(rows, averages), folder)
    _tell(loggers, rows, averages, plots)
    log.info(f"{text}\n{folder}: {', '.join([*written, *(path.name for path in plots)])}")
    if all(row.value is None for row in rows):
        raise UserError(f"nothing could be evaluated: {folder / 'summary.md'} says why")
    return rows


class _Table:
    """The rows so far, and their file, which is at most a few seconds old."""

    def __init__(self, path: Path, seconds: float = 5.0):
        self.path, self.seconds, self.rows, self.written = path, seconds, [], -math.inf

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        if time.monotonic() > self.written + self.seconds:
            self.write()

    def write(self) -> None:
        if not self.rows:
            return  # what is refused leaves nothing
        write_csv(self.rows, self.path)
        self.written = time.monotonic()


class _Progress:
    """One bar over all measurements of all runs, in tokens; a run that is not planned yet is taken to be like those before it. Where there
    is no terminal, a line now and then."""

    def __init__(self, n_readings: int, seconds: float = 15.0):
        self.waiting, self.planned, self.done = n_readings, [], 0  # readings that are not planned, tokens of those that are, tokens read
        self.seconds, self.said = seconds, time.monotonic()
        self.bar = tqdm(total=0, unit="tok", unit_scale=True, smoothing=0.05, disable=None)
        self.redirect = logging_redirect_tqdm()

    def __enter__(self):
        self.redirect.__enter__()
        return self

    def __exit__(self, *error):
        self.redirect.__exit__(*error)
        self.bar.close()

    def begin_reading(self, title: str) -> None:
        self.waiting -= 1
        self.bar.set_description_str(title)

    def plan(self, tokens: int) -> None:
        self.planned.append(tokens)
        self.bar.total = sum(self.planned) + self.waiting * sum(self.planned) // len(self.planned)
        self.bar.refresh()

    def begin(self, title: str) -> None:
        self.bar.set_description_str(title)

    def advance(self, tokens: int) -> None:
        self.done += tokens
        self.bar.update(tokens)
        if self.bar.disable and self.bar.total and time.monotonic() > self.said + self.seconds:
            self.said = time.monotonic()
            log.info(f"{self.bar.desc}: {min(self.done / self.bar.total, 1):.0%} of all {tqdm.format_sizeof(self.bar.total)} tokens read")

    def end_reading(self) -> None:
        self.advance(max(0, sum(self.planned) - self.done))  # of a run that failed


def _readings(cfg: DictConfig, found: Sequence[Run], variants: Mapping[str, DictConfig] | None) -> list[Reading]:
    def overrides(config: DictConfig) -> tuple[dict, dict]:
        model = {key: value for key, value in _plain(config.model).items() if value is not None}
        return _plain(config.get("attention")), model

    return [Reading(one, label, *overrides(config)) for one in found for label, config in (variants or {"": cfg}).items()]


def _columns(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """What is known of each run without its checkpoint: its name, its seed, and what it shares with others."""
    configs = {}
    for reading in readings:
        configs[reading.run.name] = None
        with suppress(UserError, OmegaConfBaseException):  # told when it is the run's turn
            if (config := reading.run.config()) is not None:
                configs[reading.run.name] = _plain(config)
    settings = name_settings(configs)
    return [
        {
            "run": reading.run.name,
            "overrides": reading.label,
            "seed": (configs[reading.run.name] or {}).get("seed"),
            "settings": settings[reading.run.name],
        }
        for reading in readings
    ]


def _plain(node: DictConfig | None) -> dict:
    return {} if node is None else OmegaConf.to_container(node, resolve=True)


def _lengths(given: Sequence[int] | None, found: Sequence[Run]) -> list[int]:
    """The same for all runs, because the longest decides which tokens are predicted."""
    if given is not None:
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or not given or any(not isinstance(length, int) or length < 1 for length in given):
            raise UserError(f"evaluation.lengths={list(given) if is_list else given} must be a list of positive whole numbers, such as "
                            "[512,2048], or null")
        return sorted(set(given))
    contexts = []
    for one in found:
        with suppress(UserError):  # told when it is the run's turn
            contexts.append(one.context())
    return default_lengths(contexts) if contexts else []


def _evaluate(
    reading: Reading,
    cfg: DictConfig,
    tasks: Mapping[str, Callable],
    build_data: Callable,
    lengths: list[int],
    columns: dict[str, Any],
    table: _Table,
    progress: _Progress,
) -> None:
    subject = prepare(reading.run, reading.attention, reading.model, cfg, build_data)
    columns = {**columns, **subject.columns}
    if (columns["run"], columns["overrides"]) in {row.line for row in table.rows}:
        log.info(f"{reading.title}: nothing new, {reading.label or 'no override'} is how it was read before")
        return
    store = Store((Path(cfg.store).expanduser().absolute() if cfg.store else reading.run.folder) / FILE)
    plans = {name: task(subject.model, subject.data, lengths=lengths, context=subject.context) for name, task in tasks.items()}
    measurements = [measurement for plan in plans.values() for measurement in plan.measurements]
    keys = {id(one): key(subject.identity, one.task, one.length, dict(one.settings)) for one in measurements}
    known = {} if cfg.again else store.finished
    n_known = sum(name in known for name in keys.values())
    log.info(f"{reading.title}: {len(measurements)} measurements" + (f", {n_known} of them done before" if n_known else ""))
    progress.plan(sum(one.tokens for one in measurements))
    for task, plan in plans.items():
        begin, rows = time.monotonic(), []
        for one in plan.measurements:
            progress.begin(f"{reading.title}: {one.task}" + (f" {one.length}" if one.length else ""))
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
            log.info(f"{reading.title}: {task} took {seconds:.0f} s")


def _measure(one: Measurement, subject: Subject, progress: _Progress) -> list[Row]:
    """Its rows, or one that says why there are none."""
    try:
        with torch.inference_mode():
            return one.measure(progress.advance)
    except Exception as error:  # more than the learned positions or the memory; whatever it is, the others go on
        log.debug("", exc_info=error)
        note = f"could not run: {_reason(error)}"
        kind = one.task, one.length
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    return [Row(task=kind[0], length=kind[1], note=note)]


def _reason(error: Exception) -> str:
    """One line; the name of the error's class where the message was not written for a user."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return f"out of GPU memory ({str(error).splitlines()[0]})"
    kind = "" if isinstance(error, UserError | ValueError) else f"{type(error).__name__}: "
    first = str(error).splitlines()[0] if str(error) else ""
    return kind + (" ".join(str(error).split()) if isinstance(error, UserError) else first)


def _tell(loggers: Iterable, rows: Sequence[Row], averages: Sequence[Row], plots: Sequence[Path]) -> None:
    """Metrics eval/<task>/<length> (with several runs /<run> behind it) for every logger; W&B gets a table a task, one of its averages and
    the plots too, under keys of their own, because the last thing logged under a key replaces what was there."""
    several, of_task = len({row.line for row in rows}) > 1, shown_metrics(rows)
    metrics = {
        "/".join(["eval", row.task, *([str(row.length)] if row.length else []), *(filter(None, row.line) if several else [])]): row.value
        for row in rows
        if row.value is not None and row.depth is None and row.metric == of_task[row.task]
    }
    for logger in loggers:
        logger.log_metrics(metrics)
        if hasattr(logger, "log_table"):
            for kind, table in (("eval_tables", rows), ("eval_averages", averages)):
                for task in dict.fromkeys(row.task for row in table if row.task):
                    lines = [list(astuple(row)) for row in table if row.task == task]
                    logger.log_table(f"{kind}/{task}", columns=list(COLUMNS), data=lines)
            for path in plots:
                logger.log_image(f"eval_plots/{path.stem}", images=[str(path)])
        logger.save()
