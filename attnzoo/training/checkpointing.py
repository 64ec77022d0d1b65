"""When checkpoints are written, so that a run can be stopped anywhere and resumed exactly. For the file format see attnzoo.checkpoint."""

from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from attnzoo.checkpoint import read, save
from attnzoo.run.folder import RunFolder
from attnzoo.run.resuming import check_resumable
from attnzoo.run.steps import StepCallback, check_losses, is_last_step


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoint files that are either complete or absent, and loads them without running code from them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        content = read(path, map_location=map_location)
        check_resumable(content, path)
        return content


class FinalValidation(lightning.Callback):
    """Validates after the last step, even in the middle of a validation interval."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if is_last_step(trainer):
            trainer.should_stop = True  # makes Lightning validate before it leaves the loop


class FiniteLoss(lightning.Callback):
    """Ends a run whose validation loss is NaN or infinite, before its weights can be saved as the best ones."""

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            check_losses(trainer, validation=True)


class LastCheckpoint(StepCallback):
    """Keeps the run folder's last.ckpt at the last good step: every n optimizer steps, at the end, and where a signal stops the run.

    every_n_steps: None for the steps after which validation is due, in a run without validation too.

    The file is written at the end of an optimizer step, after a validation that is due. It is never written after an exception, which may
    occur in the middle of a step. The run then resumes from the last checkpoint and repeats the same losses.
    """

    def __init__(self, run_dir: str, every_n_steps: int | None = None):
        self.path, self.every_n_steps = RunFolder(Path(run_dir)).last, every_n_steps

    def on_step_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *, leaving: bool) -> None:
        every, loop = self.every_n_steps, trainer.fit_loop.epoch_loop
        due = loop.interval_ended if every is None else trainer.global_step % every == 0
        if (due or leaving) and not trainer.fast_dev_run:
            check_losses(trainer)
            loop.save(self.path)
