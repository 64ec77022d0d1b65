"""Tiles of bias_gelu's kernels. docs/performance/padding.md has what was tried."""

from dataclasses import dataclass

import torch

BACKWARD_PROGRAMS = 1024  # at least, if there are enough tiles; each program adds up a part of the bias's gradient


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    num_warps: int = 4


def forward_tile(width: int) -> Tile:
    return Tile(8, min(512, 1 << (width - 1).bit_length()))


def backward_tile(width: int) -> Tile:
    if width % 1024 == 0:
        return Tile(2, 1024)  # the fastest of nine
    return Tile(8, min(256, 1 << (width - 1).bit_length()))


def backward_steps(rows: int, width: int, tile: Tile) -> int:
    """The number of tiles that a program goes over, one below the other."""
    tiles = -(-rows // tile.rows) * -(-width // tile.columns)
    return max(1, min(tiles // BACKWARD_PROGRAMS, 32))


def by_erf(dtype: torch.dtype) -> bool:
    """Whether Φ is computed by the error function, which float32 needs. For 16 bits, a formula with errors up to 1.5e-7 is as good and a
    fifth faster."""
    return dtype == torch.float32
