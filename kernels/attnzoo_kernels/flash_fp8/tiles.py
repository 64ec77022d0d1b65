"""The FP8 forward's tile table: 64 rows for each consumer, and 128 keys, like the blocks of scales. Measured on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    consumers: int
    registers: int


def forward_tile(width: int, *, loop_mask: bool) -> Tile:
    """loop_mask: more than the first tile of keys may need a mask."""
    if width == 128 or loop_mask:  # three consumers would spill registers
        return Tile(2, 240)
    return Tile(3, 160)
