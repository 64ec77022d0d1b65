"""What is computed of one part of a tile: its tensors, which the two ways of computing it, `fused` and `by_hand`, take alike."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Queries (batch, heads, rows, head_dim) and some of the keys that they see; key heads may be fewer.

    bias: is added to the scores and broadcasts to (batch, heads, rows, columns); -inf where a key is not seen, None for none.
    triangle: a query sees the keys up to its own, of as many as there are queries (fused only).
    keep: bool (batch, heads, rows, columns), which weights stay, and the probability to stay, or None (by hand only).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    triangle: bool
    keep: tuple[Tensor, float] | None


class Rule(NamedTuple):
    """Scores are scaled, then capped (0 is off)."""

    softmax_scale: float
    softcap: float


def finite(lse: Tensor) -> Tensor:
    """A log-sum-exp to subtract: 0 in rows that see no key, whose weights are then zeros."""
    return lse.masked_fill(lse == -torch.inf, 0)
