"""The contracts of msa_blocks and of the indexer's loss in plain PyTorch: written to be read, quadratic in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import heads_first, padded, unpad_packed
from attnzoo_kernels.routed.reference import seen_blocks


@without_autocast
@torch.no_grad()
def msa_blocks_reference(q, k, *, block_size, slots, **lengths) -> Tensor:
    """The blocks of each query, int32 (batch, seqlen_q, heads, slots) or (total, heads, slots), -1 for none. Packed input is padded, and
    the blocks are packed again. Arguments are checked by the caller."""
    total_q = q.shape[0]
    (q,), (k,), len_q, len_k = padded([q], [k], **lengths)
    rows, columns = q.shape[1], k.shape[1]
    count = -(-columns // block_size)
    wide = torch.promote_types(q.dtype, torch.float32)
    # the padding of the last block does not matter, because no query comes after that block
    keys = F.pad(k.squeeze(2).to(wide), (0, 0, 0, count * block_size - columns)).unflatten(1, (count, block_size))
    scores = torch.einsum("bihd,bnjd->bihnj", q.to(wide), keys).amax(-1)
    own = (torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]).div(block_size, rounding_mode="floor")
    earlier = torch.arange(count, device=q.device) < own[..., None]
    scores = scores.masked_fill(~earlier[:, :, None] | scores.isnan(), -torch.inf)
    # stable: of equal scores the earlier block comes first
    best, blocks = F.pad(scores, (0, slots), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
    blocks = torch.where(best > -torch.inf, blocks, -1)[..., :slots].int()
    cu_seqlens_q = lengths["cu_seqlens_q"]
    return blocks if cu_seqlens_q is None else unpad_packed(blocks, cu_seqlens_q, total_q, fill=-1)


@without_autocast
def msa_loss_reference(q, k, index_q, index_k, blocks, *, block_size, softmax_scale, **lengths) -> Tensor:
    """-sum_j P_j log S_j, (batch, seqlen_q, kv_heads) or (total, kv_heads). blocks: None for all keys up to a query's own."""
    total_q, cu_seqlens_q = q.shape[0], lengths["cu_seqlens_q"]
    (q, index_q, *given), (k, index_k), len_q, len_k = padded(
        [q.detach(), index_q, *([] if blocks is None else [blocks])], [k.detach(), index_k], **lengths)
    (rows, heads), (columns, kv_heads) = q.shape[1:3], k.shape[1:3]
    seen = visible(len_q, len_k, rows, columns, (-1, 0))
    if given:
        seen = seen & seen_blocks(given[0], len_q, len_k, block_size, columns)
    seen = seen.expand(q.shape[0], kv_heads, rows, columns)

    def scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        queries, keys, _ = heads_first(queries, keys, keys)
        product = (queries @ keys.mT) * scale
        return product.to(torch.promote_types(product.dtype, torch.float32))

    weights, _ = softmax_over_seen(scores(q, k, softmax_scale), seen.repeat_interleave(heads // kv_heads, dim=1))
    weights = weights.unflatten(1, (kv_heads, -1)).mean(2)
    index = scores(index_q, index_k, index_q.shape[-1] ** -0.5)
    _, lse = softmax_over_seen(index, seen)
    some = seen.any(-1)
    surprise = torch.where(some, lse, 0.0)[..., None] - index.masked_fill(~seen, 0)
    loss = (weights * surprise.masked_fill(~seen, 0)).sum(-1).transpose(1, 2)
    return loss if cu_seqlens_q is None else unpad_packed(loss, cu_seqlens_q, total_q)
