"""Tiles that end at chunk seams, and the five relations between chunks that the mainloop goes through.

A relation says where the key's chunk lies, as seen from the query's: 0 two or more chunks before, 1 the chunk before, 2 the same chunk, 3
the chunk after, 4 two or more chunks after (3 and 4 only if not causal). In relation r they are |r - 2| chunks apart, where 2 also stands
for more. The one of query and key that comes later takes the rotary position of that distance, which is copy |r - 2| of the rotated copies.
The other one takes its position within its chunk, which is copy 0.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.tiles import Place, find_tile


@triton.jit
def first_slot(token, sequence, block, chunk):
    """FIRST_SLOT of find_tile for tiles that end at seams: n tokens that start anywhere in a chunk have at most
    n // block + n // chunk + 3 tiles."""
    return token // block + token // chunk + 3 * sequence


@triton.jit
def chunk_tile(cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, chunk, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
               PACKED: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(this program's Place, its chunk, the sequence's length on this side).

    Like tiles.program_tile, but the Place's rows row .. length all lie in one chunk. The chunk's number is negative for queries before the
    first key.
    """
    if PACKED:
        slots = first_slot(seqlen, n_seqs + 1, BLOCK, chunk)
        head = tl.program_id(0) // slots
        seq, tile, first, length, other_first, other_length = find_tile(cu_seqlens, other_cu_seqlens, tl.program_id(0) % slots, n_seqs,
                                                                        seqlen, BLOCK, chunk, first_slot)
        batch = 0
    else:
        first, length, other_first, other_length = 0, seqlen, 0, other_seqlen
    # position of row 0; whole chunks are added, so that no negative number is divided
    offset = 0
    if QUERIES:
        offset = other_length - length
    added = tl.cdiv(tl.maximum(-offset, 0), chunk)
    start = offset + added * chunk
    per_chunk = tl.cdiv(chunk, BLOCK)
    first_tile = start // chunk * per_chunk + start % chunk // BLOCK
    last = start + tl.maximum(length, 1) - 1
    tiles = last // chunk * per_chunk + last % chunk // BLOCK - first_tile + 1
    if not PACKED:
        tile = tl.program_id(0) % tiles
        head = tl.program_id(0) // tiles % heads
        batch = tl.program_id(0) // tiles // heads
        seq = batch
    if LAST_FIRST:
        tile = tl.where(tile < tiles, tiles - 1 - tile, tile)
    tile += first_tile
    index = tile // per_chunk - added
    position = index * chunk + tile % per_chunk * BLOCK
    row = tl.maximum(position - offset, 0)
    end = tl.minimum(tl.minimum(position + BLOCK, (index + 1) * chunk) - offset, length)
    return Place(seq, batch, head, row, first, end, other_first, other_length), index, length


@triton.jit
def relation_range(relation, index, chunk, low, high):
    """(begin, end): the positions, within low .. high, of the tokens that have this relation to chunk `index`; empty if begin >= end."""
    begin = tl.where(relation == 0, low, tl.maximum((index + relation - 2) * chunk, low))
    end = tl.where(relation == 4, high, tl.minimum((index + relation - 1) * chunk, high))
    return begin, end


@triton.jit
def chunks_apart(relation):
    """How many chunks query and key are apart: 0 in the same chunk, 1, or 2 for two or more."""
    return tl.abs(relation - 2)


@triton.jit
def query_copy(relation):
    """Which rotated copy of the queries a relation reads."""
    return tl.maximum(2 - relation, 0)


@triton.jit
def key_copy(relation):
    """Which rotated copy of the keys a relation reads."""
    return tl.maximum(relation - 2, 0)
