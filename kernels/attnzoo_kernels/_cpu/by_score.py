"""Computes a tile of sigmoid weights, each from its own score only. The parts' outputs add up, and a row has no statistics."""

import torch
from torch import Tensor

from attnzoo_kernels._cpu.part import Gradients, Inputs, Rule, for_each_head, sum_of_heads


def forward(parts: list[Inputs], rule: Rule) -> tuple[Tensor, Tensor]:
    """Output; the log-sum-exp does not exist and is -inf."""
    out = sum(_weights(part, rule) @ for_each_head(part.v, part) for part in parts)
    return out, torch.full_like(out[..., 0], -torch.inf)


def backward(parts: list[Inputs], rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> list[Gradients]:
    """The gradients of each part."""
    gradients = []
    for part in parts:
        weights = _weights(part, rule)
        dv = sum_of_heads(weights.mT @ grad_out, part)
        ds = torch.ops.aten.sigmoid_backward(grad_out @ for_each_head(part.v, part).mT, weights)
        gradients.append(Gradients(ds @ for_each_head(part.k, part) * rule.softmax_scale,
                                   sum_of_heads(ds.mT @ part.q, part) * rule.softmax_scale, dv))
    return gradients


def _weights(part: Inputs, rule: Rule) -> Tensor:
    q, k = part.q.flatten(0, 1), for_each_head(part.k, part).flatten(0, 1)
    scores = torch.baddbmm(q.new_full((1, 1, 1), rule.bias), q, k.mT, alpha=rule.softmax_scale).unflatten(0, part.q.shape[:2])
    return (scores if part.bias is None else scores.add_(part.bias)).sigmoid_()
