"""A table with one line per run and reading: results at the training context and at the longest length, and costs."""

from collections.abc import Sequence

import pandas as pd

from attnzoo.evaluation.results import SHARES, Row, shown_metrics

LINE = ["run", "reading"]  # the columns that identify a line of a table
WITHOUT = ("", "cost", "validation", "loss_by_position", "effective_length")
COSTS = {"prefill_seconds": "seconds to read", "peak_memory_gb": "GB"}


def overview(rows: Sequence[Row]) -> pd.DataFrame:
    """A table of text, indexed by run and reading, with columns for each task and length, for seconds and memory at the longest length, for
    effective lengths, and for the reason where a reading has no result. Empty columns are left out."""
    shown = {task: "loss" if metric == "perplexity" else metric for task, metric in shown_metrics(rows).items()}
    parts = {task for task in shown for whole in shown if task.startswith(f"{whole}_")}
    wanted = {(task, metric): _label(task, metric) for task, metric in shown.items() if task not in WITHOUT and task not in parts}
    longest = max((row.length for row in rows if (row.task, row.metric) in wanted and row.value is not None and row.length), default=None)
    wanted |= {("cost", metric): name for metric, name in COSTS.items()}
    table: dict[tuple[str, str], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        cells = table.setdefault(row.line, {})
        if row.task == "":
            cells["why not"] = row.note
        elif row.depth is None and row.task == "effective_length":
            columns[f"effective length, {row.metric}"] = cells[f"effective length, {row.metric}"] = cell(row)
        elif row.depth is None and (row.task, row.metric) in wanted and row.length in _lengths(row, longest):
            name = f"{wanted[row.task, row.metric]} at {row.length}"
            columns[name] = cells[name] = cell(row)
    order = [*sorted(columns, key=lambda name: _place(name, list(wanted.values()))), *(["why not"] if _any(table, "why not") else [])]
    found = pd.DataFrame.from_dict(table, orient="index", columns=None).reindex(columns=order)
    found.index = pd.MultiIndex.from_tuples(table, names=LINE)
    return found.fillna("")


def _label(task: str, metric: str) -> str:
    """The column's title: "loss (windows)" for perplexity_windows, "passkey" for the exact match of passkey."""
    for before, name in (("perplexity_", metric), ("longppl_", "LongPPL")):
        if task.startswith(before):
            return f"{name} ({task.removeprefix(before)})"
    return task if metric in SHARES else f"{task} {metric}"


def _lengths(row: Row, longest: int | None) -> tuple[int | None, ...]:
    """The lengths at which the row's task is shown."""
    return (longest,) if row.task == "cost" else (row.context, longest)


def _place(name: str, order: Sequence[str]) -> int:
    """A column's place in the table: tasks in their order, then costs, then effective lengths."""
    label = name.rpartition(" at ")[0]
    return order.index(label) if label in order else len(order)


def _any(table: dict, column: str) -> bool:
    return any(column in cells for cells in table.values())


def cell(row: Row) -> str:
    """A number as tables show it, with its standard error."""
    if row.value is None:
        return "(see notes)"
    return _number(row.value, 4) + ("" if row.stderr is None else f" ± {_number(row.stderr, 2)}")


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e9 else text
