"""moba_blocks' contract in plain PyTorch: written to be read, quadratic in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.packing import padded, unpad_packed


@without_autocast
@torch.no_grad()
def moba_blocks_reference(q, k, *, block_size, slots, means=None, starts=None, **lengths) -> Tensor:
    """The blocks of each query, int32 (batch, seqlen_q, heads, slots) or (total, heads, slots), -1 for none. Packed input is padded, and
    the blocks are packed again. means, starts: as in `attnzoo_kernels.moba.cpu`. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q,), (k,), len_q, len_k = padded([q], [k], **lengths)
    rows, heads = q.shape[1:3]
    columns, kv_heads = k.shape[1:3]
    count = -(-columns // block_size)

    wide = torch.promote_types(q.dtype, torch.float32)
    # (batch, blocks, kv_heads, head_dim); the padding of the last block does not matter, because no query comes after that block
    if means is None:
        means = F.pad(k.to(wide), (0, 0, 0, 0, 0, count * block_size - columns)).unflatten(1, (count, block_size)).mean(2)
    else:
        at = starts[:, None] + torch.arange(count, device=q.device)
        means = means[at.clamp(max=means.shape[0] - 1)].to(wide)
    scores = torch.einsum("bihd,bnhd->bihn", q.to(wide), means.repeat_interleave(heads // kv_heads, dim=2))
    own = (torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]).div(block_size, rounding_mode="floor")
    earlier = torch.arange(count, device=q.device) < own[..., None]
    scores = scores.masked_fill(~earlier[:, :, None] | scores.isnan(), -torch.inf)
    # stable: of equal scores the earlier block comes first
    best, blocks = F.pad(scores, (0, slots), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
    blocks = torch.where(best > -torch.inf, blocks, -1)[..., :slots].int()
    cu_seqlens_q = lengths["cu_seqlens_q"]
    return blocks if cu_seqlens_q is None else unpad_packed(blocks, cu_seqlens_q, total_q, fill=-1)
