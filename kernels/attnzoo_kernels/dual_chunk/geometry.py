"""Dual Chunk attention's chunks and largest positions, of the variants in use."""

from typing import NamedTuple

import torch
from torch import Tensor

VARIANTS = ("paper", "chunkllama")
STAGES = ("intra", "successive", "inter")


class Geometry(NamedTuple):
    """chunk: tokens of a chunk. top: largest position of a query in its successive stage. far: its position in the inter stage."""

    chunk: int
    top: int
    far: int

    @property
    def positions(self) -> int:
        """Rows of cos and sin that are read."""
        return max(self.far, min(2 * self.chunk - 1, self.top)) + 1


def geometry(chunk_size: int, local_size: int, variant: str) -> Geometry:
    for name, value, least in (("chunk_size", chunk_size, 1), ("local_size", local_size, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: must be an int of at least {least}, got {value!r}")
    if local_size >= chunk_size:
        raise ValueError(f"local_size: must be less than chunk_size={chunk_size}, got {local_size}")
    if variant not in VARIANTS:
        raise ValueError(f"variant: must be one of {', '.join(map(repr, VARIANTS))}, got {variant!r}")
    chunk = chunk_size - local_size
    if variant == "paper":
        return Geometry(chunk, chunk_size - 1, chunk_size - 1)
    return Geometry(chunk, chunk_size, min(2 * chunk - 1, chunk_size))


def stage_positions(position: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions in the intra, successive and inter stage of tokens at `position`."""
    inside = position % geometry.chunk
    return inside, (inside + geometry.chunk).clamp(max=geometry.top), torch.full_like(inside, geometry.far)


def stage_bits(stages: tuple[str, ...]) -> int:
    """Bit n for the stage between chunks n apart (2: two or more)."""
    if not isinstance(stages, (tuple, list)) or not stages or any(stage not in STAGES for stage in stages):
        raise ValueError(f"stages: must name one or more of {', '.join(map(repr, STAGES))}, got {stages!r}")
    return sum(1 << n for n, stage in enumerate(STAGES) if stage in stages)
