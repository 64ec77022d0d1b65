"""Optimizer and learning rate schedule."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from attnzoo.errors import UserError

SCHEDULES = ("cosine", "linear", "constant")
FSDP_PREFIX = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class AdamWRecipe:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): fused, decay on matrices (embeddings among them), none on biases and norms.

    schedule: cosine | linear | constant, after warmup_steps of linear growth; it ends at final_lr after total_steps optimizer steps
    (null: where training ends).
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: str
    warmup_steps: int
    final_lr: float
    total_steps: int | None = None

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule={self.schedule!r}: must be one of {', '.join(SCHEDULES)}")
        for name in ("lr", "eps", "weight_decay", "warmup_steps", "final_lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: must not be negative")

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        matrices: set[str],
        total_steps: Callable[[], float],
        scaled_gradients: bool,
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """parameters: by name. matrices: names to decay, given because FSDP's shards have lost their shape.

        total_steps: asked at the first step, when the length of an epoch is known. scaled_gradients: fp16; the fused step would unscale
        them after the clipping.
        """
        decay, rest = [], []
        for name, parameter in parameters:
            if parameter.requires_grad:
                (decay if name.replace(FSDP_PREFIX, "") in matrices else rest).append(parameter)
        groups = [{"params": decay, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=tuple(self.betas), eps=self.eps, fused=not scaled_gradients)
        return optimizer, LambdaLR(optimizer, lambda step: self.factor(step, total_steps))

    def factor(self, step: int, total_steps: Callable[[], float]) -> float:
        """The learning rate of optimizer step `step` (from 0), as a share of lr."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant" or step == 0:
            return 1.0
        total = self.total_steps or total_steps()
        if not math.isfinite(total) or total < 1:
            raise UserError(
                f"optimizer.schedule={self.schedule} needs an end: set trainer.max_steps, optimizer.total_steps, or schedule=constant"
            )
        progress = min(1.0, (step - self.warmup_steps) / max(1, total - self.warmup_steps))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        final = self.final_lr / self.lr
        return final + (1 - final) * share
