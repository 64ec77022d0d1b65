"""Where compressed keys begin and which of them a query sees. Integers on the device; nothing waits for it."""

import torch
from torch import Tensor


def compressed_bounds(cu_seqlens_k: Tensor, size: int, stride: int) -> Tensor:
    """cu_seqlens of the compressed keys, int32: each sequence has as many as lie completely in it. total_k // stride bounds their
    number."""
    counts = ((cu_seqlens_k.diff() - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


def seen_by(position: Tensor, size: int, stride: int) -> Tensor:
    """How many compressed keys end at or before `position`."""
    return ((position + 1 - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
