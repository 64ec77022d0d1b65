"""When checkpoints are written, so that a run can be stopped anywhere and go on exactly; the file itself: attnzoo.checkpoint."""

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from attnzoo.checkpoint import read, save

log = logging.getLogger(__name__)


def is_last_step(trainer: lightning.Trainer) -> bool:
    """Whether the training step that just ended is the run's last one."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    return trainer.is_last_batch and 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1


class AtomicCheckpointIO(TorchCheckpointIO):
    """Files that are whole or absent, and load without running code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read(path, map_location=map_location)


class FinalValidation(lightning.Callback):
    """Validates after the last step, wherever the interval stands."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if is_last_step(trainer):
            trainer.should_stop = True  # which makes Lightning validate before it leaves the loop


class LastCheckpoint(Checkpoint):
    """Keeps `path` at the last good step: every n optimizer steps, at the end, and on Ctrl-C or SIGTERM.

    It is written only between optimizer steps, where weights, loader and schedule agree, and never after an exception, which may
    strike in the middle of a step: the run then goes on from the last interval and repeats the same losses.
    """

    def __init__(self, path: str, every_n_steps: int):
        self.path, self.every_n_steps = Path(path), every_n_steps
        self.interrupted = self.stopping = False
        self.saved_step: int | None = None
        self.previous_handler: Any = None

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.saved_step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self.previous_handler = signal.signal(signal.SIGINT, lambda *_: self._interrupt(trainer))

    def _interrupt(self, trainer: lightning.Trainer) -> None:
        if self.interrupted or not trainer.training:
            raise KeyboardInterrupt
        self.interrupted = True
        log.info("\nstopping after this step (Ctrl-C again: at once, without a checkpoint)")

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.fast_dev_run or trainer.global_step == self.saved_step:
            return
        stop = self._stop_wanted(trainer)
        due = self.every_n_steps > 0 and trainer.global_step % self.every_n_steps == 0
        if due or stop or is_last_step(trainer) or trainer.should_stop:
            trainer.save_checkpoint(self.path)
            self.saved_step = trainer.global_step
        self.stopping = stop and not trainer.received_sigterm  # on SIGTERM Lightning stops by itself
        if stop:
            log.info(
                f"stopped after step {trainer.global_step}, saved {self.path}; go on with the same command and "
                f"hydra.run.dir={trainer.default_root_dir} resume=auto"
            )

    # not before the step's metrics are logged

    def on_train_batch_start(self, *_: Any) -> None:
        self._stop()

    def on_validation_start(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.stopping:
            raise KeyboardInterrupt

    def _stop_wanted(self, trainer: lightning.Trainer) -> bool:
        stop = self.interrupted or trainer.received_sigterm
        if trainer.world_size == 1:
            return stop
        # ranks hear of a signal at unlike steps; asking makes the host wait, so only now and then
        return trainer.global_step % trainer.log_every_n_steps == 0 and trainer.strategy.reduce_boolean_decision(stop, all=False)

    def on_train_end(self, *_: Any) -> None:
        self._restore_handler()

    def on_exception(self, *_: Any) -> None:
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self.previous_handler is not None:
            signal.signal(signal.SIGINT, self.previous_handler)
            self.previous_handler = None
