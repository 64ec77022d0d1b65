"""The Trainer of a run: built from its config, with the loop and the callbacks that every run has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from attnzoo import fp8
from attnzoo.batch import sharing
from attnzoo.errors import UserError
from attnzoo.run.ranks import end_together
from attnzoo.run.resuming import BestScore, NextEpoch
from attnzoo.run.steps import StepLoop
from attnzoo.run.stopping import StopSignals
from attnzoo.run.sweeps import ranks_of_this_job
from attnzoo.training.checkpointing import AtomicCheckpointIO, FiniteLoss


class Float8Precision(MixedPrecision):
    """bfloat16 autocast, in which the linear layers of blocks multiply 8-bit floats in training steps (`attnzoo.fp8`). The module must have
    a `model` that has `blocks`."""

    def __init__(self):
        super().__init__("bf16-mixed", "cuda")
        self.precision = "fp8"

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def convert_module(self, module: Any) -> Any:
        fp8.convert(module.model)
        return module


class Trainer(lightning.Trainer):
    """Lightning's Trainer with two more options.

    context_parallel: how many neighbouring devices share each sequence; 1 is off.
    precision: one of Lightning's, or fp8, see Float8Precision.
    """

    def __init__(self, *, context_parallel: int = 1, precision: _PRECISION_INPUT | Literal["fp8"] | None = None,
                 plugins: Sequence[Any] = (), **options: Any):
        if precision == "fp8":
            if "fsdp" in str(options.get("strategy")).lower():
                raise ValueError("precision=fp8 does not go with FSDP's first form; take trainer=fsdp2, or trainer.precision=bf16-mixed")
            super().__init__(precision=None, plugins=[*plugins, Float8Precision()], **options)
            if reason := fp8.why_not(self.strategy.root_device):
                raise ValueError(f"precision=fp8 {reason}; take trainer.precision=bf16-mixed")
            self.precision_plugin.device = self.strategy.root_device.type
        else:
            super().__init__(precision=precision, plugins=[*plugins], **options)
        if self.world_size % context_parallel:
            raise ValueError(f"context_parallel={context_parallel} must divide the {self.world_size} devices of the run (devices x "
                             "num_nodes)")
        self.context_parallel = context_parallel


def make_trainer(build: Callable, callbacks: list[lightning.Callback], loggers: list[Any], accelerator: str) -> lightning.Trainer:
    """The Trainer of a run. build: lightning.Trainer with the config's arguments, of which the accelerator is named in errors.

    Raises UserError for what this machine or Lightning cannot do.
    """
    # otherwise Lightning adds its own checkpoints or progress bar where the run has none
    enable = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
    }
    try:
        every = [FiniteLoss(), BestScore(), NextEpoch(), *callbacks]
        trainer = build(callbacks=every, logger=loggers or False, plugins=[AtomicCheckpointIO()], **enable)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            build_of = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise UserError(
                f"trainer.accelerator={accelerator}, but PyTorch {torch.__version__} ({build_of}) sees no GPU; "
                "take trainer=cpu or trainer=default, or install a driver and a CUDA build"
            ) from error
        raise UserError(f"trainer: {reason}") from error
    device, precision = trainer.strategy.root_device, str(trainer.precision)
    if device.type == "cuda" and precision.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"trainer.precision={precision}, but {name} has no bfloat16; take trainer.precision=16-mixed")
    return trainer


def set_accumulation(trainer: lightning.Trainer, batch_tokens: int | None, data: Any) -> None:
    """Sets how many micro-batches an optimizer step has, from the global batch in tokens. Makes the validation interval, which Lightning
    counts in micro-batches, count optimizer steps."""
    if batch_tokens is not None:
        readers = trainer.world_size // sharing(trainer)  # devices, or groups of devices that share their sequences
        micro = data.batch_size * data.seq_len * readers
        unit = f"groups of {sharing(trainer)} devices" if sharing(trainer) > 1 else "devices"
        steps, rest = divmod(batch_tokens, micro)
        if rest or steps < 1:
            parts = f"data.batch_size={data.batch_size} x data.seq_len={data.seq_len} x {readers} {unit}"
            near = micro * max(1, round(batch_tokens / micro))
            raise UserError(f"batch_tokens={batch_tokens} is not a multiple of {micro}, the tokens of a micro-step ({parts}); take {near}")
        trainer.accumulate_grad_batches = steps
    if isinstance(getattr(trainer, "val_check_interval", None), int):  # a Trainer whose interval is a time has no such attribute
        trainer.val_check_interval *= trainer.accumulate_grad_batches


def fit(trainer: lightning.Trainer, module: Any, data: Any, ckpt_path: Path | None, run_dir: Path, *, requeue: bool) -> None:
    """trainer.fit. A signal stops it at the end of an optimizer step; it then raises SystemExit with 128 + the signal's number."""
    with StopSignals(requeue=requeue) as signals, ranks_of_this_job(run_dir), end_together(trainer):
        trainer.fit_loop.epoch_loop = StepLoop(trainer, signals)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        except SystemExit as leaving:
            if isinstance(leaving.__context__, KeyboardInterrupt):  # for which Lightning exits with 1
                raise SystemExit(130) from leaving
            raise
