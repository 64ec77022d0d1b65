"""What a run resumes from: the checkpoint, and the best score so far."""

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from attnzoo import checkpoint
from attnzoo.errors import UserError
from attnzoo.run.folder import RunFolder

log = logging.getLogger(__name__)


def checkpoint_to_resume(resume: str | None, ckpt_path: str | None, folder: RunFolder) -> Path | None:
    """The run folder's last checkpoint if resume="auto" and it exists; otherwise ckpt_path."""
    if resume == "auto" and folder.last.is_file():
        return folder.last
    if resume == "auto" and ckpt_path is None:
        log.info(f"resume=auto: {folder.last} does not exist yet, training starts from the beginning")
    return None if ckpt_path is None else checkpoint.existing_file(ckpt_path)


def check_resumable(content: dict, path: Any) -> None:
    """Raises UserError for a checkpoint without the states of optimizer, schedule and loops that resuming needs."""
    missing = [key for key in ("optimizer_states", "lr_schedulers", "loops") if not content.get(key)]
    if missing:
        raise UserError(f"{path} cannot be trained on: it has no {', '.join(missing)}. Take another checkpoint of the run")


class BestScore(lightning.Callback):
    """When a run is resumed, keeps its best checkpoint until a better one is found. The score is read from the best checkpoint itself,
    because a run that crashed right after that validation resumes from a file that does not have the score yet."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.ckpt_path is None:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None and callback.save_top_k == 1:
                _adopt(trainer, callback)


class NextEpoch(lightning.Callback):
    """Begins an epoch where a run goes on from the end of one. Lightning counts that epoch as over and does not count the next one as
    begun, so that the next resume would read a wrong place from its counts."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_progress.total.processed == loop.epoch_progress.total.started:
            loop.reset_restart_stage()


def _adopt(trainer: lightning.Trainer, callback: ModelCheckpoint) -> None:
    path = Path(callback.dirpath or "") / f"{callback.filename}{callback.FILE_EXTENSION}"
    score = None
    if trainer.is_global_zero and path.is_file():
        try:
            score = _score(checkpoint.read(path), callback.monitor)
        except UserError as error:
            log.warning(f"{error}; the next validation takes its place")
    score = trainer.strategy.broadcast(score)
    if score is None:
        return
    value = torch.tensor(score, device=trainer.strategy.root_device)
    callback.best_model_path = callback.kth_best_model_path = str(path)
    callback.best_model_score = callback.kth_value = value
    callback.best_k_models = {str(path): value}


def _score(content: dict, monitor: str) -> float | None:
    """The score in a best checkpoint, from the state of the callback that wrote it."""
    for name, state in content.get("callbacks", {}).items():
        if name.startswith("ModelCheckpoint") and state.get("monitor") == monitor and state.get("best_model_score") is not None:
            return float(state["best_model_score"])
    return None
