"""Padded batches: masks, inputs and counted bytes, shared by the tests and the benchmark."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Padded rows of `seqlen` slots and `width` channels, with left-aligned sequences of mean length `mean`. scattered: as many tokens lie
    in random slots instead."""

    batch: int
    seqlen: int
    width: int
    mean: int
    dtype: torch.dtype = torch.bfloat16
    scattered: bool = False

    def lengths(self) -> list[int]:
        """Lengths that are spread evenly around the mean as widely as the rows allow, in a fixed random order."""
        high = min(self.seqlen, 2 * self.mean)
        low = 2 * self.mean - high
        lengths = [round(low + (high - low) * i / max(self.batch - 1, 1)) for i in range(self.batch)]
        random.Random(0).shuffle(lengths)
        return lengths

    @property
    def tokens(self) -> int:
        return sum(self.lengths())

    def mask(self, device: torch.device | str = "cpu") -> Tensor:
        """(batch, seqlen) bool with `tokens` true entries."""
        mask = torch.arange(self.seqlen) < torch.tensor(self.lengths())[:, None]
        if self.scattered:
            order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(0))
            mask = mask.flatten()[order].view(mask.shape)
        return mask.to(device)

    def rows(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """(batch, seqlen, width), standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(self.batch, self.seqlen, self.width, generator=generator, device=device, dtype=self.dtype)

    @property
    def remove_bytes(self) -> int:
        """The least number of bytes read and written: each token is read and written once, and its index is read."""
        return self.tokens * (2 * self.width * self.dtype.itemsize + 8)

    @property
    def restore_bytes(self) -> int:
        """The least number of bytes read and written: tokens and indices are read, and all slots are written."""
        return (self.tokens + self.batch * self.seqlen) * self.width * self.dtype.itemsize + self.tokens * 8

    def __str__(self) -> str:
        pattern = "scattered" if self.scattered else "left"
        return f"b{self.batch}-n{self.seqlen}-w{self.width}-t{self.tokens}-{pattern}-{str(self.dtype).removeprefix('torch.')}"


CORRECTNESS: tuple[Case, ...] = (
    Case(3, 40, 64, 25, torch.float32),
    Case(3, 40, 96, 25, torch.float16, scattered=True),
    Case(2, 1100, 1, 700, torch.float32, scattered=True),  # more than one block of slots a row
    Case(4, 30, 111, 9, torch.float32),
    Case(2, 17, 1536, 17, torch.float16),  # all valid, more than one block of columns
    Case(1, 1, 8, 1, torch.float32),
)

# the sizes of BERT-base at 512 and of a longer model, and one far beyond any L2 cache
BENCHMARK: tuple[Case, ...] = (
    Case(64, 512, 768, 328),
    Case(32, 2048, 1024, 875),
    Case(64, 4096, 4096, 2048),
)
