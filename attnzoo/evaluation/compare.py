"""One table for one checkpoint, or for all runs of a sweep: every task on every run, as CSV, summary, plots and W&B table."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnzoo.errors import UserError
from attnzoo.evaluation.perplexity import default_lengths
from attnzoo.evaluation.plots import draw
from attnzoo.evaluation.results import COLUMNS, Row, comparable_metric, summary, write_csv
from attnzoo.evaluation.runs import Run, find
from attnzoo.evaluation.subject import prepare

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig, *, tasks: Mapping[str, Callable], build_data: Callable[[dict], Any], loggers: Iterable = (), folder: str | Path
) -> list[Row]:
    """Evaluates what cfg names; writes results.csv, summary.md and plots into folder, tells the loggers, returns the table.

    cfg: the keys of configs/eval.yaml. tasks: by name, each called as task(model, data, lengths=..., context=...) -> rows; None is skipped.
    build_data: a `data` configuration as a plain dict -> data module. loggers: Lightning's.
    One of several runs that fails gets a row without a value that says why; a single one raises.
    """
    folder, found = Path(folder), find(cfg.ckpt_path, cfg.runs, cfg.checkpoint)
    lengths = _lengths(cfg.evaluation.lengths, found)
    rows: list[Row] = []
    for number, one in enumerate(found, 1):
        log.info(f"evaluating {one.name} ({number} of {len(found)})")
        try:
            rows += _evaluate(one, cfg, tasks, build_data, lengths)
        except Exception as error:
            if len(found) == 1:
                raise
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            rows.append(Row(run=one.name, note=f"failed: {kind}{' '.join(str(error).split())}"))
            log.warning(f"{one.name} {rows[-1].note}")
        write_csv(rows, folder / "results.csv")
    text = summary(rows)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    plots = draw(rows, folder)
    _tell(loggers, rows, plots)
    log.info(f"{text}\n{folder}: {', '.join(['results.csv', 'summary.md', *(path.name for path in plots)])}")
    if all(row.value is None for row in rows):
        raise UserError(f"nothing could be evaluated: {folder / 'summary.md'} says why")
    return rows


def _lengths(given: Sequence[int] | None, found: Sequence[Run]) -> list[int]:
    """The same for all runs, because the longest decides which tokens are predicted."""
    if given is not None:
        if not given or any(not isinstance(length, int) or length < 1 for length in given):
            raise UserError(f"evaluation.lengths={list(given)} must be a list of positive whole numbers, or null")
        return sorted(set(given))
    contexts = []
    for one in found:
        with suppress(UserError):  # told when it is the run's turn
            contexts.append(one.context())
    return default_lengths(contexts) if contexts else []


def _evaluate(one: Run, cfg: DictConfig, tasks: Mapping[str, Callable], build_data: Callable, lengths: Sequence[int]) -> list[Row]:
    subject = prepare(one, cfg, build_data)
    chosen = (task for task in tasks.values() if task is not None)
    measured = (row for task in chosen for row in task(subject.model, subject.data, lengths=lengths, context=subject.context))
    return [replace(row, **subject.columns) for row in measured]


def _tell(loggers: Iterable, rows: Sequence[Row], plots: Sequence[Path]) -> None:
    """Metrics eval/<task>/<length> (with several runs /<run> behind it) for every logger; W&B gets the table and the plots too."""
    several, metric = len({row.run for row in rows}) > 1, comparable_metric(rows)
    metrics = {
        f"eval/{row.task}/{row.length}" + (f"/{row.run}" if several else ""): row.value
        for row in rows
        if row.value is not None and row.depth is None and row.metric == metric
    }
    for logger in loggers:
        logger.log_metrics(metrics)
        if hasattr(logger, "log_table"):
            logger.log_table("eval/results", columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
            for path in plots:
                logger.log_image(f"eval/{path.stem}", images=[str(path)])
        logger.save()
