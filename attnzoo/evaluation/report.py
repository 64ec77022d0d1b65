"""The output of a comparison: averages, a summary, plots, an HTML page, and metrics for the loggers."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path

from attnzoo.errors import UserError
from attnzoo.evaluation.page import About, page
from attnzoo.evaluation.plots import draw
from attnzoo.evaluation.results import COLUMNS, Row, shown_metrics, write_csv
from attnzoo.evaluation.seeds import average, shown
from attnzoo.evaluation.summary import summary
from attnzoo.run.files import write_whole

log = logging.getLogger(__name__)


def conclude(rows: list[Row], loggers: Iterable, folder: Path, about: About) -> list[Row]:
    """Writes averages, summary, plots and page of the rows into folder, tells the loggers, returns the rows.

    Raises UserError where no row has a value.
    """
    averages = average(rows)
    written = ["results.csv", "summary.md", "report.html"]
    if averages:
        write_csv(averages, folder / "averages.csv")
        written.append("averages.csv")
    text = summary(rows, averages)
    write_whole(folder / "summary.md", text)
    plots = draw(shown(rows, averages), folder)
    write_whole(folder / "report.html", page(rows, averages, plots, about))
    _tell(loggers, rows, averages, plots)
    log.info(f"{text}\n{folder}: {', '.join([*written, *(path.name for path in plots)])}")
    if all(row.value is None for row in rows):
        raise UserError(f"nothing could be evaluated: {folder / 'summary.md'} says why")
    return rows


def _tell(loggers: Iterable, rows: Sequence[Row], averages: Sequence[Row], plots: Sequence[Path]) -> None:
    """Logs metrics eval/<task>/<length> to every logger, with <metric> in place of a missing length; with several runs the run
    (and reading) is appended. W&B also gets a table per task, one of its averages, and the plots. Each has its own key, because logging
    under a key replaces what was there."""
    several, of_task = len({row.line for row in rows}) > 1, shown_metrics(rows)
    metrics = {
        "/".join(["eval", row.task, str(row.length or row.metric), *(filter(None, row.line) if several else [])]): row.value
        for row in rows
        if row.value is not None and row.depth is None and (row.metric == of_task[row.task] or not row.length)
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
