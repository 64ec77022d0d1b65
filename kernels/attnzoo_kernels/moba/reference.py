"""moba_blocks' contract in plain PyTorch: written to be read, quadratic in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


@without_autocast
@torch.no_grad()
def moba_blocks_reference(q, k, *, block_size, slots, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Tensor:
    """Packed input is padded, looked at and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if packed:
        q, k = pad_packed(q, cu_seqlens_q, max_seqlen_q), pad_packed(k, cu_seqlens_k, max_seqlen_k)
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)
    count = -(-columns // block_size)

    wide = torch.promote_types(q.dtype, torch.float32)
    # (batch, blocks, kv_heads, head_dim); the padding of a last block does not matter: no query comes behind it
    means = F.pad(k.to(wide), (0, 0, 0, 0, 0, count * block_size - columns)).unflatten(1, (count, block_size)).mean(2)
    scores = torch.einsum("bihd,bnhd->bihn", q.to(wide), means.repeat_interleave(heads // kv_heads, dim=2))
    own = (torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]).div(block_size, rounding_mode="floor")
    earlier = torch.arange(count, device=q.device) < own[..., None]
    scores = scores.masked_fill(~earlier[:, :, None] | scores.isnan(), -torch.inf)
    # stable: of equal scores the earlier block comes first
    best, blocks = F.pad(scores, (0, slots), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
    blocks = torch.where(best > -torch.inf, blocks, -1)[..., :slots].int()
    return unpad_packed(blocks, cu_seqlens_q, total_q, fill=-1) if packed else blocks
