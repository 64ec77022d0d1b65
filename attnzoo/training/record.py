"""record.json, the description of a run: versions, commit, command, data, results."""

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch

from attnzoo.errors import UserError
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder
from attnzoo.training.loggers import MetricsCSV, SafeWandbLogger
from attnzoo_kernels.dispatch import implementations_taken

log = logging.getLogger(__name__)

PACKAGES = ("attnzoo", "torch", "triton", "lightning", "torchmetrics", "hydra-core", "datasets", "tokenizers", "transformers", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA and the PACKAGES; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any] | None:
    """The commit of the source tree this code runs from and whether files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may lie inside another project's repository
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


class RunRecord(lightning.Callback):
    """Writes record.json at the start and at the end of a run, however it ends. Removes from metrics.csv the steps that will be
    repeated."""

    def __init__(self, run_dir: str):
        self.folder = RunFolder(Path(run_dir))
        self.content: dict[str, Any] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if not trainer.ckpt_path:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.started = time.time()
        self.earlier_wandb = self.folder.read_record().get("wandb")
        device = pl_module.device
        cpu = f"{platform.machine()} {device.type}, {os.cpu_count()} cores"
        self.content = {
            "status": "running",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "resumed_from": str(trainer.ckpt_path) if trainer.ckpt_path else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "devices": trainer.world_size,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "parameters": pl_module.n_parameters,
            "git": git_state(),
            "wandb": next((logger.version for logger in trainer.loggers if isinstance(logger, SafeWandbLogger)), None),
            **{key: pl_module.record[key] for key in ("task", "context", "model", "attention", "data", "versions")},
            "init": pl_module.record.get("init"),
            "fp8": pl_module.record.get("fp8"),
        }
        self._write(trainer)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.ckpt_path and not trainer.fit_loop.done:  # a resume that is refused, or has nothing left to train, changes nothing
            self._begin(trainer, pl_module)
        if trainer.is_global_zero:
            tables = (logger for logger in trainer.loggers if isinstance(logger, MetricsCSV))
            logged = max((table.forget_from(trainer.global_step) for table in tables), default=-1)
            for logger in trainer.loggers:
                if isinstance(logger, SafeWandbLogger) and logger.version is not None and logger.version == self.earlier_wandb:
                    logger.has_until = logged
            if trainer.ckpt_path:
                log.info(f"goes on from step {trainer.global_step} of {trainer.ckpt_path}")

    def on_fit_end(self, trainer: lightning.Trainer, *_: Any) -> None:  # also of a run without a step
        self._finish(trainer, "finished", trainer.callback_metrics)

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        # without metrics: after a GPU error, reading one would raise another error
        reason = str(exception) if isinstance(exception, UserError) else repr(exception)
        try:
            self._finish(trainer, "interrupted" if isinstance(exception, KeyboardInterrupt | SystemExit) else f"failed: {reason}", {})
        except UserError as error:  # the disk is full; the first exception is still raised
            log.warning(str(error))

    def _finish(self, trainer: lightning.Trainer, status: str, metrics: dict[str, torch.Tensor]) -> None:
        if self.content:
            results = {name: float(value) for name, value in metrics.items()}
            seconds = round(time.time() - self.started, 1)
            self.content |= {"status": status, "steps": trainer.global_step, "seconds": seconds, "kernels": implementations_taken(),
                             "results": results}
            self._write(trainer)

    def _write(self, trainer: lightning.Trainer) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            write_whole(self.folder.record, json.dumps(self.content, indent=1))
