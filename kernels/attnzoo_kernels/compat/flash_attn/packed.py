"""Packed sequences as flash-attn describes them."""

import torch
from torch import Tensor


def sequence_of_tokens(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed token, int64 (total,), and its position there, int32 (total,). Tokens after the last sequence count as
    its continuation.

    cu_seqlens: int32 (sequences + 1,), at least one sequence. The host does not wait.
    """
    token = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, token - cu_seqlens[sequence]
