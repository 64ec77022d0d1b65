"""The FP8 forward's tile table: 64 rows a consumer and 128 keys, as scales by block are. Measured on an H200, TFLOP/s at N = 8192, full."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    stages: int
    consumers: int
    spread: bool  # see walk_keys
    registers: int


def forward_tile(width: int, *, loop_mask: bool) -> Tile:
    """loop_mask: more than the first tile of keys may need a mask."""
    if width == 128:
        return Tile(4, 2, True, 240)  # 947, else 893; with all exponentials on their own units 881
    if loop_mask:  # three consumers would spill
        return Tile(4, 2, True, 240)
    return Tile(4, 3, False, 160)  # 630, spread 606; two consumers 491
