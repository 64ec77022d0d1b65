"""The table for people: summary.md."""

from collections.abc import Sequence

from attnzoo.evaluation.results import METRICS, Row, shown_metrics


def summary(rows: Sequence[Row], averages: Sequence[Row] = ()) -> str:
    """Markdown: a table a task with a line a run, below what could not be run and why.

    averages: of attnzoo.evaluation.seeds; where there are any, their tables stand first.
    """
    parts = ["# Evaluation"]
    if averages:
        n = len({row.seed for row in rows if row.seed is not None})
        parts.append(f"# Averages over seeds\n\n± is the standard deviation between up to {n} seeds; the runs themselves follow below.")
        parts += _tables(averages)
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
    cells = {(*row.line, getattr(row, column)): _cell(row) for row in rows if row.value is None or row.metric in metrics}
    head = ["run", "attention", "reading", "data", "context", *columns]
    lines = [
        [row.run, row.attention, row.reading, row.data, row.context, *(cells.get((*row.line, name), "") for name in columns)]
        for row in {row.line: row for row in rows}.values()
    ]
    return f"## {title}\n\n{_markdown(head, lines)}"


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


def _markdown(head: Sequence, lines: Sequence[Sequence]) -> str:
    """A table without the columns that are empty in every line."""
    used = [i for i in range(len(head)) if any(line[i] not in ("", None) for line in lines)]
    table = [[head[i] for i in used], ["---"] * len(used), *([line[i] for i in used] for line in lines)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in table)
