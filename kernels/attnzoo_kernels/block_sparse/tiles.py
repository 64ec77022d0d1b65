"""The block-sparse kernels' tile tables: pure functions of widths, element size, architecture and the block on
the mainloop's side (`block`: of keys for forward and dQ, of queries for dK/dV).

Hopper's entries at widths up to 128 were measured on an H200 over random causal blocks and windows (docs/performance/block_sparse.md);
the others are FlashAttention's, or the largest that compile without spills. If blocks are small, a tile has as few of
them as is efficient, because it is computed whole if any of them is kept. A tile holds at most 32 blocks of 16 x 16 tokens
(`lists.MAX_PARTS`), so 8192 elements.
"""

from dataclasses import dataclass

from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels.flash.tiles import INTERPRETER, Tile, hopper_like


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int, block: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return Tile(32, 32, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if hopper_like(arch):
        if width <= 128 and block <= 32:
            return Tile(64, 32, 4, 4, tma=True, q_registers=True)
        if width <= 128:
            return Tile(64, 64, 4, 3, tma=True, q_registers=True)
        return Tile(128, 64, 8, 2, tma=True, q_registers=True)
    if width <= 64:
        return Tile(64, 64, 4, 3)
    if width <= 128:
        return Tile(128, 32, 8, 3)
    return Tile(64, 64, 8, 1)


def dq_tile(arch: int, block_d: int, block_dv: int, itemsize: int, block: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 16, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if hopper_like(arch):
        if width <= 128 and block <= 32:
            return Tile(64, 32, 4, 3, tma=True)
        if width <= 64:
            return Tile(64, 64, 4, 4, tma=True)
        if width <= 128:
            return Tile(64, 64, 4, 3, tma=True)
        return Tile(64, 64, 8, 2, tma=True)
    if width <= 64:
        return Tile(64, 32, 4, 3)
    if width <= 128:
        return Tile(64, 64, 8, 2)
    return Tile(64, 32, 8, 1)


def dkdv_tile(arch: int, block_d: int, block_dv: int, itemsize: int, block: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(16, 32, 8, 1) if width <= 128 else Tile(16, 16, 8, 1)
    if hopper_like(arch):
        if width <= 128 and block <= 32:
            return Tile(32, 64, 4, 3, tma=True)
        if width <= 64:
            return Tile(64, 64, 4, 3, tma=True)
        if width <= 128:
            return Tile(64, 64, 4, 2, tma=True)
        return Tile(16, 32, 4, 2)
    if width <= 64:
        return Tile(64, 128, 8, 2)
    if width <= 128:
        return Tile(64, 64, 8, 2)
    return Tile(32, 32, 8, 1)


@dataclass(frozen=True)
class HopperTile:
    """Of the Gluon backward."""

    block_m: int
    block_n: int
    stages: int


def hopper_forward_tile(block_d: int, block_dv: int, block_q: int, block_k: int) -> ForwardTile:
    """Blocks of 64 queries give each consumer a list of its own; two or three programs of one consumer share a multiprocessor then."""
    wide = max(block_d, block_dv) == 128
    if block_q < 128:
        return ForwardTile(64, 2 if wide else 3, 1, programs=2 if wide else 3)
    if block_k < 128:
        return ForwardTile(64, 4)
    return ForwardTile(128, 2 if wide else 3)
