"""The end of an optimizer step: the only place where metrics are logged, progress is shown, checkpoints are saved and a run stops."""

import logging
import math
import signal
import subprocess
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from attnzoo.errors import UserError
from attnzoo.run.folder import RunFolder
from attnzoo.run.stopping import StopSignals
from attnzoo.training.report import override

log = logging.getLogger(__name__)


class StepCallback(lightning.Callback):
    """A callback that is called at the end of each optimizer step, after the step was logged and a validation that is due has run."""

    def on_step_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *, leaving: bool) -> None:
        """leaving: whether training ends with this step, for any reason except an error."""


def is_due(trainer: lightning.Trainer) -> bool:
    """Whether the metrics of the newest optimizer step are logged: those of every n-th one, and of the last."""
    return trainer.should_stop or trainer.global_step % trainer.log_every_n_steps == 0


def is_log_step(trainer: lightning.Trainer) -> bool:
    """Whether the micro-batch that was just trained on ended an optimizer step whose metrics are logged."""
    return is_due(trainer) and not trainer.fit_loop.epoch_loop._should_accumulate()


def is_last_step(trainer: lightning.Trainer) -> bool:
    """Whether the training step that just ended is the run's last one."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    return trainer.is_last_batch and 0 < (trainer.max_epochs or 0) <= trainer.current_epoch + 1


def check_losses(trainer: lightning.Trainer, *, validation: bool = False) -> None:
    """Raises UserError if the last training (or validation) loss is NaN or infinite. Waits for the GPU."""
    if validation:
        name, loss = "val/loss", trainer.callback_metrics.get("val/loss")
    else:
        name, loss = "train/loss", trainer.lightning_module.step_loss
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return  # in float16 the gradient scaler skips such a step
    if loss is None or math.isfinite(loss):
        return
    last = RunFolder(Path(trainer.default_root_dir)).last
    kept = f"; {last} holds an earlier step" if last.exists() else ""
    raise UserError(
        f"{name} is {float(loss)} at step {trainer.global_step}, so training ends here: lower optimizer.lr, raise optimizer.warmup_steps "
        f"or set trainer.gradient_clip_val{kept}"
    )


class StepLoop(_TrainingEpochLoop):
    """Lightning's loop over micro-batches, which calls StepCallbacks at the end of optimizer steps and acts upon signals only there.

    A validation that is due within an optimizer step runs at the end of the step, where weights, loader and schedule agree.
    """

    def __init__(self, trainer: lightning.Trainer, signals: StopSignals):
        replaced = trainer.fit_loop.epoch_loop
        super().__init__(trainer, min_steps=replaced.min_steps, max_steps=replaced.max_steps)
        self.signals = signals
        self.interval_ended = False  # whether validation was due at the last optimizer step, also in a run without validation
        self._interval = False  # the same for the optimizer step under way
        self._ending = False  # whether a micro-batch is being ended
        signals.install(trainer)

    def _broadcast_sigterm_tensor(self) -> None:
        """Does nothing. Lightning's method waits for the GPU in every micro-batch."""

    @property
    def done(self) -> bool:
        if self.trainer.should_stop and not self.restarting and self._should_accumulate():
            return False  # such as after max_time: the optimizer step under way is still completed
        return super().done

    def _should_check_val_epoch(self) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return every is None or (self.trainer.current_epoch + 1) % every == 0

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        due = super()._should_check_val_fx(data_fetcher)
        if self._ending:
            self._interval |= due
            due = self._interval and not self._should_accumulate()
        return due and self.trainer.enable_validation

    def on_advance_end(self, data_fetcher: Any) -> None:
        self._ending = True
        super().on_advance_end(data_fetcher)
        self._ending = False
        if self._should_accumulate():
            return
        trainer, self.interval_ended, self._interval = self.trainer, self._interval, False
        received = self.signals.agreed(trainer)
        last = is_last_step(trainer) or (trainer.should_stop and trainer.fit_loop._can_stop_early)
        if is_log_step(trainer) or received or last:
            check_losses(trainer)
        for callback in trainer.callbacks:
            if isinstance(callback, StepCallback):
                callback.on_step_end(trainer, trainer.lightning_module, leaving=bool(received or last))
        if received and not last:
            self._leave(received)

    def _leave(self, received: int) -> None:
        trainer = self.trainer
        if trainer.is_global_zero:
            last = RunFolder(Path(trainer.default_root_dir)).last
            saved = f"saved {last}; go on with the same command and {override('hydra.run.dir', trainer.default_root_dir)} resume=auto"
            name = signal.Signals(received).name
            log.info(f"stopped by {name} after step {trainer.global_step}, {saved if last.exists() else 'without a checkpoint'}")
            if job := self.signals.slurm_job(trainer, received):
                log.info(f"SLURM starts job {job} again")
                subprocess.run(["scontrol", "requeue", job], check=False)
        # Lightning kills all processes of a run if one that it started fails, so that only the first one exits with the signal's status
        is_child = isinstance(trainer._accelerator_connector.cluster_environment, LightningEnvironment) and trainer.local_rank > 0
        raise SystemExit(0 if is_child else 128 + received)

    def save(self, path: Any) -> None:
        """Writes a checkpoint from which Lightning goes on with the next micro-batch, without a validation at this step."""
        # Lightning resumes correctly from a file that was saved before the batch was counted as completed. From a file that was saved
        # afterwards it would skip a batch or a log step.
        counts = (self.batch_progress.total, self.batch_progress.current)
        for count in counts:
            count.completed -= 1
        self._batches_that_stepped -= 1
        try:
            self.trainer.save_checkpoint(path)
        finally:
            for count in counts:
                count.completed += 1
            self._batches_that_stepped += 1
