"""What is computed of one part of a tile: its tensors, which the two ways of computing it, `fused` and `by_hand`, take alike."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Queries (batch, heads, rows, head_dim) and some of the keys that they see; key heads may be fewer.

    bias: is added to the scores and broadcasts to (batch, heads, rows, columns); -inf where a key is not seen, None for none.
    triangle: a query sees the keys up to its own, of as many as there are queries (fused only).
    keep: bool (batch, heads, rows, columns), which weights stay, and the probability to stay, or None (by hand only).
    gates: float64 (batch, heads, rows) and (batch, heads, columns), whose differences are added to the scores, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    triangle: bool
    keep: tuple[Tensor, float] | None
    gates: tuple[Tensor, Tensor] | None


class Rule(NamedTuple):
    """Scores are scaled, then capped (0 is off). bias: is added to all of them where each makes its weight alone."""

    softmax_scale: float
    softcap: float
    bias: float


class Gradients(NamedTuple):
    """Of a part's q, k and v. rows and columns: with gates the sums of the scores' gradients, (batch, heads, rows or columns). scores:
    by hand, (batch, heads, rows, columns)."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    scores: Tensor | None = None


def finite(lse: Tensor) -> Tensor:
    """A log-sum-exp to subtract: 0 in rows that see no key, whose weights are then zeros."""
    return lse.masked_fill(lse == -torch.inf, 0)


def for_each_head(x: Tensor, part: Inputs) -> Tensor:
    """Keys or values of the query heads."""
    group = part.q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def sum_of_heads(x: Tensor, part: Inputs) -> Tensor:
    """The way back for their gradients."""
    return x.unflatten(1, (part.k.shape[1], -1)).sum(2)
