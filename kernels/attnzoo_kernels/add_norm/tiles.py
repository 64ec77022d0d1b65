"""Warps and programs of add_norm's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """forward_warps, backward_warps: warps of a program for each 1024 elements of a row. programs: of the backward, about; each sums a part
    of the gradients of weight and bias. stages: of the backward's loop."""

    forward_warps: float = 1.0
    backward_warps: float = 2.0
    programs: int = 1056
    stages: int = 3


TILES = Tiles()


def warps(share: float, block: int) -> int:
    """The warps of a program with a row of `block` elements, 1 to 16: a power of two if `share` is a power of two."""
    return max(1, min(16, int(share * block) // 1024))
