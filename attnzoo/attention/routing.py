"""What layers share whose queries choose blocks of keys: how evenly blocks are chosen, for the logs."""

import math

import torch
from torch import Tensor, nn

from attnzoo.attention.base import SequenceInfo

EVERY = 8  # queries of which one is looked at


class BlockUse(nn.Module):
    """Measures of the last training step, means over heads: `entropy` of how often each block of a sequence is chosen, 1 where all are
    chosen alike and 0 where it is always the same one; `coverage`, the share of the blocks that is chosen at all. NaN where there is no
    choice. A block counts by its place in its sequence."""

    def __init__(self):
        super().__init__()
        self.register_buffer("measured", torch.full((2,), math.nan), persistent=False)

    @torch.no_grad()
    def update(self, blocks: Tensor, block_size: int, seq: SequenceInfo) -> None:
        """blocks: int32 (batch, seqlen, choosers, slots) or (total, choosers, slots), none where below 0; the tokens are a whole pass."""
        dense = seq.cu_seqlens is None
        longest = blocks.shape[1] if dense else seq.max_seqlen if seq.max_seqlen is not None else blocks.shape[0]
        count = (longest - 1) // block_size  # the last block is never chosen
        if count < 2 or blocks.shape[-1] == 0:
            return
        seen = blocks.flatten(0, 1) if dense else blocks
        seen = seen[::EVERY]
        choosers = seen.shape[1]
        numbers = torch.arange(choosers, device=seen.device, dtype=torch.int32)[:, None] * count + seen
        numbers = numbers.where(seen >= 0, choosers * count).flatten().sort().values
        bounds = torch.searchsorted(numbers, torch.arange(choosers * count + 1, device=seen.device, dtype=torch.int32))
        counts = bounds.diff().view(choosers, count).float()
        shares = counts / counts.sum(1, keepdim=True)
        entropy = torch.special.entr(shares).sum(1) / math.log(count)
        self.measured.copy_(torch.stack((entropy.mean(), (counts > 0).float().mean())))

    def metrics(self) -> dict[str, float]:
        entropy, coverage = self.measured.tolist()
        return {"block_entropy": entropy, "block_coverage": coverage}
