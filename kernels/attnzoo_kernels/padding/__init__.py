"""Padding removal: from padded rows to packed tokens and back, with flash-attn's names, order and meaning."""

import torch
from torch import Tensor


def unpad_input(hidden: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of `hidden`.

    hidden: (batch, seqlen, ...). attention_mask: (batch, seqlen), bool or int, nonzero where a token is real (any pattern).
    unused_mask: (batch, seqlen), nonzero where a slot is kept although it is not used.

    Returns (tokens (total, ...), indices (total,) int64 into the flattened rows, cu_seqlens (batch + 1,) int32, max_seqlen int,
    seqused (batch,) int32: the real tokens of each row). Waits once for the device, because `total` is a shape.
    """
    if hidden.dim() < 2:
        raise ValueError(f"hidden: must be (batch, seqlen, ...), got shape {tuple(hidden.shape)}")
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden.shape[:2]:
            raise ValueError(f"{name}: must have shape {tuple(hidden.shape[:2])} like hidden's first two, got {tuple(mask.shape)}")
    real = attention_mask != 0
    kept = real if unused_mask is None else real | (unused_mask != 0)
    lengths = kept.sum(dim=1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return hidden.flatten(0, 1)[indices], indices, cu_seqlens, max_seqlen, real.sum(dim=1, dtype=torch.int32)


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens (total, ...) back at `indices` (total,) of rows (batch, seqlen, ...); zeros everywhere else."""
    if hidden.shape[0] != indices.shape[0]:
        raise ValueError(f"indices: must hold one entry for each of hidden's {hidden.shape[0]} tokens, got {indices.shape[0]}")
    rows = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    return rows.index_copy(0, indices, hidden).unflatten(0, (batch, seqlen))
