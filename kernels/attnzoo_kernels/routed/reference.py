"""routed_attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import heads_first, padded, unpadded


def seen_blocks(blocks: Tensor, len_q: Tensor, len_k: Tensor, block_size: int, columns: int) -> Tensor:
    """Which keys lie in a block that a query reads, its own or a chosen one: bool (batch, choosers, rows, columns). No causal mask yet."""
    rows = blocks.shape[1]
    position = torch.arange(rows, device=blocks.device) + (len_k - len_q)[:, None]
    own = position.div(block_size, rounding_mode="floor")[:, None, :, None]
    key_block = torch.arange(columns, device=blocks.device) // block_size
    chosen = (blocks[..., None] == torch.arange(-(-columns // block_size), device=blocks.device)).any(-2).transpose(1, 2)
    return (key_block == own) | chosen[..., key_block]


@without_autocast
def routed_attention_reference(q, k, v, blocks, *, block_size, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q, blocks), (k, v), len_q, len_k = padded([q, blocks], [k, v], **lengths)
    (rows, heads), columns = q.shape[1:3], k.shape[1]
    q, k, v = heads_first(q, k, v)
    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = seen_blocks(blocks, len_q, len_k, block_size, columns).repeat_interleave(heads // blocks.shape[2], dim=1)
    weights, lse = softmax_over_seen(scores, seen & visible(len_q, len_k, rows, columns, (-1, 0)))
    out = (weights.to(v.dtype) @ v).transpose(1, 2)
    return unpadded(out, lse, lengths["cu_seqlens_q"], total_q)
