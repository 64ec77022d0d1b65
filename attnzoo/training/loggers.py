"""Where metrics go: a CSV that survives a resumed run, and Weights & Biases."""

import csv
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class _AppendingWriter(ExperimentWriter):
    """Goes on with the file that is there, where Lightning's deletes it."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file))


class MetricsCSV(CSVLogger):
    """`metrics.csv` in `save_dir`, written at every log step."""

    def __init__(self, save_dir: str):
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=1)

    @property
    def path(self) -> Path:
        return Path(self.save_dir) / "metrics.csv"

    @property
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None and rank_zero_only.rank == 0:
            self._experiment = _AppendingWriter(log_dir=self.save_dir)
        return super().experiment

    def log_hyperparams(self, params=None) -> None:
        """Nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def forget_from(self, step: int) -> None:
        """Drop the rows of `step` and later: a run that goes on from a checkpoint writes them again."""
        if not self.path.exists():
            return
        with self.path.open(newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        column = header.index("step") if "step" in header else None
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in rows if column is not None and int(row[column]) < step)])


def read_metrics(path: str | os.PathLike) -> dict[str, list[tuple[int, float]]]:
    """metrics.csv as (step, value) pairs by metric; steps counted from 1."""
    series: dict[str, list[tuple[int, float]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    series.setdefault(name, []).append((int(row["step"]) + 1, float(value)))
    return series


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
    """A WandbLogger; offline=None: offline where there is no key. A resumed run folder goes on with its W&B run."""
    from lightning.pytorch.loggers import WandbLogger

    os.environ.setdefault("WANDB_SILENT", "true")
    offline = not has_wandb_key() if offline is None else offline
    logger = WandbLogger(
        name=name, save_dir=save_dir, project=project, group=group, job_type=job_type, tags=tags, offline=offline, **kwargs
    )
    logger._wandb_init.pop("anonymous", None)  # Lightning still passes it, and W&B warns
    return logger
