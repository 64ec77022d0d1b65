"""Computes a tile by PyTorch's fused CPU kernels, part by part; the results are merged by their log-sum-exps. Scores may be scaled and
biased."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels._cpu.part import Gradients, Inputs, Rule, finite, for_each_head, sum_of_heads

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
             lse: Tensor) -> list[Gradients]:
    """The gradients of each part. Weights are computed from the log-sum-exp, whose rounding is visible if logits are in the hundreds."""
    lse = finite(lse)
    return [_backward_of_part(part, rule, grad_out, grad_lse, out, lse) for part in parts]


def _forward_of_part(part: Inputs, rule: Rule) -> tuple[Tensor, Tensor]:
    part, rule = _with_gates(part, rule)
    q, k, v = _alike(*part[:3])
    out, lse = _attend(q, k, v, part, rule)
    return out[..., : part.v.shape[-1]], lse


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Inputs, rule: Rule) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, 0.0, part.triangle, attn_mask=part.bias, scale=rule.softmax_scale)
    if part.bias is not None:  # PyTorch gives 0 in rows that see no key
        lse = lse.masked_fill(part.bias.amax(-1) == -torch.inf, -torch.inf)
    return out, lse


def _backward_of_part(part: Inputs, rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> Gradients:
    if part.gates is None:
        return _derive(part, rule, grad_out, grad_lse, out, lse)
    wide = _derive(*_with_gates(part, rule), grad_out, grad_lse, out, lse)
    width = part.q.shape[-1]
    return Gradients(wide.q[..., :width] * rule.softmax_scale, sum_of_heads(wide.k[..., :width], part), sum_of_heads(wide.v, part),
                     rows=wide.q[..., width + 1], columns=wide.k[..., width])


def _with_gates(part: Inputs, rule: Rule) -> tuple[Inputs, Rule]:
    """Turns gates into two more channels of queries and keys. The gradients of these channels are then the sums of the scores'
    gradients."""
    if part.gates is None:
        return part, rule
    q, (k, v) = part.q * rule.softmax_scale, (for_each_head(x, part) for x in (part.k, part.v))
    rows, columns = (x.to(q.dtype).unsqueeze(-1) for x in part.gates)
    q, k = torch.cat([q, torch.ones_like(rows), rows], dim=-1), torch.cat([k, -columns, torch.ones_like(columns)], dim=-1)
    return part._replace(q=q, k=k, v=v, gates=None), rule._replace(softmax_scale=1.0)


def _derive(part: Inputs, rule: Rule, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> Gradients:
    options = {"dropout_p": 0.0, "is_causal": part.triangle, "attn_mask": part.bias, "scale": rule.softmax_scale}
    q, k, v, out, grad_out = _alike(*part[:3], out, grad_out)
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, **options)
    if grad_lse is not None:
        # the LSE's share: weights times k are an output, their transpose times q is a dV; added to the kernel's delta it would lose bits
        of_k, own = _attend(q, k, k, part, rule)
        of_q = _backward(q * grad_lse.unsqueeze(-1), q, k, torch.zeros_like(k), torch.zeros_like(q), lse, **options)[2]
        dq = dq + of_k * (grad_lse * torch.exp(own - lse) * rule.softmax_scale).unsqueeze(-1)
        dk = dk + of_q * rule.softmax_scale
    head_dim, value_dim = part.q.shape[-1], part.v.shape[-1]
    return Gradients(dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim])


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, padded to the widest of them, as the kernels need it."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors)
