"""How e4m3 values lie in memory."""

import torch
from torch import Tensor

BLOCK = 128  # tokens that share a scale, where scales are by block
ROOM = 16  # there is room for a multiple of so many tokens: TMA reads values by 16 bytes, and keys by four


def quantized_like(x: Tensor, by_column: bool) -> Tensor:
    """Uninitialised e4m3 of x's shape (batch, seqlen, heads, width) in room for whole ROOM tokens; by_column: tokens follow each other."""
    batch, seqlen, heads, width = x.shape
    room = (seqlen + ROOM - 1) // ROOM * ROOM
    order = (batch, heads, width, room) if by_column else (batch, room, heads, width)
    out = torch.empty(order, dtype=torch.float8_e4m3fn, device=x.device)
    return (out.permute(0, 3, 1, 2) if by_column else out)[:, :seqlen]
