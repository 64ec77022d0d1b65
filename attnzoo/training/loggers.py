"""Where metrics go: a CSV that survives a resumed run, and Weights & Biases."""

import contextlib
import csv
import io
import logging
import netrc
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from attnzoo.errors import UserError
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder

log = logging.getLogger(__name__)


class MetricsCSV(Logger):
    """Writes `metrics.csv` in `save_dir`. Each call adds a row, to an existing file too, and has written it when it returns."""

    def __init__(self, save_dir: str):
        super().__init__()
        self._folder = RunFolder(Path(save_dir))
        self._columns: list[str] | None = None

    name, version = "", ""

    @property
    def save_dir(self) -> str:
        return str(self._folder.path)

    @property
    def path(self) -> Path:
        return self._folder.metrics

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing, because the run folder holds config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()} | {"step": step}
        if self._columns is None:
            self._columns = _read(self.path)[0]
        if row.keys() <= set(self._columns) and self.path.exists():
            _append(self.path, _text([[row.get(name, "") for name in self._columns]]))
            return
        header, rows = _read(self.path)
        self._columns = sorted({*header, *row})
        whole = [self._columns, *([old.get(name, "") for name in self._columns] for old in (*rows, row))]
        write_whole(self.path, _text(whole))

    @rank_zero_only
    def forget_from(self, step: int) -> int:
        """Drops unreadable rows and the rows of `step` and later, which a run that resumes from a checkpoint writes again.

        Returns the last step that the file had, or -1 if it had none.
        """
        if not self.path.exists():
            return -1
        header, rows = _read(self.path)
        if not header and self.path.stat().st_size:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            os.replace(self.path, aside)
            log.warning(f"{self.path} is no table of metrics and was renamed to {aside.name}; a new one begins at step {step}")
            return -1
        kept = [[row[name] for name in header] for row in rows if int(row["step"]) < step]
        write_whole(self.path, _text([header, *kept] if header else []))
        self._columns = header
        return max((int(row["step"]) for row in rows), default=-1)


def _text(rows: Iterable[list]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _append(path: Path, line: str) -> None:
    """Appends the line. If that fails, the file stays as it was and UserError is raised."""
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(line.encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, size)  # a part of the line may have been written
        raise UserError(f"could not write {path}: {error.strerror}; earlier rows are unchanged. Make room and resume") from error


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows. Incomplete rows, such as the last one after a crash, are left out. Without a valid header the result is empty."""
    if not path.exists():
        return [], []
    text = path.read_bytes().decode(errors="replace").replace("\0", "")
    try:
        header, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))) or [[]]
    except csv.Error:
        return [], []
    if "step" not in header:
        return [], []
    found = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]
    return header, [row for row in found if row["step"].isdecimal()]


def read_metrics(path: str | os.PathLike) -> dict[str, list[tuple[int, float]]]:
    """metrics.csv as (step, value) pairs by metric; steps are counted from 1. Damaged rows and values are left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in _read(Path(path))[1]:
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                with contextlib.suppress(ValueError):
                    series.setdefault(name, []).append((int(row["step"]) + 1, float(value)))
    return series


class SafeWandbLogger(WandbLogger):
    """A W&B logger whose errors do not end a run: metrics then go to metrics.csv only. A resumed run does not send a step twice."""

    lost = False
    has_until = -1  # the last step, counted from 0, that an earlier start sent

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        try:
            super().log_hyperparams(params)
        except ConnectionError as error:  # W&B's service died in an earlier job of a sweep; other errors at the start are raised
            self._lose(error)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.lost and (step is None or step > self.has_until):
            self._guarded(super().log_metrics, metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if not self.lost:
            self._guarded(super().finalize, status)

    def _guarded(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # from W&B itself, its service or the network
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        from wandb.sdk.lib.import_hooks import unregister_all_post_import_hooks

        self.lost = True
        unregister_all_post_import_hooks()  # with them a later import would fail
        log.warning(f"W&B failed ({type(error).__name__}: {error}); the run goes on, its metrics are in metrics.csv alone")


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking: WANDB_API_KEY, or the host's entry in .netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_logger(
    *,
    save_dir: str,
    project: str,
    name: str | None,
    group: str | None,
    job_type: str,
    tags: list[str],
    offline: bool | None = None,
    **kwargs,
):
    """A WandbLogger. offline=None: offline if there is no key. A resumed run goes on with the W&B run of its folder."""
    os.environ.setdefault("WANDB_SILENT", "true")
    offline = not has_wandb_key() if offline is None else offline
    logger = SafeWandbLogger(
        name=name, save_dir=save_dir, project=project, group=group, job_type=job_type, tags=tags, offline=offline, **kwargs
    )
    logger._wandb_init.pop("anonymous", None)  # Lightning still passes it, and W&B warns
    return logger
