"""Differential attention's tile tables: pure functions of widths, element size, architecture and mask kind.

Two accumulators take twice the registers of plain attention. For Hopper the tiles are the fastest of 5 to 9 candidates on an H200
(bfloat16, causal, length 8192, 16k tokens, hidden 2048; milliseconds in comments), elsewhere the largest that compile for sm_80 without
spills.
"""

from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels.flash.tiles import INTERPRETER, Tile

MAX_HEAD_DIM = 128  # wider heads would spill in every tile


def hopper_forward_tile(block_d: int, block_dv: int) -> ForwardTile:
    """As many keys as the registers of a consumer leave room for. 64 and 64: 2.12, two stages 2.13, two consumers 2.32, `k_before_pv` 2.24;
    128 and 128: 1.56, separate releases 1.58, `k_before_pv` 1.62 (then 1.60)."""
    if max(block_d, block_dv) == 64:
        return ForwardTile(128, 3, 3, 160, joint_release=True)
    return ForwardTile(64 if block_dv > 128 else 128, 2, joint_release=block_d == block_dv)


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(block_d, block_dv)
    if arch >= 90:
        # widths 128 and 256: 2.22, two stages 2.69, 32 keys 2.68 and more; 128 and 128: 2.02, 32 keys 2.90, 128 rows 2.76
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
        # 64 and 128: 1.81, 32 keys 1.90, 128 rows 2.19; 128 and 256: 2.24, 64 rows 3.14; 128 and 128: 2.43, 64 keys 4.75
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
        # 64 and 128: 2.71, three stages 3.33, 64 rows 4.87; 128 and 256: 6.83, 64 rows 7.18, 16 rows 8.20; 128 and 128: 4.63, 8 warps 19.0
        return Tile(32, 64, 8, 2, tma=True) if block_dv > 128 else Tile(32, 64, 4, 2, tma=True)
    if block_dv > 128:
        return Tile(16, 32, 8, 1)
    return Tile(32, 64, 8, 1) if block_d <= 64 and block_dv <= 64 else Tile(32, 32, 8, 1)


def _float32_tile(block_d: int, block_dv: int) -> Tile:
    width = max(block_d, block_dv)
    return Tile(32, 32, 8, 1) if width <= 64 else Tile(16, 16, 4, 1)
