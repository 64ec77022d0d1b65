"""The table for people: summary.md."""

from collections.abc import Sequence

import pandas as pd

from attnzoo.evaluation.results import METRICS, Row, frame, shown_metrics

LINE = ["run", "reading"]  # what has a line of a table
HEAD = ["run", "attention", "reading", "data", "context"]


def summary(rows: Sequence[Row], averages: Sequence[Row] = ()) -> str:
    """Markdown: a table a task with a line a run, below what could not be run and why.

    averages: of attnzoo.evaluation.seeds; where there are any, their tables stand first.
    """
    parts = ["# Evaluation"]
    if averages:
        n = len({row.seed for row in rows if row.seed is not None})
        parts.append(f"# Averages over seeds\n\n± is the standard deviation between up to {n} seeds; the runs themselves follow below.")
        parts += [*_tables(averages), "\n".join(_notes(averages))]
        parts.append("# Runs")
    parts += _tables(rows)
    if len({row.data for row in rows if row.data}) > 1:
        parts.append("The runs were evaluated on unlike data, so their numbers are not comparable; `data=...` gives all of them the same.")
    if len({row.tokenizer for row in rows if row.tokenizer}) > 1:
        parts.append("The runs have unlike tokenizers: bits per byte are compared, perplexities cannot be.")
    if notes := _notes(rows):
        parts.append("# Notes\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _tables(rows: Sequence[Row]) -> list[str]:
    whole, shown = [row for row in rows if row.depth is None], shown_metrics(rows)
    return [_table([row for row in whole if row.task == task], metric) for task, metric in shown.items() if _is_whole(whole, task)]


def _is_whole(rows: Sequence[Row], task: str) -> bool:
    return any(row.task == task and row.value is not None for row in rows)


def _table(rows: Sequence[Row], metric: str) -> str:
    """A line a run, a column a length; or a column a metric where a task knows no lengths but its own."""
    task, lengths = rows[0].task, sorted({row.length for row in rows if row.length is not None})
    if task == "validation":
        title, column, metrics, columns = task, "metric", METRICS, METRICS
    elif not lengths:
        metrics = tuple(dict.fromkeys(row.metric for row in rows if row.value is not None))
        title, column, columns = task, "metric", metrics
    else:
        title, column, metrics, columns = f"{task}: {metric} by length", "length", (metric,), lengths
    table = frame(rows).assign(cell=list(map(_cell, rows)))
    table["shown"] = [row.value is None or row.metric in metrics for row in rows]
    cells = table[table["shown"] & table[column].notna()].drop_duplicates([*LINE, column], keep="last")
    cells = cells.pivot(index=LINE, columns=column, values="cell").reindex(columns=list(columns))
    return f"## {title}\n\n{_markdown(table.drop_duplicates(LINE, keep='last')[HEAD].join(cells, on=LINE).fillna(''))}"


def _notes(rows: Sequence[Row]) -> list[str]:
    """Each note once, with the task, the lengths and, unless it holds for all of them, the runs."""
    lines = []
    for task, note in dict.fromkeys((row.task, row.note) for row in rows if row.note):
        here = [row for row in rows if (row.task, row.note) == (task, note)]
        runs = list(dict.fromkeys(" ".join(filter(None, row.line)) for row in here))
        lengths = list(dict.fromkeys(row.length for row in here))
        parts = [
            ", ".join(runs) if len(runs) < len({row.line for row in rows}) else "",
            task,
            "" if lengths == [None] else f"length {', '.join(map(str, lengths))}",
        ]
        lines.append(f"- {'; '.join(filter(None, parts)) or 'all runs'}: {note}")
    return lines


def _cell(row: Row) -> str:
    if row.value is None:
        return "(see notes)"
    return _number(row.value, 4) + ("" if row.stderr is None else f" ± {_number(row.stderr, 2)}")


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e9 else text


def _markdown(table: pd.DataFrame) -> str:
    """Without the columns that are empty in every line."""
    used = table.loc[:, (table != "").any()]
    lines = [used.columns, ["---"] * used.shape[1], *used.itertuples(index=False, name=None)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
