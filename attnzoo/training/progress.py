"""One progress bar over all optimizer steps."""

import contextlib
import sys
from typing import Any

import lightning
from lightning.pytorch.callbacks import ProgressBar
from tqdm.auto import tqdm

from attnzoo.run.steps import StepCallback, is_log_step

SHOWN = (
    ("loss", "train/loss", ".3f"),
    ("val", "val/loss", ".3f"),
    ("val bpb", "val/bpb", ".3f"),
    ("val acc", "val/accuracy", ".3f"),
    ("tok/s", "perf/tokens_per_second", ".0f"),
)


class StepProgress(ProgressBar, StepCallback):
    """A progress bar that is updated only when metrics are logged: reading the loss in every step would make the host wait for the GPU."""

    def __init__(self):
        super().__init__()
        self.bar: tqdm | None = None
        self.validation_bar: tqdm | None = None
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if not (self.enabled and trainer.is_global_zero):
            return
        total = trainer.estimated_stepping_batches
        self.bar = _bar("training", "step", total, initial=trainer.global_step)

    def on_step_end(self, trainer: lightning.Trainer, pl_module: Any, *, leaving: bool) -> None:
        if self.bar is not None and is_log_step(trainer):
            self._show(trainer)

    def _show(self, trainer: lightning.Trainer) -> None:
        metrics = trainer.callback_metrics
        shown = {label: format(float(metrics[name]), spec) for label, name, spec in SHOWN if name in metrics}
        if "val bpb" in shown:  # there is room for one of them
            shown.pop("val acc", None)
        self.bar.set_postfix(shown, refresh=False)
        with contextlib.suppress(BrokenPipeError):  # the Ctrl-C that stops the run also ends a `| tee`
            self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.bar is not None:
            self.validation_bar = _bar("validating", "batch", sum(trainer.num_val_batches), leave=False)

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.validation_bar is not None:
            self.validation_bar.update()

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.bar is not None:
            self.validation_bar.close()
            self.validation_bar = None
            self._show(trainer)

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.bar is not None:
            self._show(trainer)
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.validation_bar is not None:
            self.validation_bar.close()
            self.validation_bar = None
        if self.bar is not None:
            with contextlib.suppress(BrokenPipeError):
                self.bar.refresh()
                self.bar.close()
            self.bar = None


def _bar(desc: str, unit: str, total: float, **options: Any) -> tqdm:
    """A progress bar. In a log file it writes a line at most every 15 seconds, and none for a validation that is shorter than that."""
    rate = {} if sys.stderr.isatty() else {"mininterval": 15, "delay": 15 if unit == "batch" else 0, "ncols": 120}
    return tqdm(total=total if total != float("inf") else None, desc=desc, unit=unit, dynamic_ncols=True, **rate, **options)
