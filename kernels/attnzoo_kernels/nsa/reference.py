"""nsa_attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.nsa.bounds import compressed_bounds
from attnzoo_kernels.packing import heads_first, pad_packed, padded, unpad_packed
from attnzoo_kernels.routed.reference import seen_blocks


def overlaps(compressed: int, count: int, size: int, stride: int, block_size: int, device: torch.device) -> Tensor:
    """The overlap of each compressed key with each block, counted in strides: (compressed, count)."""
    start = torch.arange(compressed, device=device)[:, None] * stride
    block = torch.arange(count, device=device) * block_size
    shared = torch.minimum(start + size, block + block_size) - torch.maximum(start, block)
    return shared.clamp(min=0) / stride


@torch.no_grad()
def best_blocks(weights: Tensor, own: Tensor, kv_heads: int, count: int, size: int, stride: int, block_size: int, slots: int) -> Tensor:
    """The blocks with the highest scores for each query, int32 (batch, rows, kv_heads, slots), -1 for none.

    weights: (batch, heads, rows, compressed), attention weights of the compressed keys. own: (batch, rows), the block of each query.
    """
    scores = block_scores(weights, own, kv_heads, count, size, stride, block_size)
    # stable: of equal scores the earlier block comes first
    best, blocks = F.pad(scores, (0, slots), value=-torch.inf).sort(dim=-1, descending=True, stable=True)
    return torch.where(best > -torch.inf, blocks, -1)[..., :slots].int()


def block_scores(weights: Tensor, own: Tensor, kv_heads: int, count: int, size: int, stride: int, block_size: int) -> Tensor:
    """Scores of `count` blocks for each query, (batch, rows, kv_heads, count). The first block and the one before the query's own have
    +inf. The query's own block, which is read in any case, later ones and those with a NaN score have -inf."""
    shared = overlaps(weights.shape[-1], count, size, stride, block_size, weights.device).to(weights.dtype)
    scores = (weights @ shared).unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)
    block, own = torch.arange(count, device=weights.device), own[:, :, None, None]
    scores = scores.masked_fill((block == 0) | (block == own - 1), torch.inf)
    return scores.masked_fill((block >= own) | scores.isnan(), -torch.inf)


@without_autocast
def nsa_attention_reference(q, k, v, k_cmp, v_cmp, gates, blocks, *, k_window, v_window, compress_size, compress_stride, block_size,
                            block_count, window, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and blocks; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    total_q, cu_seqlens_q = q.shape[0], lengths["cu_seqlens_q"]
    (q, gates, *given), (k, v, k_window, v_window), len_q, len_k = padded(
        [q, gates, *([] if blocks is None else [blocks])], [k, v, k_window, v_window], **lengths)
    if cu_seqlens_q is not None:
        cu_seqlens_c = compressed_bounds(lengths["cu_seqlens_k"], compress_size, compress_stride)
        longest = max(0, (k.shape[1] - compress_size) // compress_stride + 1)
        k_cmp, v_cmp = (pad_packed(x, cu_seqlens_c, longest) for x in (k_cmp, v_cmp))
    rows, heads = q.shape[1:3]
    columns, kv_heads = k.shape[1:3]
    position = torch.arange(rows, device=q.device) + (len_k - len_q)[:, None]

    def attend(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys, values = heads_first(q, keys, values)
        scores = (queries @ keys.mT) * softmax_scale
        weights, _ = softmax_over_seen(scores.to(torch.promote_types(scores.dtype, torch.float32)), seen)
        return (weights.to(values.dtype) @ values).transpose(1, 2), weights

    last_token = torch.arange(k_cmp.shape[1], device=q.device) * compress_stride + compress_size - 1
    compressed, weights = attend(k_cmp, v_cmp, (last_token <= position[..., None])[:, None])
    if given:
        blocks = given[0]
    else:
        blocks = best_blocks(weights, position.div(block_size, rounding_mode="floor"), kv_heads, -(-columns // block_size), compress_size,
                             compress_stride, block_size, block_count - 1)
    chosen = seen_blocks(blocks, len_q, len_k, block_size, columns).repeat_interleave(heads // blocks.shape[2], dim=1)
    selected, _ = attend(k, v, chosen & visible(len_q, len_k, rows, columns, (-1, 0)))
    near, _ = attend(k_window, v_window, visible(len_q, len_k, rows, columns, (window - 1, 0)))
    out = gates[..., :1] * compressed + gates[..., 1:2] * selected + gates[..., 2:] * near
    if cu_seqlens_q is not None:
        out, blocks = unpad_packed(out, cu_seqlens_q, total_q), unpad_packed(blocks, cu_seqlens_q, total_q, fill=-1)
    return out, blocks
