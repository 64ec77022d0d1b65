"""Sigmoid attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import alibi_bias, visible
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


@without_autocast
def sigmoid_attention_reference(q, k, v, *, window_size, softmax_scale, sigmoid_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
                                max_seqlen_q, max_seqlen_k) -> Tensor:
    """Packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if packed:
        q = pad_packed(q, cu_seqlens_q, max_seqlen_q)
        k, v = (pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in (k, v))
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))

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
    return unpad_packed(out, cu_seqlens_q, total_q) if packed else out
