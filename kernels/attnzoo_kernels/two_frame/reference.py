"""Attention in two frames in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import heads_first, padded, unpadded


@without_autocast
def two_frame_attention_reference(q, k, v, *, near_keys, far_keys, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller.

    Heads 2 h and 2 h + 1 of q and k are the near and the far frame of head h.
    """
    total_q = q.shape[0]
    (q,), (k, v), len_q, len_k = padded([q], [k, v], **lengths)
    rows, columns = q.shape[1], k.shape[1]
    q_far, k_far, _ = heads_first(q[:, :, 1::2], k[:, :, 1::2], v)
    q, k, v = heads_first(q[:, :, ::2], k[:, :, ::2], v)

    causal = visible(len_q, len_k, rows, columns, (-1, 0))
    near = visible(len_q, len_k, rows, columns, (near_keys - 1, 0))
    far = causal & ~near & (torch.arange(columns, device=q.device) < far_keys)
    scores = torch.where(near, q @ k.mT, q_far @ k_far.mT) * softmax_scale
    weights, lse = softmax_over_seen(scores.to(torch.promote_types(scores.dtype, torch.float32)), near | far)
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    return unpadded(out, lse, lengths["cu_seqlens_q"], total_q)
