"""Optimizers and their learning rates, as configs/optimizer, configs/recipe and configs/schedule describe them. No torch before `build`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnzoo.errors import UserError
from attnzoo.signatures import Count, Natural, NonNegative, Positive, ShareBelowOne, check_options
from attnzoo.training.schedule import Schedule

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

FSDP_PREFIX = "_fsdp_wrapped_module."
NUMBERS = ("initial_lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps")  # of a group of parameters, by torch's names


@dataclass(frozen=True)
class AdamWRecipe:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): fused, with weight decay on matrices (embeddings too), not on biases and norms.

    The learning rate grows to lr in warmup_steps optimizer steps (below 1: a share of all steps) and then follows schedule. It reaches
    final_lr after total_steps optimizer steps (null: at the end of training).
    """

    lr: Positive
    betas: tuple[ShareBelowOne, ShareBelowOne]
    eps: NonNegative
    weight_decay: NonNegative
    schedule: Schedule
    warmup_steps: Natural | ShareBelowOne
    final_lr: NonNegative
    total_steps: Count | None = None

    def __post_init__(self):
        if isinstance(self.schedule, str):
            raise UserError(f"optimizer.schedule={self.schedule!r}: must be a mapping of options; choose a schedule with schedule=...")
        check_options("optimizer", type(self), vars(self))

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        matrices: set[str],
        total_steps: Callable[[], float],
        scaled_gradients: bool,
    ) -> tuple[Optimizer, LambdaLR]:
        """parameters: by name. matrices: the names of those to decay; they are given, because FSDP's shards have lost their shape.

        total_steps: called when it is needed, because the length of an epoch is not known before training begins. scaled_gradients: True
        for fp16, where the step is not fused: a fused step would unscale gradients only after they are clipped.
        """
        from torch.optim.lr_scheduler import LambdaLR

        trained = [(name.replace(FSDP_PREFIX, ""), parameter) for name, parameter in parameters if parameter.requires_grad]
        optimizer = self._optimizer(trained, matrices, fused=not scaled_gradients)
        return optimizer, LambdaLR(optimizer, lambda step: self.factor(step, total_steps))

    def _optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]], matrices: set[str], *, fused: bool) -> Optimizer:
        from torch.optim import AdamW

        return AdamW(self._groups(parameters, matrices), fused=fused, **self._adamw())

    def _groups(self, parameters: Sequence[tuple[str, nn.Parameter]], matrices: set[str]) -> list[dict[str, Any]]:
        decay = [parameter for name, parameter in parameters if name in matrices]
        rest = [parameter for name, parameter in parameters if name not in matrices]
        return [{"params": decay, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]

    def _adamw(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps}

    def factor(self, step: int, total_steps: Callable[[], float]) -> float:
        """The learning rate of optimizer step `step` (counted from 0), divided by lr."""
        warmup = self.warmup_steps
        if 0 < warmup < 1:
            warmup = round(warmup * self._total(total_steps))
        if step < warmup:
            return (step + 1) / (warmup + 1)  # above zero, so that the first step trains too
        if step == warmup or self.schedule.decay_share == 0:
            return 1.0
        return self.schedule.factor(step - warmup, max(1, self._total(total_steps) - warmup), self.final_lr / self.lr)

    def _total(self, total_steps: Callable[[], float]) -> int:
        total = self.total_steps or total_steps()
        if not math.isfinite(total) or total < 1:
            raise UserError("optimizer.schedule needs an end: set trainer.max_steps or optimizer.total_steps, or take schedule=constant "
                            "and optimizer.warmup_steps in steps")
        return int(total)


@dataclass(frozen=True)
class MuonRecipe(AdamWRecipe):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the matrices inside the model's `blocks`, AdamW for the
    rest.

    Muon's updates are scaled to the RMS of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that both use one learning rate.
    momentum, nesterov, ns_steps: torch.optim.Muon's.
    """

    momentum: ShareBelowOne = 0.95
    nesterov: bool = True
    ns_steps: Count = 5

    def _optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]], matrices: set[str], *, fused: bool) -> Optimizer:
        from attnzoo.training.muon import MuonWithAdamW

        names = {name for name in matrices if ".blocks." in f".{name}"}
        hidden = [parameter for name, parameter in parameters if name in names]
        if not hidden or any(parameter.ndim != 2 or hasattr(parameter, "full_tensor") for parameter in hidden):
            raise UserError("optimizer=muon needs whole matrices below the model's `blocks`: trainer=fsdp and trainer=fsdp2 split them; "
                            "take trainer=ddp or optimizer=adamw")
        muon = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps, "weight_decay": self.weight_decay}
        rest = self._groups([(name, parameter) for name, parameter in parameters if name not in names], matrices)
        return MuonWithAdamW(hidden, rest, muon={"lr": self.lr, **muon}, adamw={"fused": fused, **self._adamw()})


def numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The recipe's numbers (NUMBERS) in each parameter group of an optimizer that has a schedule. `initial_lr` is the recipe's lr."""
    return [{name: group[name] for name in NUMBERS if name in group} for group in optimizer.param_groups]


def put_back(optimizer: Optimizer, schedule: LambdaLR, given: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Gives an optimizer whose state was restored from a checkpoint the numbers that it was built with, `given`, again. Returns those that
    differ, by option: (given, the checkpoint's)."""
    changed = {}
    for group, own in zip(optimizer.param_groups, given, strict=True):
        changed |= {name: (value, group.get(name)) for name, value in own.items() if value != group.get(name)}
        group.update(own)
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(schedule.last_epoch)
    return {"lr" if name == "initial_lr" else name: values for name, values in changed.items()}
