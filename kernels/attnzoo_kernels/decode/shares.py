"""How the tiles of all sequences are divided among programs: evenly and in order, from lengths that only the device knows.

The work is a line of units: sequence after sequence, in each piece after piece, and in each piece tile after tile of the keys that a
sequence's queries see. A piece is a key head, or, if the rows of a group do not fit into one tile, a part of these rows. Sequences whose
queries see no key have LEAST tiles: one, so that a program writes zeros, or none. All programs take the same number of units, except for
the last one with any. So fewer programs may run; that is faster than running all of them, some with one unit more.

A piece that lies inside one program is finished there. Of any other piece the programs store partial results, at most two each: of the
piece that began in an earlier program in slot 2 p, of the piece that ends in a later program in slot 2 p + 1 (in slot 2 p, if it is the
program's first).
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import softmax_step

LANES = tl.constexpr(32)  # sequences at a time: a sum over one warp's lanes needs no barrier


@triton.jit
def sequence_tiles(cache_seqlens, b, batch, max_len, seqlen_q, window_left, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
                   LEAST: tl.constexpr = 1):
    """(length, first tile, number of tiles) of the sequences b. Sequences past the batch have no tile."""
    length = tl.load(cache_seqlens + b, mask=b < batch, other=0)
    length = tl.minimum(tl.maximum(length, 0), max_len)
    first = length * 0
    if HAS_LEFT:
        first = tl.maximum(length - seqlen_q - window_left, 0) // BLOCK_N
    tiles = tl.maximum(tl.cdiv(length, BLOCK_N) - first, LEAST)
    return length, first, tl.where(b < batch, tiles, 0)


@triton.jit
def total_tiles(cache_seqlens, batch, max_len, seqlen_q, window_left, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
                LEAST: tl.constexpr = 1):
    """The number of tiles of all sequences, for one piece of each."""
    total = 0
    for start in range(0, batch, LANES):
        length, first, tiles = sequence_tiles(cache_seqlens, start + tl.arange(0, LANES), batch, max_len, seqlen_q, window_left, BLOCK_N,
                                              HAS_LEFT, LEAST)
        total += tl.sum(tiles, 0)
    return total


@triton.jit
def find_sequence(cache_seqlens, tile, batch, max_len, seqlen_q, window_left, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
                  LEAST: tl.constexpr = 1):
    """(the sequence that holds the tile of this number, the number of its first tile), where tiles are counted for one piece of each
    sequence."""
    sequence = 0
    before = 0
    passed = 0
    for start in range(0, batch, LANES):
        b = start + tl.arange(0, LANES)
        length, first, tiles = sequence_tiles(cache_seqlens, b, batch, max_len, seqlen_q, window_left, BLOCK_N, HAS_LEFT, LEAST)
        ends = passed + tl.cumsum(tiles, 0)
        passed += tl.sum(tiles, 0)
        lies_before = (ends <= tile) & (b < batch)
        sequence += tl.sum(lies_before.to(tl.int32), 0)
        before += tl.sum(tl.where(lies_before, tiles, 0), 0)
    return sequence, before


@triton.jit
def add_parts(state, maxima_ptr, sums_ptr, values_ptr, there, EXACT: tl.constexpr):
    """The state (accumulator [R, W], row maxima, row sums) after S partial results were added to it. Pointers to theirs are [R, S], and
    [R, S, W] for accumulators."""
    acc, row_max, row_sum = state
    maxima = tl.load(maxima_ptr, mask=there, other=-float("inf"))
    sums = tl.load(sums_ptr, mask=there, other=0.0)
    values = tl.load(values_ptr, mask=there[:, :, None], other=0.0)
    weights, row_max, _weights_sum, rescale = softmax_step(maxima, row_max, row_sum, 1.0, True, EXACT)
    acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 1)
    return acc, row_max, row_sum * rescale + tl.sum(weights * sums, 1)
