"""The learning rate between the warm-up and the end, computed by the schedules of transformers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from attnzoo.signatures import Share, check_options


@dataclass(frozen=True)
class Schedule:
    """The learning rate is constant after the warm-up and decays over the last `decay_share` of these steps.

    decay: the shape of the decay: half a cosine, linear, or one minus the square root of the elapsed share of the decay.
    """

    decay: Literal["cosine", "linear", "1-sqrt"]
    decay_share: Share

    def __post_init__(self):
        check_options("optimizer.schedule", type(self), vars(self))

    def factor(self, step: int, n_steps: int, final: float) -> float:
        """The learning rate in step `step` (counted from 0) of the `n_steps` after the warm-up, divided by the highest. final: the last
        step's quotient."""
        n_decay = round(self.decay_share * n_steps)
        return _stages(self.decay, n_steps - n_decay, n_decay, final)(step)


@functools.cache
def _stages(decay: str, n_stable: int, n_decay: int, final: float) -> Callable[[int], float]:
    import torch
    from transformers import get_wsd_schedule

    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # required by get_wsd_schedule
    schedule = get_wsd_schedule(unused, 0, n_decay, num_stable_steps=n_stable, decay_type=decay, min_lr_ratio=final)
    return schedule.lr_lambdas[0]
