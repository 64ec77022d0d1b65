"""The FP8 forward's tile table: 64 rows a consumer and 128 keys, as scales by block are. Measured on an H200."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    consumers: int
    registers: int


def forward_tile(width: int, *, loop_mask: bool) -> Tile:
    """loop_mask: more than the first tile of keys may need a mask."""
    if width == 128 or loop_mask:  # three consumers would spill
        return Tile(2, 240)
    return Tile(3, 160)
