"""The loggers of a run, made from its config. No torch here."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from attnzoo.run.command_line import is_sweep
from attnzoo.run.config import choices
from attnzoo.run.folder import RunFolder

log = logging.getLogger(__name__)


def build_loggers(cfg: DictConfig, run_dir: Path, job_type: str, *, resumed: bool = False) -> list[Any]:
    """The loggers of cfg.logger. W&B gets the sweep as group, the job type, and model, attention and layers as tags."""
    loggers = []
    for name, config in (cfg.get("logger") or {}).items():
        if config is not None:
            extra = _wandb_arguments(cfg, run_dir, job_type, resumed) if name == "wandb" else {}
            loggers.append(instantiate(config, **extra, _convert_="all"))
    return loggers


def close_loggers(loggers: list[Any]) -> None:
    """End the W&B run, so that the next job of a sweep gets its own."""
    if any(type(logger).__name__ == "SafeWandbLogger" for logger in loggers):
        import wandb

        failed = sys.exc_info()[0] is not None
        try:
            wandb.finish(exit_code=1 if failed else 0)
        except Exception as error:  # W&B's service may have died
            log.warning(f"W&B could not be closed ({type(error).__name__}: {error}); metrics.csv is whole")


def _wandb_arguments(cfg: DictConfig, run_dir: Path, job_type: str, resumed: bool) -> dict[str, Any]:
    earlier = RunFolder(run_dir).read_record().get("wandb") if resumed else None
    sweep = run_dir.parent.name if is_sweep() else shared_folder(cfg.get("runs"))
    return {
        "job_type": job_type,
        "group": cfg.logger.wandb.group or sweep,
        "name": cfg.logger.wandb.name or run_dir.name,
        "tags": [*choices("model", "attention", "layers"), *cfg.get("tags", [])],
        **({"id": earlier} if earlier else {}),
    }


def shared_folder(runs: str | list[str] | None) -> str | None:
    """The name of the folder `runs`, or of the innermost folder that contains all paths of a list."""
    if not runs:
        return None
    paths = [runs] if isinstance(runs, str) else list(runs)
    return Path(os.path.commonpath([Path(path).absolute() for path in paths])).name
