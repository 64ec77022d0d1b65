"""Tile table of padding removal: pure functions of a row's width and element size, measured on an H200 in bfloat16."""

from dataclasses import dataclass

INDEX_BLOCK, INDEX_WARPS = 1024, 4  # slots that a program numbers, and its warps


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    num_warps: int = 4


def row_tile(width: int, itemsize: int, n_bytes: int, fewest_rows: int, most_rows: int) -> Tile:
    """Tiles of whole rows if these have up to 2 KB. Otherwise columns divide the width, if the largest power of two that divides it is at
    least 128 bytes."""
    columns, divisor = 1 << (width - 1).bit_length(), width & -width
    if columns * itemsize > 2048:
        columns = min(divisor, 1024) if divisor * itemsize >= 128 else 512
    return Tile(max(fewest_rows, min(n_bytes // (columns * itemsize), most_rows)), columns)


def remove_tile(width: int, itemsize: int) -> Tile:
    # 21.5 and 511 us at widths 768 and 4096; with tiles of 8 KB 22.1 and 516 us, of 2 KB 24.4 and 563 us
    return row_tile(width, itemsize, 4096, 1, 1024)


def restore_tile(width: int, itemsize: int) -> Tile:
    # rows are compared with twice as many indices; 27.3, 55.4 and 822 us at widths 768, 1024 and 4096; with 16 rows 28.2, 56.2 and 827 us
    return row_tile(width, itemsize, 8192, 4, 32)


@dataclass(frozen=True)
class NormTile:
    rows: int
    num_warps: int
    window: int  # indices that a program compares its rows with, after a search for them


def norm_tile(width: int) -> NormTile:
    # 34.8, 66.0 and 1123 us at widths 768, 1024 and 4096; with 8 rows and 4 warps 48, 90 and 1370 us
    return NormTile(2, 2, 256) if width <= 1024 else NormTile(2, 4, 64)
