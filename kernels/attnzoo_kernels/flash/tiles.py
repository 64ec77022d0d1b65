"""FlashAttention's tile tables: a pure function of widths, element size, architecture and mask kind."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    split: bool = True
    max_registers: int | None = None


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int, *, causal: bool, dropout: bool, softcap: bool) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return Tile(32, 32, 4, 1)
    if itemsize == 4:
        return Tile(64, 32, 4, 1) if width <= 128 else Tile(32, 16, 4, 1)
    if arch >= 90:
        if width <= 64:
            return Tile(64, 128, 4, 2)
        if width <= 128:
            return Tile(64, 64, 4, 3) if causal else Tile(128, 64, 4, 2, tma=True)
        return Tile(128, 64, 8, 2)
    if width <= 64:
        return Tile(128, 64, 4, 3)
    if width <= 128:
        return Tile(128, 64, 8, 2)
    return Tile(64, 32, 4, 2)


def dq_tile(arch: int, block_d: int, block_dv: int, itemsize: int, *, causal: bool, dropout: bool, softcap: bool) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return Tile(32, 32, 4, 1)
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if arch >= 90:
        if width <= 64:
            return Tile(128, 64, 4, 2)
        if width <= 128:
            return Tile(128, 64, 8, 2)
        return Tile(64, 64, 8, 1)
    if width <= 64:
        return Tile(64, 64, 4, 2)
    if width <= 128:
        return Tile(64, 64, 4, 1)
    return Tile(32, 32, 4, 1)


def dkdv_tile(arch: int, block_d: int, block_dv: int, itemsize: int, *, causal: bool, dropout: bool, softcap: bool) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return Tile(32, 32, 4, 1)
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if arch >= 90:
        if width <= 64:
            return Tile(64, 128, 4, 2)
        if width <= 128:
            return Tile(64, 128, 8, 2)
        return Tile(64, 64, 8, 1)
    if width <= 64:
        return Tile(64, 64, 4, 2)
    if width <= 128:
        return Tile(64, 64, 4, 1)
    return Tile(32, 32, 4, 1)
