"""Measurements, the parts of a task. Each is stored on disk as soon as it is finished, and is not done twice."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from attnzoo.errors import UserError
from attnzoo.evaluation.results import Row, with_new_names

FILE = "evaluations.jsonl"


@dataclass(frozen=True)
class Measurement:
    """One piece of a task, done as a whole or not at all.

    task, length: those of its rows; they name it on the screen and in errors. settings: plain JSON of everything that decides the result
    besides the checkpoint, its data and the machine. tokens: how many the model reads, for the progress bar. measure: returns the rows; it
    is called with a function that it must tell how many tokens were read. An error in it becomes a row without a
    value; where several processes evaluate together, only a UserError or ValueError does.
    """

    task: str
    measure: Callable[[Callable[[int], None]], list[Row]]
    settings: Mapping[str, Any]
    tokens: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a task does with one model: its measurements, and `conclude`, which computes further rows from theirs (such as means)."""

    measurements: Sequence[Measurement]
    conclude: Callable[[list[Row]], list[Row]] = lambda rows: []


def refusal(task: str, note: str) -> Plan:
    """The plan of a task that does not suit this model or its data: one row without a value that says why."""
    return Plan([Measurement(task, lambda advance: [Row(task=task, note=note)], {"note": note})])


class Store:
    """Finished measurements, one per line of a file. Each line is appended whole and is on disk before the next measurement starts.

    writes: whether `add` writes to the file; False in all but one of several processes.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes

    @cached_property
    def finished(self) -> dict[str, list[Row]]:
        """The rows of every measurement by its key. A line that was cut off, by a full disk or a power failure, is ignored."""
        finished = {}
        try:
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}; name another folder with store=...") from error
        for line in lines:
            try:
                entry = json.loads(line)
                finished[entry["key"]] = [Row(**with_new_names(row)) for row in entry["rows"]]
            except (ValueError, TypeError, KeyError):
                continue
        return finished

    def add(self, key: str, rows: Sequence[Row]) -> None:
        self.finished[key] = list(rows)
        if not self.writes:
            return
        line = json.dumps({"key": key, "rows": [_without_defaults(row) for row in rows]}).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                if file.seek(0, os.SEEK_END) and _last_byte(file) != b"\n":
                    line = b"\n" + line
                file.write(line)  # one write in append mode, so that lines of other processes stay whole
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"results cannot be kept in {self.path}: {error.strerror}; name another folder with store=...") from error


def _last_byte(file) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _without_defaults(row: Row) -> dict[str, Any]:
    return {field.name: value for field in fields(row) if (value := getattr(row, field.name)) != field.default}


def key(*parts: Any) -> str:
    """A hash that identifies these plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def digest(*paths: Path) -> str:
    """sha256 of the files' contents, in this order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
