"""Computes a tile by matrix products and one softmax over all of its parts: for float32 and wider, softcap and dropout."""

import torch
from torch import Tensor

from attnzoo_kernels._cpu.part import Gradients, Inputs, Rule, for_each_head, sum_of_heads


def forward(parts: list[Inputs], rule: Rule) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a row that sees no key gives zeros and -inf."""
    logits = torch.cat([_logits(part, rule)[0] for part in parts], dim=-1)
    lse = logits.logsumexp(-1)
    weights = _by_part(_softmax(logits, lse), parts)
    return sum(_dropped(own, part) @ for_each_head(part.v, part) for own, part in zip(weights, parts, strict=True)), lse


def backward(parts: list[Inputs], rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
             lse: Tensor) -> list[Gradients]:
    """The gradients of each part."""
    logits, slopes = zip(*(_logits(part, rule) for part in parts), strict=True)
    weights = _softmax(torch.cat(logits, dim=-1), lse)
    grads = torch.cat([_dropped(grad_out @ for_each_head(part.v, part).mT, part) for part in parts], dim=-1)
    # delta is computed from the weights, not from the output, so that a row that sees one key has gradients of exactly 0
    grads = weights * (grads - (weights * grads).sum(-1, keepdim=True))
    if grad_lse is not None:
        grads = grads + weights * grad_lse.unsqueeze(-1)
    gradients = []
    for part, slope, own, dlogits in zip(parts, slopes, _by_part(weights, parts), _by_part(grads, parts), strict=True):
        ds = dlogits * rule.softmax_scale if slope is None else dlogits * rule.softmax_scale * slope
        sums = () if part.gates is None else tuple(dlogits.sum(axis, dtype=torch.float64) for axis in (-1, -2))
        gradients.append(Gradients(ds @ for_each_head(part.k, part), sum_of_heads(ds.mT @ part.q, part),
                                   sum_of_heads(_dropped(own, part).mT @ grad_out, part), *sums, scores=dlogits))
    return gradients


def _logits(part: Inputs, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """(logits, the softcap's derivative or None)."""
    logits, slope = (part.q @ for_each_head(part.k, part).mT) * rule.softmax_scale, None
    if rule.softcap > 0:
        capped = torch.tanh(logits / rule.softcap)
        logits, slope = rule.softcap * capped, 1 - capped.square()
    if part.gates is not None:
        rows, columns = part.gates
        logits = logits + (rows.unsqueeze(-1) - columns.unsqueeze(-2)).to(logits.dtype)
    return logits if part.bias is None else logits + part.bias, slope


def _softmax(logits: Tensor, lse: Tensor) -> Tensor:
    return logits.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0)


def _by_part(weights: Tensor, parts: list[Inputs]) -> tuple[Tensor, ...]:
    return weights.split([part.k.shape[-2] for part in parts], dim=-1)


def _dropped(weights: Tensor, part: Inputs) -> Tensor:
    if part.keep is None:
        return weights
    keep, probability = part.keep
    return weights.masked_fill(~keep, 0) / probability
