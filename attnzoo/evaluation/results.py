"""The long-format table that every evaluation task fills, and what is chosen of it to be shown."""

import csv
import io
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from attnzoo.run.files import write_whole


@dataclass(frozen=True)
class Row:
    """One measured number. A task fills in the columns from `task` on, the comparison whose number it is.

    run: the run's folder, seen from the folder that all compared runs share. attention: the variant. reading: what the evaluation changed
    in the checkpoint's attention and model, as a line of overrides, "" for nothing. seed: the run's. settings: what the runs with unlike
    seeds share, by which they are averaged. tokenizer: its name. data: the source and the beginning of the text's sha256. context: the
    training context in tokens. length: the context length evaluated, in tokens. depth: the place inside it (loss_by_position: tokens of
    context; passkey, needle: the share of the filler before the needle, 0 to 1). metric: what value is; of a task's metrics the first one
    is the one that tables and plots show. value: None where there is none, note says why. count: tokens predicted, or examples, or
    repetitions. stderr: standard error of value, None where there are fewer than two independent parts.
    """

    run: str = ""
    attention: str = ""
    reading: str = ""
    seed: int | None = None
    settings: str = ""
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

    @property
    def line(self) -> tuple[str, str]:
        """What one line of a table or of a plot stands for: a run in one reading."""
        return self.run, self.reading


COLUMNS = tuple(field.name for field in fields(Row))
OLD_COLUMNS = {"overrides": "reading"}  # what files written before may call a column
METRICS = ("loss", "perplexity", "bits_per_byte")
SHARES = ("exact_match", "accuracy", "string_match")  # of right answers, from 0 to 1


def with_new_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file, by the names that columns have today."""
    return {OLD_COLUMNS.get(name, name): value for name, value in row.items()}


def language_model_rows(loss: float, stderr: float | None, bytes_per_token: float | None, **columns) -> list[Row]:
    """The rows of one mean loss in nats per token: loss, perplexity, bits per byte, each with its standard error.

    bytes_per_token: of text; None where the tokens are no text, which has no bits per byte.
    """
    perplexity = math.exp(loss) if loss < 700 else loss * math.inf  # a broken model's loss would overflow
    values = {"loss": (loss, 1.0), "perplexity": (perplexity, perplexity)}
    if bytes_per_token is not None:
        bits = 1 / (math.log(2) * bytes_per_token)
        values["bits_per_byte"] = (loss * bits, bits)
    return [
        Row(metric=name, value=value, stderr=None if stderr is None else stderr * slope, **columns)
        for name, (value, slope) in values.items()
    ]


def mean_row(values: Sequence[float], **columns) -> Row:
    """The mean of independent values and its standard error."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    return Row(value=mean, count=n, stderr=math.sqrt(spread / (n - 1) / n) if n > 1 else None, **columns)


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """The rows as a table with the columns COLUMNS, of Python's own objects: None stays apart from NaN, and whole numbers stay whole."""
    return pd.DataFrame([astuple(row) for row in rows], columns=list(COLUMNS), dtype=object)


def pooled(rows: Iterable[Row], by: Sequence[str]) -> list[Row]:
    """The mean over rows of independent examples, weighted by their counts, for each combination of the columns `by`.

    Rows without a value are left out. The standard error is None where one of the rows has none.
    """
    table = frame(row for row in rows if row.value is not None)
    means = []
    for names, group in table.groupby(list(by), sort=False, dropna=False):
        count = sum(group["count"])
        stderr = math.sqrt(sum((group["count"] * group["stderr"].astype(float)) ** 2)) / count
        columns = {**dict(zip(by, names, strict=True)), "count": count, "stderr": None if math.isnan(stderr) else stderr}
        means.append(Row(value=sum(group["count"] * group["value"]) / count, **columns))
    return means


def over_depths(rows: Iterable[Row]) -> list[Row]:
    """The mean over the depths of each task, length and metric."""
    return pooled((row for row in rows if row.depth is not None), by=("task", "length", "metric"))


def comparable_metric(rows: Iterable[Row]) -> str:
    """perplexity, or bits_per_byte if the runs have unlike tokenizers: their tokens are not the same predictions."""
    return "perplexity" if len({row.tokenizer for row in rows if row.tokenizer}) < 2 else "bits_per_byte"


def shown_metrics(rows: Iterable[Row]) -> dict[str, str]:
    """By task the one metric that stands for it: the comparable one of a language model's, else the task's first."""
    rows = [row for row in rows if row.value is not None]
    language, shown = comparable_metric(rows), {}
    for row in rows:
        if row.metric == language:
            shown[row.task] = language
        else:
            shown.setdefault(row.task, row.metric)
    return shown


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """The table with every digit; None is an empty field. The file that was there is replaced when the new one is whole."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(astuple(row) for row in rows)
    write_whole(path, text.getvalue())


class Table:
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
