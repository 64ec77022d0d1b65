"""routed_attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


def seen_blocks(blocks: Tensor, len_q: Tensor, len_k: Tensor, block_size: int, columns: int) -> Tensor:
    """Which keys lie in a block that a query reads, its own or a chosen one: bool (batch, choosers, rows, columns), not causal yet."""
    rows = blocks.shape[1]
    position = torch.arange(rows, device=blocks.device) + (len_k - len_q)[:, None]
    own = position.div(block_size, rounding_mode="floor")[:, None, :, None]
    key_block = torch.arange(columns, device=blocks.device) // block_size
    chosen = (blocks[..., None] == torch.arange(-(-columns // block_size), device=blocks.device)).any(-2).transpose(1, 2)
    return (key_block == own) | chosen[..., key_block]


@without_autocast
def routed_attention_reference(q, k, v, blocks, *, block_size, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                               max_seqlen_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if packed:
        q, blocks = (pad_packed(x, cu_seqlens_q, max_seqlen_q) for x in (q, blocks))
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
    seen = seen_blocks(blocks, len_q, len_k, block_size, columns).repeat_interleave(heads // blocks.shape[2], dim=1)
    weights, lse = softmax_over_seen(scores, seen & visible(len_q, len_k, rows, columns, (-1, 0)))
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        lse = unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total_q, fill=-torch.inf).transpose(0, 1)
    return out, lse
