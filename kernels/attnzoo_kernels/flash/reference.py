"""FlashAttention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.dropout import keep_mask
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed
from attnzoo_kernels.ranges import times_seen


def visible(len_q: Tensor, len_k: Tensor, rows: int, columns: int, window_size: tuple[int, int]) -> Tensor:
    """Which key each query sees: (batch, 1, rows, columns) bool, aligned to the bottom right of each (len_q, len_k)."""
    left, right = window_size
    i = torch.arange(rows, device=len_q.device).view(1, 1, -1, 1)
    j = torch.arange(columns, device=len_q.device).view(1, 1, 1, -1)
    len_q, len_k = len_q.view(-1, 1, 1, 1), len_k.view(-1, 1, 1, 1)
    diagonal = i + len_k - len_q
    seen = (i < len_q) & (j < len_k)
    if left >= 0:
        seen = seen & (j >= diagonal - left)
    if right >= 0:
        seen = seen & (j <= diagonal + right)
    return seen


def alibi_bias(slopes: Tensor, len_q: Tensor, len_k: Tensor, rows: int, columns: int) -> Tensor:
    """ALiBi (Press et al. 2022): -slope * |i + len_k - len_q - j|, (batch, heads, rows, columns)."""
    i = torch.arange(rows, device=slopes.device).view(1, 1, -1, 1)
    j = torch.arange(columns, device=slopes.device).view(1, 1, 1, -1)
    distance = (i + (len_k - len_q).view(-1, 1, 1, 1) - j).abs()
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


@without_autocast
def flash_attention_reference(q, k, v, *, window_size, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, rng_state,
                              cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ranges=None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if ranges is not None:
        times = times_seen(ranges, q.shape[0], k.shape[0], window_size)
        # tokens that are in no range may hold NaN, and 0 times NaN would be NaN
        idle_q, idle_k = ((times == 0).all(side)[:, None, None] for side in (1, 0))
        q, k, v = (x.masked_fill(idle, 0).unsqueeze(0) for x, idle in ((q, idle_q), (k, idle_k), (v, idle_k)))
    elif packed:
        q, k, v = pad_packed(q, cu_seqlens_q, max_seqlen_q), pad_packed(k, cu_seqlens_k, max_seqlen_k), pad_packed(v, cu_seqlens_k,
                                                                                                                   max_seqlen_k)
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))

    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes.to(scores.dtype), len_q, len_k, rows, columns)
    seen = visible(len_q, len_k, rows, columns, window_size) if ranges is None else times
    scores = scores.masked_fill(seen == 0, -torch.inf)

    # softmax by hand: a row that sees no key gives zeros, and no NaN in any gradient
    row_max = scores.amax(-1, keepdim=True) if columns else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    sink = None if sinks is None else sinks.to(scores.dtype).view(1, -1, 1, 1)
    if sink is not None:
        row_max = torch.maximum(row_max, sink)
    row_max = row_max.detach().masked_fill(row_max == -torch.inf, 0)
    weights = torch.exp(scores - row_max)
    if ranges is not None:
        weights = weights * seen  # a key that a query sees in two ranges counts twice
    row_sum = weights.sum(-1, keepdim=True)
    if sink is not None:
        row_sum = row_sum + torch.exp(sink - row_max)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1)
    lse = (row_max + row_sum.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    weights = weights / row_sum
    if dropout_p > 0:
        keep, keep_prob = keep_mask(rng_state, dropout_p, (batch, heads, rows, columns))
        weights = weights.masked_fill(~keep, 0) / keep_prob
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    if ranges is not None:
        return out[0], lse[0]
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        lse = unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total_q, fill=-torch.inf).transpose(0, 1)
    return out, lse
