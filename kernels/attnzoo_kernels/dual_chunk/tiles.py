"""Dual Chunk attention's tile tables: pure functions of widths, element size and architecture.

Hopper's entries for widths up to 128 were measured on an H200 (docs/performance/dual_chunk.md), dkdv_tile's on an earlier form of its
kernel; the others were chosen by registers and shared memory.
"""

from dataclasses import dataclass
from typing import Any

from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels.flash import tiles as flash


@dataclass(frozen=True)
class Tile(flash.Tile):
    max_registers: int | None = None  # a thread's, where TMA is used: what is spilled lies around the inner loops, a program more fits in

    def launch_options(self, tma: bool) -> dict[str, Any]:
        return {"maxnreg": self.max_registers} if tma and self.max_registers else {}


INTERPRETER = Tile(32, 32, 4, 1)


def _float32_tile(width: int) -> Tile:
    return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 32, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(width)
    if arch >= 90:
        if width <= 64:
            return Tile(64, 64, 4, 3, tma=True, max_registers=128)  # 7 % faster than without a bound
        return Tile(64, 64, 4, 3, tma=True) if width <= 128 else Tile(64, 64, 8, 2, tma=True)
    if width <= 128:
        return Tile(64, 64, 4, 2)
    return Tile(64, 32, 8, 2)


def dq_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(width)
    if arch >= 90:
        if width <= 64:
            return Tile(64, 64, 4, 3, tma=True, max_registers=168)  # 10 % faster than without a bound
        return Tile(64, 64, 4, 3, tma=True) if width <= 128 else Tile(64, 64, 8, 2, tma=True)
    if width <= 128:
        return Tile(64, 64, 4, 2) if width <= 64 else Tile(64, 32, 8, 1)
    return Tile(32, 32, 4, 1)


def dkdv_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return _float32_tile(width)
    if arch >= 90:
        if width <= 64:
            return Tile(64, 64, 4, 3, tma=True)
        return Tile(64, 64, 4, 2, tma=True) if width <= 128 else Tile(16, 32, 4, 2)
    if width <= 128:
        return Tile(64, 64, 4, 2 if width <= 64 else 1)
    return Tile(32, 32, 4, 1)


FORWARD_LENGTHS = (767, 2**31 - 1)  # the last lengths before hopper_forward_tile may return another tile


def hopper_forward_tile(block_d: int, block_dv: int, seqlen_q: int, chunk: int) -> ForwardTile:
    if max(block_d, block_dv) == 128:
        return ForwardTile(128, 2)
    if min(seqlen_q, chunk) < 768:
        return ForwardTile(128, 3)
    return ForwardTile(128, 3, 3, 160, k_before_pv=True)
