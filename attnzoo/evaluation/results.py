"""The long-format table that every evaluation task fills, and what is written of it: results.csv and summary.md."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured number. A task fills in the columns from `task` on, the comparison whose number it is.

    run: the run's folder, seen from the folder that all compared runs share. attention: the variant. overrides: what the evaluation changed
    in the checkpoint's attention and model. tokenizer: its name. data: the source and the beginning of the text's sha256. context: the
    training context in tokens. length: the context length evaluated, in tokens. depth: the place inside it (loss_by_position: tokens of
    context). metric: loss (nats per token), perplexity, bits_per_byte. value: None where there is none, note says why. count: tokens
    predicted. stderr: standard error of value, None where the data have fewer than two independent parts.
    """

    run: str = ""
    attention: str = ""
    overrides: str = ""
    tokenizer: str = ""
    data: str = ""
    context: int | None = None
    task: str = ""
    length: int | None = None
    depth: float | None = None
    metric: str = "loss"
    value: float | None = None
    count: int = 0
    stderr: float | None = None
    note: str = ""


COLUMNS = tuple(field.name for field in fields(Row))
METRICS = ("loss", "perplexity", "bits_per_byte")


def language_model_rows(loss: float, stderr: float | None, bytes_per_token: float, **columns) -> list[Row]:
    """The rows of one mean loss in nats per token: loss, perplexity, bits per byte, each with its standard error."""
    perplexity = math.exp(loss) if loss < 700 else loss * math.inf  # a broken model's loss would overflow
    bits = 1 / (math.log(2) * bytes_per_token)
    values = zip(METRICS, (loss, perplexity, loss * bits), (1.0, perplexity, bits), strict=True)
    return [Row(metric=name, value=value, stderr=None if stderr is None else stderr * slope, **columns) for name, value, slope in values]


def comparable_metric(rows: Iterable[Row]) -> str:
    """perplexity, or bits_per_byte if the runs have unlike tokenizers: their tokens are not the same predictions."""
    return "perplexity" if len({row.tokenizer for row in rows if row.tokenizer}) < 2 else "bits_per_byte"


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """The table with every digit; None is an empty field."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)


def summary(rows: Sequence[Row]) -> str:
    """Markdown for people: a table a task with a line a run, and below what could not be run and why."""
    parts = ["# Evaluation"]
    whole = [row for row in rows if row.depth is None]
    for task in dict.fromkeys(row.task for row in whole if row.value is not None):
        chosen = [row for row in whole if row.task == task]
        if task == "validation":
            title, column, metrics, columns = task, "metric", METRICS, METRICS
        else:
            metrics = [comparable_metric(rows)]
            title, column, columns = f"{task}: {metrics[0]} by length", "length", sorted({row.length for row in chosen})
        cells = {(row.run, getattr(row, column)): _cell(row) for row in chosen if row.value is None or row.metric in metrics}
        head = ["run", "attention", "overrides", "data", "context", *columns]
        lines = [
            [row.run, row.attention, row.overrides, row.data, row.context, *(cells.get((row.run, name), "") for name in columns)]
            for row in {row.run: row for row in chosen}.values()
        ]
        parts.append(f"## {title}\n\n{_markdown(head, lines)}")
    if len({row.data for row in rows if row.data}) > 1:
        parts.append("The runs were evaluated on unlike data, so their numbers are not comparable; `data=...` gives all of them the same.")
    if notes := _notes(rows):
        parts.append("## Notes\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _notes(rows: Sequence[Row]) -> list[str]:
    """Each note once, with the task, the lengths and, unless it holds for all of them, the runs."""
    lines = []
    for task, note in dict.fromkeys((row.task, row.note) for row in rows if row.note):
        here = [row for row in rows if (row.task, row.note) == (task, note)]
        runs, lengths = (list(dict.fromkeys(getattr(row, name) for row in here)) for name in ("run", "length"))
        parts = [
            ", ".join(runs) if len(runs) < len({row.run for row in rows}) else "",
            task,
            "" if lengths == [None] else f"length {', '.join(map(str, lengths))}",
        ]
        lines.append(f"- {'; '.join(filter(None, parts)) or 'all runs'}: {note}")
    return lines


def _cell(row: Row) -> str:
    if row.value is None:
        return "(see notes)"
    return f"{row.value:.4g}" + ("" if row.stderr is None else f" ± {row.stderr:.2g}")


def _markdown(head: Sequence, lines: Sequence[Sequence]) -> str:
    """A table without the columns that are empty in every line."""
    used = [i for i in range(len(head)) if any(line[i] not in ("", None) for line in lines)]
    table = [[head[i] for i in used], ["---"] * len(used), *([line[i] for i in used] for line in lines)]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in table)
