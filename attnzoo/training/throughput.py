"""How fast and how well the hardware is used: tokens a second, model flops utilisation, peak memory."""

import time
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from attnzoo.batch import Batch, sharing
from attnzoo.run.steps import is_due

# Peak FLOP/s without sparsity, as for the H100 SXM. Lightning's table lacks "NVIDIA H200", and for related GPUs assumes 2:4 sparsity.
H200_FLOPS = {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 494.7e12}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak floating point operations per second in this precision, for fp8 those in bfloat16; None if unknown."""
    dtype = torch.bfloat16 if precision.startswith(("bf16", "fp8")) else torch.float16 if precision.startswith("16") else torch.float32
    if device.type == "cuda" and "h200" in torch.cuda.get_device_name(device).lower():
        return H200_FLOPS[dtype]
    return get_available_flops(device, dtype)


def sequence_lengths(batch: Batch) -> list[int]:
    """Lengths of a batch's sequences, or of the paths in its trees, without padding. Does not wait for the GPU."""
    if "lengths" in batch:
        return batch["lengths"].tolist()
    rows, length = batch["input_ids"].shape
    return [length] * rows


class Throughput(lightning.Callback):
    """Logs perf/tokens_per_second and perf/mfu over the steps since the last log, and perf/peak_memory_gb of the GPU.

    Padding does not count as tokens or flops, tokens that sequences share count once, and the output layer counts where it is applied.
    perf/packing_efficiency is the share of the batches' positions that hold a token and not padding.

    Lightning's ThroughputMonitor waits for the GPU in every step; this one only in steps that are logged. Time in validation is excluded.
    All ranks are assumed to be equally fast.
    """

    paused = 0.0  # seconds in validation since the last log; trainer.num_sanity_val_steps validates before training starts

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        # the FLOPs of a sharded model cannot be computed from one rank's part
        self.peak = None if pl_module.is_sharded else peak_flops(pl_module.device, str(trainer.precision))
        self._restart(trainer)

    def _restart(self, trainer: lightning.Trainer) -> None:
        self.lengths: list[int] = []
        self.shared: list[int] = []  # in trees, how many tokens of each path in `lengths` belong to earlier segments
        self.n_slots = self.n_logits = 0  # positions in the batches, padding included; positions of the output layer
        self.step, self.paused, self.started = trainer.global_step, 0.0, time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        lengths = sequence_lengths(batch)
        self.lengths += lengths
        self.shared += batch["shared"].tolist() if "shared" in batch else ()
        self.n_slots += batch["input_ids"].numel()
        self.n_logits += batch["n_targets"] if "logits_at" in batch else sum(lengths)
        if trainer.global_step == self.step or not is_due(trainer):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        seconds = time.perf_counter() - self.started - self.paused
        n_tokens = sum(self.lengths) - sum(self.shared)
        metrics = {
            "perf/tokens_per_second": trainer.world_size / sharing(trainer) * n_tokens / seconds,
            "perf/packing_efficiency": n_tokens / self.n_slots,
        }
        if self.peak:
            flops = pl_module.model.flops(self.lengths, n_logits=self.n_logits)
            if self.shared:
                flops -= pl_module.model.flops(self.shared, n_logits=0)
            metrics["perf/mfu"] = flops / sharing(trainer) / seconds / self.peak
        if pl_module.device.type == "cuda":
            metrics["perf/peak_memory_gb"] = torch.cuda.max_memory_allocated(pl_module.device) / 1e9
        pl_module.log_dict(metrics)
        self._restart(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self.validation_started = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.paused += time.perf_counter() - self.validation_started
