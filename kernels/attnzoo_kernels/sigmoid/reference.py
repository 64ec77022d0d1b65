"""Sigmoid attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import alibi_bias, visible
from attnzoo_kernels.packing import heads_first, padded, unpad_packed


@without_autocast
def sigmoid_attention_reference(q, k, v, *, window_size, softmax_scale, sigmoid_bias, alibi_slopes, **lengths) -> Tensor:
    """Output; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q,), (k, v), len_q, len_k = padded([q], [k, v], **lengths)
    rows, columns = q.shape[1], k.shape[1]
    q, k, v = heads_first(q, k, v)

    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(scores.dtype), len_q, len_k, rows, columns)
    if sigmoid_bias is None:
        scores = scores - len_k.clamp(min=1).to(scores.dtype).log().view(-1, 1, 1, 1)
    else:
        scores = scores + sigmoid_bias
    weights = scores.sigmoid().masked_fill(~visible(len_q, len_k, rows, columns, window_size), 0)
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    return out if lengths["cu_seqlens_q"] is None else unpad_packed(out, lengths["cu_seqlens_q"], total_q)
