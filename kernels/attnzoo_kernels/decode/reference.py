"""Decoding in plain PyTorch: written to be read."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import alibi_bias, visible


@without_autocast
def decode_attention_reference(q, k_cache, v_cache, *, cache_seqlens, block_table, window_size, softmax_scale, softcap, alibi_slopes,
                               sinks, k_scale=None, v_scale=None, segments=None) -> tuple[Tensor, Tensor]:
    """Output (batch, seqlen_q, heads, value_dim) and log-sum-exp (batch, heads, seqlen_q). Arguments are checked by the caller."""
    batch, rows, heads, _ = q.shape
    k_cache, v_cache = k_cache.to(q.dtype), v_cache.to(q.dtype)  # exact for 8-bit caches
    if block_table is not None:
        # each row's pages, one after the other; entries after a row's tokens may be anything
        k_cache, v_cache = (x[block_table.clamp(0, x.shape[0] - 1).long()].flatten(1, 2) for x in (k_cache, v_cache))
    columns, kv_heads = k_cache.shape[1:3]
    len_q, len_k = cache_seqlens.new_full((batch,), rows), cache_seqlens.clamp(max=columns)
    # what lies after a sequence may be anything, even NaN
    unread = (torch.arange(columns, device=q.device) >= len_k[:, None])[:, :, None, None]
    k, v = k_cache.masked_fill(unread, 0), v_cache.masked_fill(unread, 0)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if k_scale is not None:
        scores = scores * k_scale.to(scores.dtype).repeat_interleave(heads // kv_heads)[:, None, None]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(scores.dtype), len_q, len_k, rows, columns)
    if segments is None:
        seen = visible(len_q, len_k, rows, columns, window_size)
    else:
        key, (begin, end) = torch.arange(columns, device=q.device), segments[:, None, ..., None].unbind(3)
        seen = (begin <= key) & (key < torch.minimum(end, len_k[:, None, None, None]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if segments is not None:
        # one row of scores, over the keys as often as there are segments
        scores, v, columns, rows = scores.flatten(2).unsqueeze(2), v.repeat(1, 1, rows, 1), rows * columns, 1
    if sinks is not None:
        # a sink is a key without a value
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, rows, 1)], dim=-1)
    if scores.shape[-1] == 0:
        return q.new_zeros(batch, rows, heads, v.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0)[..., :columns]
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    if v_scale is not None:
        out = (out * v_scale.to(scores.dtype).repeat_interleave(heads // kv_heads)[:, None]).to(q.dtype)
    return out, lse
