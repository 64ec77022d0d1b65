"""One part of a tile: the tensors that both ways to compute it, `fused` and `by_hand`, take."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Queries (batch, heads, rows, head_dim) and some of the keys that they see. There may be fewer key heads than query heads.

    bias: added to the scores, broadcasts to (batch, heads, rows, columns); -inf where a key is not seen; None: no bias.
    triangle: there are as many keys as queries, and each query sees the keys up to its own (fused only).
    keep: (bool (batch, heads, rows, columns): which weights are kept, the probability to be kept), or None (by hand only).
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
    """Scores are scaled and then capped by softcap (0 is off). bias: added to all scores, where each weight depends on its own score
    only."""

    softmax_scale: float
    softcap: float
    bias: float


class Gradients(NamedTuple):
    """Gradients of a part's q, k and v. rows and columns: with gates, the sums of the scores' gradients, (batch, heads, rows or columns).
    scores: from by_hand, the scores' gradients (batch, heads, rows, columns)."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    scores: Tensor | None = None


def finite(lse: Tensor) -> Tensor:
    """A log-sum-exp that may be subtracted: 0 in rows that see no key, whose weights are then zeros."""
    return lse.masked_fill(lse == -torch.inf, 0)


def for_each_head(x: Tensor, part: Inputs) -> Tensor:
    """Keys or values, repeated for each query head."""
    group = part.q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def sum_of_heads(x: Tensor, part: Inputs) -> Tensor:
    """The inverse for their gradients: sums over the query heads of a key head."""
    return x.unflatten(1, (part.k.shape[1], -1)).sum(2)
