"""Attention in two frames in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


@without_autocast
def two_frame_attention_reference(q, k, v, *, near_keys, far_keys, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                  max_seqlen_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller, who gives the
    frames of head h as heads 2 h (near) and 2 h + 1 (far) of q and k."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if packed:
        q = pad_packed(q, cu_seqlens_q, max_seqlen_q)
        k, v = (pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in (k, v))
    batch, rows = q.shape[:2]
    columns = k.shape[1]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    group = q.shape[2] // k.shape[2]
    q, q_far = q.transpose(1, 2)[:, ::2], q.transpose(1, 2)[:, 1::2]
    k, k_far, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k[:, :, ::2], k[:, :, 1::2], v))

    causal = visible(len_q, len_k, rows, columns, (-1, 0))
    near = visible(len_q, len_k, rows, columns, (near_keys - 1, 0))
    far = causal & ~near & (torch.arange(columns, device=q.device) < far_keys)
    scores = torch.where(near, q @ k.mT, q_far @ k_far.mT) * softmax_scale
    weights, lse = softmax_over_seen(scores.to(torch.promote_types(scores.dtype, torch.float32)), near | far)
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        lse = unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total_q, fill=-torch.inf).transpose(0, 1)
    return out, lse
