"""Differential attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


def softmax_over_seen(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights and log-sum-exp; a row that sees no key gives zeros and -inf, and no NaN in any gradient."""
    scores = scores.masked_fill(~seen, -torch.inf)
    row_max = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    row_max = row_max.detach().masked_fill(row_max == -torch.inf, 0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1)
    return weights / row_sum, (row_max + row_sum.log()).masked_fill(empty, -torch.inf).squeeze(-1)


@without_autocast
def differential_attention_reference(q1, q2, k1, k2, v, lam, *, window_size, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                     max_seqlen_k) -> tuple[Tensor, Tensor]:
    """Output and both log-sum-exps; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q1.shape[0]
    k2 = k1 if k2 is None else k2
    if packed:
        q1, q2 = (pad_packed(x, cu_seqlens_q, max_seqlen_q) for x in (q1, q2))
        k1, k2, v = (pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in (k1, k2, v))
        lam = pad_packed(lam, cu_seqlens_q, max_seqlen_q) if lam.dim() == 2 else lam
    batch, rows, heads, _ = q1.shape
    columns, kv_heads = k1.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q1.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q1.device)
    seen = visible(len_q, len_k, rows, columns, window_size)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q1, q2 = (x.transpose(1, 2) for x in (q1, q2))
    k1, k2, v = (x.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1) for x in (k1, k2, v))
    # (), (heads, 1, 1) or (batch, heads, seqlen, 1)
    lam = lam.view(-1, 1, 1) if lam.dim() == 1 else lam.transpose(1, 2).unsqueeze(-1) if lam.dim() == 3 else lam

    scores = [(q @ k.mT) * softmax_scale for q, k in ((q1, k1), (q2, k2))]
    (first, lse1), (second, lse2) = (softmax_over_seen(s.to(torch.promote_types(s.dtype, torch.float32)), seen) for s in scores)
    out = ((first - lam * second).to(v.dtype) @ v).transpose(1, 2)
    lse = torch.stack((lse1, lse2))
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        # (2, sequences, heads, rows) to (2, heads, total)
        lse = unpad_packed(lse.permute(1, 3, 0, 2), cu_seqlens_q, total_q, fill=-torch.inf).permute(1, 2, 0)
    return out, lse.detach()
