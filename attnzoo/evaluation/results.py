"""The long-format table that every evaluation task fills, and the choice of the metrics that are shown."""

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
    """One measured number. A task fills in the columns from `task` on; the comparison of runs fills in the others.

    run: the run's folder, relative to the folder that all compared runs share.
    attention: the variant.
    reading: the evaluation's changes of the checkpoint's attention and model, as a line of overrides; "" without changes.
    seed: the run's seed.
    settings: a name for everything but the seed; runs with the same settings and different seeds are averaged.
    tokenizer: its name.
    data: the source and the beginning of the text's sha256.
    context: the training context in tokens.
    length: the evaluated context length in tokens.
    depth: the place inside it (loss_by_position: tokens of context; passkey, needle: the share of the filler before the needle, 0 to 1).
    metric: what is measured. Tables and plots show one metric of each task, see `shown_metrics`.
    value: None if there is no value; then note says why.
    count: the number of predicted tokens, of examples, or of repetitions.
    stderr: the standard error of value, None if there are fewer than two independent parts.
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
        """The run and the reading: one line of a table or of a plot stands for this pair."""
        return self.run, self.reading


COLUMNS = tuple(field.name for field in fields(Row))
OLD_COLUMNS = {"overrides": "reading"}  # names of columns in older files, and the present names
METRICS = ("loss", "perplexity", "bits_per_byte")
SHARES = ("exact_match", "accuracy", "string_match")  # metrics that are shares of right answers, from 0 to 1


def with_new_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a file with the present names of its columns."""
    return {OLD_COLUMNS.get(name, name): value for name, value in row.items()}


def language_model_rows(loss: float, stderr: float | None, bytes_per_token: float | None, **columns) -> list[Row]:
    """The rows for one mean loss in nats per token: loss, perplexity, bits per byte, each with its standard error.

    bytes_per_token: bytes of text per token; None if the tokens are not text. Then there is no row for bits per byte.
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
    """A row with the mean of independent values and its standard error."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    return Row(value=mean, count=n, stderr=math.sqrt(spread / (n - 1) / n) if n > 1 else None, **columns)


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """The rows as a table with the columns COLUMNS, as Python objects, so that None differs from NaN, and integers stay integers."""
    return pd.DataFrame([astuple(row) for row in rows], columns=list(COLUMNS), dtype=object)


def pooled(rows: Iterable[Row], by: Sequence[str]) -> list[Row]:
    """The mean over rows of independent examples, weighted by their counts, for each combination of the columns `by`.

    Rows without a value are left out. The standard error is None if one of the rows has none.
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
    """perplexity, or bits_per_byte if the runs have different tokenizers, because they then predict different tokens."""
    return "perplexity" if len({row.tokenizer for row in rows if row.tokenizer}) < 2 else "bits_per_byte"


def shown_metrics(rows: Iterable[Row]) -> dict[str, str]:
    """For each task the metric that is shown: the comparable metric of language models if the task has it, otherwise the task's first."""
    rows = [row for row in rows if row.value is not None]
    language, shown = comparable_metric(rows), {}
    for row in rows:
        if row.metric == language:
            shown[row.task] = language
        else:
            shown.setdefault(row.task, row.metric)
    return shown


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Writes the table with all digits; None becomes an empty field. An existing file is replaced only when the new one is complete."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(astuple(row) for row in rows)
    write_whole(path, text.getvalue())


class Table:
    """The rows so far, and their file. `add` writes the file if it was last written more than `seconds` ago."""

    def __init__(self, path: Path, seconds: float = 5.0):
        self.path, self.seconds, self.rows, self.written = path, seconds, [], -math.inf

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        if time.monotonic() > self.written + self.seconds:
            self.write()

    def write(self) -> None:
        if not self.rows:
            return  # an evaluation that is refused leaves no file
        write_csv(self.rows, self.path)
        self.written = time.monotonic()
