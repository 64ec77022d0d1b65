"""Decoding's tile table: a pure function of widths, rows, element size and architecture.

What 16 rows take at width 128, of caches of 16 and of 8 bits, and what the queries of a group that shares pages take there were measured on
an H200 (docs/performance/decode.md). The others are the largest that compile without spills and fit the 99 KB of shared memory that every
card since sm_86 has.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    block_m: int  # rows: the queries of a key head's group
    block_n: int  # keys
    num_warps: int
    num_stages: int
    programs: int  # programs a multiprocessor, among which the keys are shared out
    tma: bool = False
    pairs: bool = False  # values of 8 bits are read as pairs of columns


INTERPRETER_PROGRAMS = 5  # shares of every kind: several pieces in one, one piece in several


def decode_tile(arch: int, block_d: int, block_dv: int, rows: int, itemsize: int, pieces: float, *, pairs: bool | None = None,
                paged: bool = False, shared: bool = False) -> Tile:
    """`rows` are the queries of one sequence that read the same key head, `pieces` such heads of all sequences a multiprocessor.

    pairs: whether values of 8 bits can be read as pairs of columns; None where the cache has more bits. paged: it lies in pages.
    shared: the rows are those of several sequences that share pages.
    """
    width = max(block_d, block_dv)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if arch == 0:
        return Tile(block_m, 32, 4, 1, INTERPRETER_PROGRAMS)
    if itemsize == 4:
        return Tile(16, 16, 4, 1, 2)
    warps = 8 if block_m == 64 else 4
    if arch // 10 == 9 and width == 128 and block_m == 16 and pairs:
        return Tile(16, 128, 4, 3, 2, pairs=True) if paged else Tile(16, 64, 2, 4, 4, pairs=True)
    if arch // 10 == 9 and width == 128 and block_m == 64 and shared and pairs is None:
        return Tile(128, 64, 8, 3, 1) if rows > 64 else Tile(64, 64, 8, 4, 1)
    if width == 128 and block_m == 16 and arch // 10 in (9, 10) and pieces < 2:
        # one program with more keys is faster where it has few pieces; among many, one of two programs begins a piece while the other
        # one is in the middle of its own
        return Tile(block_m, 128, 8, 3, 1)
    if width <= 128:
        return Tile(block_m, 64, warps, 3, 2)
    return Tile(block_m, 16 if block_m == 64 else 32, warps, 3, 2)


def shared_rows(arch: int, width: int, itemsize: int, rows: int) -> int:
    """Rows of a tile for sequences that share pages, at most, where all sequences together have `rows` queries of a key head. itemsize:
    the cache's."""
    return 128 if arch // 10 == 9 and width == 128 and itemsize == 2 and rows > 64 else 64


def latent_tile(arch: int, block_dv: int, rows: int, itemsize: int, tma: bool) -> Tile:
    """Of `latent_decode_attention`. rows: the queries of a sequence, in all heads. tma: it can read the cache.

    Those of TMA, and that of 16 rows by pointers on Hopper, were measured on an H200 at DeepSeek's widths (docs/performance/decode.md).
    Triton 3.6 spills 16 bytes of two of them; the others compile without spills, except those of float32 on cards with 99 KB of shared
    memory.
    """
    if arch == 0:
        return Tile(16, 32, 4, 1, INTERPRETER_PROGRAMS)
    small = arch not in (80, 90, 100)
    if itemsize == 4:
        return Tile(16, 16, 4 if small else 8, 1, 1)
    if arch == 90 and tma and block_dv == 512:
        return Tile(*((16, 64, 4, 3, 1) if rows <= 16 else (32, 64, 8, 3, 1) if rows <= 32 else (64, 64, 8, 2, 1)), tma=True)
    if arch == 80 or small:
        return Tile(16, 32, 8, 3, 1)
    return Tile(16, 64, 8, 3, 1)
