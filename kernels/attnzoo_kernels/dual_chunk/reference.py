"""Dual Chunk attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.dual_chunk.geometry import stage_positions
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, rows, heads, width) with its first 2 * pairs channels rotated in float32 or float64. cos, sin: (batch, rows, pairs)."""
    pairs = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype).unsqueeze(-2) for table in (cos, sin))
    turned, rest = x[..., : 2 * pairs].to(dtype), x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


@without_autocast
def dual_chunk_attention_reference(q, k, v, *, cos, sin, geometry, stages, causal, rope_interleaved, logit_multiplier, softmax_scale,
                                   cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if logit_multiplier is None:
        logit_multiplier = torch.ones(q.shape[: q.dim() - 2], device=q.device)
    if packed:
        q, logit_multiplier = (pad_packed(x, cu_seqlens_q, max_seqlen_q) for x in (q, logit_multiplier))
        k, v = (pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in (k, v))
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)

    # positions of queries (batch, rows, 1) and keys (1, 1, columns), and by how many chunks they differ
    i = (torch.arange(rows, device=q.device) + (len_k - len_q)[:, None])[..., None]
    j = torch.arange(columns, device=q.device).expand(1, 1, -1)
    apart = i.div(geometry.chunk, rounding_mode="floor") - j.div(geometry.chunk, rounding_mode="floor")
    seen = (torch.arange(rows, device=q.device) < len_q[:, None])[..., None] & (j < len_k[:, None, None])
    seen = seen & torch.stack([apart.abs().clamp(max=2) == n for n in range(3) if stages >> n & 1]).any(0)
    if causal:
        seen = seen & (j <= i)

    # (batch, heads, seqlen, width) at each stage's position; a key head serves a contiguous group of query heads
    def rotated(x: Tensor, position: Tensor) -> list[Tensor]:
        return [rotate(x, cos[p], sin[p], rope_interleaved).transpose(1, 2) for p in stage_positions(position, geometry)]

    queries, keys = rotated(q, i.squeeze(-1)), rotated(k, j.squeeze(1))
    keys = [x.repeat_interleave(heads // kv_heads, dim=1) for x in keys]
    v = v.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1)

    # of a query and a key, the later one has the position of the stage, and the earlier one its position in its chunk
    scores = queries[0] @ keys[0].mT
    for n in (1, 2):
        distance = apart.clamp(-2, 2).unsqueeze(1)
        scores = torch.where(distance == n, queries[n] @ keys[0].mT, scores)
        if not causal:
            scores = torch.where(distance == -n, queries[0] @ keys[n].mT, scores)
    scores = (scores * softmax_scale).to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * logit_multiplier.to(scores.dtype).expand(batch, rows)[:, None, :, None]
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)

    # softmax by hand: a row that sees no key gives zeros, and no NaN in any gradient
    top = scores.amax(-1, keepdim=True) if columns else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = top.detach().masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    norm = weights.sum(-1, keepdim=True)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)
    lse = (top + norm.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    out = ((weights / norm).to(v.dtype) @ v).transpose(1, 2)
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        lse = unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total_q, fill=-torch.inf).transpose(0, 1)
    return out, lse
