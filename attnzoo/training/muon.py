"""Muon and AdamW as one optimizer, because Lightning trains with one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for `hidden` matrices and torch.optim.AdamW for the groups of `rest`. The first group is Muon's.

    muon, adamw: keyword arguments of these. Gradients, learning rates and states are as with one optimizer; no step makes the host wait.
    """

    def __init__(self, hidden: Sequence[nn.Parameter], rest: Sequence[dict[str, Any]], *, muon: dict[str, Any], adamw: dict[str, Any]):
        self.parts = [Muon(hidden, adjust_lr_fn="match_rms_adamw", **muon), AdamW(rest, **adamw)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        self.register_load_state_dict_post_hook(lambda _: self._share())

    def _share(self) -> None:
        """Both parts work on the groups and the state of this optimizer, which schedules change and checkpoints replace."""
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            part.param_groups, part.state = groups, self.state

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Calls closure, which computes the gradients, and returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
