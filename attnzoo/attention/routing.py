"""For variants whose queries choose blocks: how many keys they read, and metrics of how evenly blocks are chosen."""

import math

import torch
from torch import Tensor

from attnzoo.attention.base import SequenceInfo

EVERY = 8  # only every 8th query is counted


def blocks_before(length: int, block_size: int, limit: int | None = None) -> int:
    """The number of blocks that end before a token's own block, at most `limit`, summed over the tokens of a sequence of this length."""
    whole, rest = divmod(length, block_size)
    limit = whole if limit is None else limit
    few = min(whole, limit + 1)  # blocks with at most `limit` blocks before them
    return block_size * (few * (few - 1) // 2 + (whole - few) * limit) + rest * min(whole, limit)


def pairs_of_blocks(length: int, block_size: int, top_k: int) -> int:
    """The number of pairs of a query and a key that the query reads, in one sequence of this length, if each query reads top_k blocks: its
    own up to its own key, and earlier ones as far as there are any."""
    whole, rest = divmod(length, block_size)
    own = whole * (block_size * (block_size + 1) // 2) + rest * (rest + 1) // 2
    return block_size * blocks_before(length, block_size, top_k - 1) + own


class BlockUse:
    """Metrics of the last training step, as means over the heads that choose. Blocks are identified by their index in their sequence.

    block_entropy: the normalised entropy of how often each block is chosen: 1 if all are chosen equally often, 0 if it is always the same
    one. block_coverage: the fraction of the blocks that is chosen at all. NaN where there is no choice. `keep` only stores the chosen
    blocks, and `metrics` does the computation.

    always_read: whether the first block and the one before a query's own are among the blocks of every query. These two do not count.
    """

    def __init__(self, *, always_read: bool = False):
        self.always_read = always_read
        self.blocks: Tensor | None = None  # (tokens, choosers, slots)
        self.count = 0  # blocks of the longest sequence that can be chosen, which its last one cannot

    def keep(self, blocks: Tensor, block_size: int, seq: SequenceInfo) -> None:
        """blocks: int32 (batch, seqlen, choosers, slots) or packed (total, choosers, slots), the chosen blocks of all tokens of a forward
        pass; numbers below 0 stand for no block."""
        dense = seq.cu_seqlens is None
        longest = blocks.shape[1] if dense else seq.max_seqlen if seq.max_seqlen is not None else blocks.shape[0]
        self.blocks, self.count = blocks.detach().flatten(0, -3), (longest - 1) // block_size

    def metrics(self) -> dict[str, float]:
        entropy = coverage = math.nan
        given = 2 if self.always_read else 0
        count = self.count - given
        if count >= 2 and self.blocks.shape[-1] > given:
            seen = self.blocks[::EVERY]
            if self.always_read:  # the last block of a query is the one before its own
                seen = seen.where(seen < seen.amax(-1, keepdim=True), 0) - 1
            choosers = seen.shape[1]
            numbers = torch.arange(choosers, device=seen.device)[:, None] * count + seen
            counts = numbers[seen >= 0].bincount(minlength=choosers * count).view(choosers, count).float()
            shares = counts / counts.sum(1, keepdim=True)
            entropy = torch.special.entr(shares).sum(1).div(math.log(count)).mean().item()
            coverage = (counts > 0).float().mean().item()
        return {"block_entropy": entropy, "block_coverage": coverage}
