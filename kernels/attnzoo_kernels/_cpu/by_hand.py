"""A tile by matrix products and one softmax over all parts: for float32 and wider, caps and dropout."""

import torch
from torch import Tensor

from attnzoo_kernels._cpu.part import Inputs, Rule


def forward(parts: list[Inputs], rule: Rule) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a row that sees no key gives zeros and -inf."""
    logits = torch.cat([_logits(part, rule)[0] for part in parts], dim=-1)
    lse = logits.logsumexp(-1)
    weights = _by_part(_softmax(logits, lse), parts)
    return sum(_dropped(own, part) @ _for_each_head(part.v, part) for own, part in zip(weights, parts, strict=True)), lse


def backward(parts: list[Inputs], rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
             lse: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of each part's q, k and v."""
    logits, slopes = zip(*(_logits(part, rule) for part in parts), strict=True)
    weights = _softmax(torch.cat(logits, dim=-1), lse)
    grads = torch.cat([_dropped(grad_out @ _for_each_head(part.v, part).mT, part) for part in parts], dim=-1)
    # of the weights themselves, not of the output: exactly 0 is left of a row that sees one key
    grads = weights * (grads - (weights * grads).sum(-1, keepdim=True))
    if grad_lse is not None:
        grads = grads + weights * grad_lse.unsqueeze(-1)
    gradients = []
    for part, slope, own, ds in zip(parts, slopes, _by_part(weights, parts), _by_part(grads * rule.softmax_scale, parts), strict=True):
        ds = ds if slope is None else ds * slope
        gradients.append((ds @ _for_each_head(part.k, part), _sum_of_heads(ds.mT @ part.q, part),
                          _sum_of_heads(_dropped(own, part).mT @ grad_out, part)))
    return gradients


def _logits(part: Inputs, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """And the slope of the cap."""
    logits, slope = (part.q @ _for_each_head(part.k, part).mT) * rule.softmax_scale, None
    if rule.softcap > 0:
        capped = torch.tanh(logits / rule.softcap)
        logits, slope = rule.softcap * capped, 1 - capped.square()
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


def _for_each_head(x: Tensor, part: Inputs) -> Tensor:
    return x.repeat_interleave(part.q.shape[1] // x.shape[1], dim=1)


def _sum_of_heads(x: Tensor, part: Inputs) -> Tensor:
    return x.unflatten(1, (part.k.shape[1], -1)).sum(2)
