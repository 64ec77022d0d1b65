"""The contract of attention with a bias by distance in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import heads_first, padded, unpadded


@without_autocast
def distance_bias_attention_reference(q, k, v, bias, *, origin, window_size, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q,), (k, v), len_q, len_k = padded([q], [k, v], **lengths)
    rows, columns = q.shape[1], k.shape[1]
    q, k, v = heads_first(q, k, v)

    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    own = torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]  # the position of each query among the keys
    distance = own[..., None] - torch.arange(columns, device=q.device)
    entry = (distance + origin).clamp(0, bias.shape[1] - 1)  # (batch, rows, columns)
    scores = scores + bias.to(scores.dtype)[:, entry].transpose(0, 1)
    weights, lse = softmax_over_seen(scores, visible(len_q, len_k, rows, columns, window_size))
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    return unpadded(out, lse, lengths["cu_seqlens_q"], total_q)
