"""How e4m3 values lie in memory."""

import torch
from torch import Tensor

BLOCK = 128  # tokens that share a scale, where scales are by block
SMALLEST = 2.0**-117  # numbers below this count as zeros, because their scale would be denormal, and its inverse infinite
ROOM = 16  # there is room for a multiple of this many tokens, because TMA reads values by 16 bytes, and keys by four


def quantized_like(x: Tensor, by_column: bool) -> Tensor:
    """An uninitialised e4m3 tensor of x's shape (batch, seqlen, heads, width), with room for a multiple of ROOM tokens. by_column: tokens
    follow each other in memory."""
    batch, seqlen, heads, width = x.shape
    room = (seqlen + ROOM - 1) // ROOM * ROOM
    order = (batch, heads, width, room) if by_column else (batch, room, heads, width)
    out = torch.empty(order, dtype=torch.float8_e4m3fn, device=x.device)
    return (out.permute(0, 3, 1, 2) if by_column else out)[:, :seqlen]
