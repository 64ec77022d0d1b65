"""Forgetting attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import heads_first, padded, unpadded


@without_autocast
def forgetting_attention_reference(q, k, v, log_f, *, window_size, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q,), (k, v, log_f), len_q, len_k = padded([q], [k, v, log_f], **lengths)
    (rows, heads), columns = q.shape[1:3], k.shape[1]
    q, k, v = heads_first(q, k, v)

    # (batch, heads, 1 + seqlen_k), beginning with 0; float64, because c grows with the length, and scores get only differences of it
    c = F.pad(log_f.double().cumsum(1).transpose(1, 2), (1, 0))
    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    own = torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]  # the position of each query among the keys
    c_of_query = c.gather(2, (own + 1).clamp(0, columns)[:, None].expand(-1, heads, -1))
    scores = scores + (c_of_query[..., None] - c[:, :, None, 1:]).to(scores.dtype)
    weights, lse = softmax_over_seen(scores, visible(len_q, len_k, rows, columns, window_size))
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    return unpadded(out, lse, lengths["cu_seqlens_q"], total_q)
