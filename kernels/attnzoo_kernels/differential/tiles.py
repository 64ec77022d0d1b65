"""Differential attention's tile tables: pure functions of widths, element size, architecture and mask kind.

Two accumulators take twice the registers of plain attention. For Hopper the tiles are the fastest of 5 to 9 candidates on an H200
(docs/performance/differential.md has some figures), elsewhere the largest that compile for sm_80 without spills.
"""

from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels.flash.tiles import INTERPRETER, Tile

MAX_HEAD_DIM = 128  # wider heads would spill in every tile


def hopper_forward_tile(block_d: int, block_dv: int) -> ForwardTile:
    """As many keys as the registers of a consumer leave room for."""
    if max(block_d, block_dv) == 64:
        return ForwardTile(128, 3, 3, 160, joint_release=True)
    return ForwardTile(64 if block_dv > 128 else 128, 2, joint_release=block_d == block_dv)


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(block_d, block_dv)
    if arch >= 90:
        return Tile(64, 64, 8, 3, tma=True) if block_dv > 128 else Tile(64, 64, 4, 2, tma=True)
    if block_d <= 64 and block_dv <= 128:
        return Tile(64, 32, 4, 2) if block_dv <= 64 else Tile(64, 32, 8, 2)
    return Tile(32, 32, 8, 1) if block_dv > 128 else Tile(64, 32, 8, 1)


def dq_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(block_d, block_dv)
    if arch >= 90:
        if block_d <= 64 and block_dv <= 128:
            return Tile(64, 64, 4, 2, tma=True)
        return Tile(128, 32, 8, 2, tma=True) if block_dv > 128 else Tile(64, 32, 4, 3, tma=True)
    if block_d <= 64 and block_dv <= 128:
        return Tile(64, 32, 4, 1) if block_dv <= 64 else Tile(32, 32, 4, 1)
    return Tile(32, 32, 8, 1)


def dkdv_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(block_d, block_dv)
    if arch >= 90:
        return Tile(32, 64, 8, 2, tma=True) if block_dv > 128 else Tile(32, 64, 4, 2, tma=True)
    if block_dv > 128:
        return Tile(16, 32, 8, 1)
    return Tile(32, 64, 8, 1) if block_d <= 64 and block_dv <= 64 else Tile(32, 32, 8, 1)


def _float32_tile(block_d: int, block_dv: int) -> Tile:
    width = max(block_d, block_dv)
    return Tile(32, 32, 8, 1) if width <= 64 else Tile(16, 16, 4, 1)
