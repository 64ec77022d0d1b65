"""Padding removal in plain PyTorch: written to be read, static shapes, differentiable twice. Arguments are checked by the caller."""

import torch
import torch.nn.functional as F
from torch import Tensor

Indices = tuple[Tensor, Tensor, Tensor, Tensor]


def mask_indices(attention_mask: Tensor, unused_mask: Tensor | None, max_tokens: int) -> Indices:
    """indices, cu_seqlens, seqused and the totals (tokens, longest row)."""
    real = attention_mask != 0
    kept = real if unused_mask is None else real | (unused_mask != 0)
    return _indices(kept, real.sum(1, dtype=torch.int32), max_tokens)


def length_indices(lengths: Tensor, seqlen: int, max_tokens: int) -> Indices:
    kept = torch.arange(seqlen, device=lengths.device) < lengths[:, None]
    return _indices(kept, lengths.to(torch.int32), max_tokens)


def _indices(kept: Tensor, seqused: Tensor, max_tokens: int) -> Indices:
    slots, lengths = kept.numel(), kept.sum(1, dtype=torch.int32)
    cu_seqlens = _cumulative(lengths)
    longest = lengths.amax() if kept.shape[0] else lengths.new_zeros(())
    kept = kept.flatten()
    # slots without a token go to an entry that is cut off
    entry = torch.where(kept, kept.cumsum(0) - 1, max_tokens).clamp(max=max_tokens)
    indices = torch.full((max_tokens + 1,), slots, device=kept.device)
    indices = indices.scatter(0, entry, torch.arange(slots, device=kept.device))[:max_tokens]
    return indices, cu_seqlens, seqused, torch.stack([cu_seqlens[-1], longest])


def document_lengths(lengths: Tensor, max_documents: int) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens over the nonzero lengths, padded with its last value; tokens of each row; totals (tokens, documents, longest document)."""
    flat = lengths.flatten().to(torch.int32)
    documents = (flat > 0).sum(dtype=torch.int32)
    entry = torch.where(flat > 0, (flat > 0).cumsum(0) - 1, max_documents).clamp(max=max_documents)
    cu_seqlens = _cumulative(flat.new_zeros(max_documents + 1).scatter(0, entry, flat)[:max_documents])
    longest = flat.amax() if flat.numel() else documents
    return cu_seqlens, lengths.sum(1, dtype=torch.int32), torch.stack([cu_seqlens[-1], documents, longest])


def position_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    token = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return torch.where(token < cu_seqlens[-1], token - cu_seqlens[sequence], 0).long()


def remove(x: Tensor, indices: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    padding = rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, padding])[indices]


def restore(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    if tokens.is_floating_point() and tokens.element_size() == 1:  # index_copy does not take float8
        return restore(tokens.view(torch.uint8), indices, batch, seqlen).view(tokens.dtype)
    rows = tokens.new_zeros(batch * seqlen + 1, *tokens.shape[1:])
    return rows.index_copy(0, indices, tokens)[:-1].unflatten(0, (batch, seqlen))


def add_norm(hidden: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, indices: Tensor, batch: int, seqlen: int,
             eps: float) -> Tensor:
    weight, bias = weight.to(hidden.dtype), bias.to(hidden.dtype)
    return restore(F.layer_norm(hidden + residual, weight.shape, weight, bias, eps), indices, batch, seqlen)


def _cumulative(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
