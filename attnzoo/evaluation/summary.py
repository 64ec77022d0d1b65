"""Tables for people to read, and summary.md, which contains them."""

from collections.abc import Sequence

import pandas as pd

from attnzoo.evaluation.longppl import ITS_CHECKPOINT, ITSELF
from attnzoo.evaluation.overview import LINE, cell, overview
from attnzoo.evaluation.results import METRICS, Row, frame, shown_metrics

HEAD = ["run", "attention", "reading", "data", "context"]


def summary(rows: Sequence[Row], averages: Sequence[Row] = ()) -> str:
    """Markdown text with a table for each task, which has a line for each run and reading, and then the warnings and the notes.

    averages: the rows of attnzoo.evaluation.seeds; if there are any, their tables come first.
    """
    parts = ["# Evaluation"]
    if any(row.stderr for row in rows):
        parts.append("± is a standard error. Lines on the same data read the same documents, so their differences are surer than it says.")
    if averages:
        n = len({row.seed for row in rows if row.seed is not None})
        parts.append(f"# Averages over seeds\n\n± is here the standard deviation between up to {n} seeds; the runs follow below.")
        parts += [*_sections(averages), _list(notes(averages))]
        parts.append("# Runs")
    if any(row.reading for row in rows):
        parts.append(f"## at a glance\n\n{_markdown(overview(rows).reset_index())}")
    parts += [*_sections(rows), *warnings(rows)]
    if said := notes(rows):
        parts.append(f"# Notes\n\n{_list(said)}")
    return "\n\n".join(parts) + "\n"


def warnings(rows: Sequence[Row]) -> list[str]:
    """Sentences that say why the runs' numbers cannot be compared."""
    said = []
    if len({row.data for row in rows if row.data}) > 1:
        said.append("The runs were evaluated on unlike data, so their numbers are not comparable; `data=...` gives all of them the same.")
    if len({row.tokenizer for row in rows if row.tokenizer}) > 1:
        said.append("The runs have unlike tokenizers: bits per byte are compared, perplexities cannot be.")
    long = [row for row in rows if row.metric == "longppl" and row.value is not None]
    itself, checkpoint = ([row for row in long if f"chosen by {who}" in row.note] for who in (ITSELF, ITS_CHECKPOINT))
    if len({row.line for row in itself}) > 1 or len({row.run for row in checkpoint}) > 1:
        said.append("LongPPL's key tokens are not the same in all lines, because each model or each run's checkpoint chose its own; "
                    "evaluation.tasks.perplexity.longppl.ckpt_path=... gives all of them the same.")
    return said


def _sections(rows: Sequence[Row]) -> list[str]:
    return [f"## {title}\n\n{_markdown(table)}" for title, table in tables(rows)]


def tables(rows: Sequence[Row]) -> list[tuple[str, pd.DataFrame]]:
    """For each task that has a number: its title, and its table of text with a line for each run and reading."""
    whole, shown = [row for row in rows if row.depth is None], shown_metrics(rows)
    return [_table([row for row in whole if row.task == task], metric) for task, metric in shown.items() if _is_whole(whole, task)]


def _is_whole(rows: Sequence[Row], task: str) -> bool:
    return any(row.task == task and row.value is not None for row in rows)


def _table(rows: Sequence[Row], metric: str) -> tuple[str, pd.DataFrame]:
    """The title and the table of a task, with a line for each run and reading and a column for each length.

    For validation and classification, and for tasks without lengths, there is a column for each metric instead.
    """
    task, lengths = rows[0].task, sorted({row.length for row in rows if row.length is not None})
    if task == "validation":
        title, column, metrics, columns = task, "metric", METRICS, METRICS
    elif not lengths or task == "classification":
        metrics = tuple(dict.fromkeys(row.metric for row in rows if row.value is not None))
        title, column, columns = task, "metric", metrics
    else:
        title, column, metrics, columns = f"{task}: {metric} by length", "length", (metric,), lengths
    table = frame(rows).assign(cell=list(map(cell, rows)))
    table["shown"] = [row.value is None or row.metric in metrics for row in rows]
    cells = table[table["shown"] & table[column].notna()].drop_duplicates([*LINE, column], keep="last")
    cells = cells.pivot(index=LINE, columns=column, values="cell").reindex(columns=list(columns))
    return title, table.drop_duplicates(LINE, keep="last")[HEAD].join(cells, on=LINE).fillna("")


def notes(rows: Sequence[Row]) -> list[str]:
    """Each note once, with its tasks and lengths, and with its runs unless it holds for all runs."""
    tasks: dict[tuple, list[str]] = {}  # by note, runs and lengths
    for task, note in dict.fromkeys((row.task, row.note) for row in rows if row.note):
        here = [row for row in rows if (row.task, row.note) == (task, note)]
        runs = tuple(dict.fromkeys(" ".join(filter(None, row.line)) for row in here))
        lengths = tuple(_place(length, [row for row in here if row.length == length])
                        for length in dict.fromkeys(row.length for row in here))
        tasks.setdefault((note, runs, lengths), []).append(task)
    every, lines = list(dict.fromkeys(" ".join(filter(None, row.line)) for row in rows)), []
    for (note, runs, lengths), names in tasks.items():
        others = [run for run in every if run not in runs]
        parts = [
            "" if not others else f"all but {', '.join(others)}" if len(others) < len(runs) - 2 else ", ".join(runs),
            ", ".join(filter(None, names)),
            "" if lengths == ("",) else f"length {', '.join(lengths)}",
        ]
        lines.append(f"{'; '.join(filter(None, parts)) or 'all runs'}: {note}")
    return lines


def _place(length: int | None, rows: Sequence[Row]) -> str:
    """A length, with the depths if all rows of a note have one."""
    if length is None:
        return ""
    if any(row.depth is None for row in rows):
        return str(length)
    return f"{length} (depth {', '.join(f'{depth:g}' for depth in sorted({row.depth for row in rows}))})"


def _markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, without the columns that are empty in every line."""
    used = table.loc[:, (table != "").any()]
    lines = [used.columns, ["---"] * used.shape[1], *used.itertuples(index=False, name=None)]
    return "\n".join("| " + " | ".join(_escaped(text).replace("|", "\\|") for text in map(str, cells)) + " |" for cells in lines)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Text from a run or a user, with `<` escaped, so that it has no tags, and with spaces in place of line breaks."""
    return " ".join(text.replace("<", "&lt;").split("\n"))
