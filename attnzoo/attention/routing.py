"""What layers share whose queries choose blocks of keys: how evenly blocks are chosen, for the logs."""

import math

import torch
from torch import Tensor

from attnzoo.attention.base import SequenceInfo

EVERY = 8  # queries of which one is looked at


class BlockUse:
    """Measures of the last training step, means over heads: `block_entropy` of how often each block of a sequence is chosen, 1 where all
    are chosen alike and 0 where it is always the same one; `block_coverage`, the share of the blocks that is chosen at all. NaN where there
    is no choice. A block counts by its place in its sequence. A step only keeps the blocks; `metrics` measures."""

    def __init__(self):
        self.blocks: Tensor | None = None  # (tokens, choosers, slots)
        self.count = 0  # of each sequence's blocks: the last one is never chosen

    def keep(self, blocks: Tensor, block_size: int, seq: SequenceInfo) -> None:
        """blocks: int32 (batch, seqlen, choosers, slots) or (total, choosers, slots), none where below 0; the tokens are a whole pass."""
        dense = seq.cu_seqlens is None
        longest = blocks.shape[1] if dense else seq.max_seqlen if seq.max_seqlen is not None else blocks.shape[0]
        self.blocks, self.count = blocks.detach().flatten(0, -3), (longest - 1) // block_size

    def metrics(self) -> dict[str, float]:
        entropy = coverage = math.nan
        count = self.count
        if count >= 2 and self.blocks.shape[-1] > 0:
            seen = self.blocks[::EVERY]
            choosers = seen.shape[1]
            numbers = torch.arange(choosers, device=seen.device)[:, None] * count + seen
            counts = numbers[seen >= 0].bincount(minlength=choosers * count).view(choosers, count).float()
            shares = counts / counts.sum(1, keepdim=True)
            entropy = torch.special.entr(shares).sum(1).div(math.log(count)).mean().item()
            coverage = (counts > 0).float().mean().item()
        return {"block_entropy": entropy, "block_coverage": coverage}
