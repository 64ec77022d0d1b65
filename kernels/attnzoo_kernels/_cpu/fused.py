"""A tile by PyTorch's fused CPU kernels, part by part, joined by their log-sum-exps. Scores may be scaled and biased."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels._cpu.part import Inputs, Rule, finite

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(parts: list[Inputs], rule: Rule) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a row that sees no key gives zeros and -inf."""
    outs, lses = zip(*(_forward_of_part(part, rule) for part in parts), strict=True)
    if len(parts) == 1:
        return outs[0], lses[0]
    lse = torch.stack(lses).logsumexp(0)
    return sum(out * torch.exp(own - finite(lse)).unsqueeze(-1) for out, own in zip(outs, lses, strict=True)), lse


def backward(parts: list[Inputs], rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
             lse: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of each part's q, k and v. Weights are made of the log-sum-exp, whose rounding shows where logits are in the hundreds."""
    lse = finite(lse)
    return [_backward_of_part(part, rule, grad_out, grad_lse, out, lse) for part in parts]


def _forward_of_part(part: Inputs, rule: Rule) -> tuple[Tensor, Tensor]:
    q, k, v = _alike(*part[:3])
    out, lse = _forward(q, k, v, 0.0, part.triangle, attn_mask=part.bias, scale=rule.softmax_scale)
    if part.bias is not None:
        lse = lse.masked_fill(part.bias.amax(-1) == -torch.inf, -torch.inf)
    return out[..., : part.v.shape[-1]], lse


def _backward_of_part(part: Inputs, rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor,
                      lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    options = {"dropout_p": 0.0, "is_causal": part.triangle, "attn_mask": part.bias, "scale": rule.softmax_scale}
    q, k, v, out, grad_out = _alike(*part[:3], out, grad_out)
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, **options)
    if grad_lse is not None:
        # weights times k are an output, their transpose times q is a dV; added to the kernel's sum over a row it would lose bits
        of_k, own = _forward(q, k, k, **options)
        of_q = _backward(q * grad_lse.unsqueeze(-1), q, k, torch.zeros_like(k), torch.zeros_like(q), lse, **options)[2]
        dq = dq + of_k * (grad_lse * torch.exp(own - lse) * rule.softmax_scale).unsqueeze(-1)
        dk = dk + of_q * rule.softmax_scale
    head_dim, value_dim = part.q.shape[-1], part.v.shape[-1]
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As wide as the widest, as the kernels want it."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors)
