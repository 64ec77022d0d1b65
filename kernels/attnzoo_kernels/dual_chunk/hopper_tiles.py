"""Tiles of queries of the Hopper forward, which end at chunk seams, and the keys of their relations: the query's own chunk, the chunk
before, and all others. Each relation has its own rotated copy of the queries."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels._gluon.forward_producer import Keys, load_segment
from attnzoo_kernels._gluon.tile_scheduler import Span, Tile, next_index
from attnzoo_kernels._gluon.tiles import both_bounds, by_groups, find_sequence


class Source(NamedTuple):
    """What the producer warp knows of a tile beside the fields of Tile. `sequence` is the sequence's own number; Tile.sequence may be that
    of a copy of the queries. Rows may begin before row 0, because tiles begin at seams."""

    position: Any  # position of the first row
    sequence: Any


class Seen(NamedTuple):
    """What a consumer's rows see, beside the fields of Span. Here Span.loaded_end counts the first tiles of keys that only other consumers
    see, and Span.len_q is the end of the rows."""

    position: Any  # position of the first row
    chunk: Any
    last: Any  # position of the last row
    merged: Any
    first_key: Any  # first key of the chunk


@gluon.jit
def first_slot(token, sequence, block, chunk):
    """FIRST_SLOT of find_sequence for tiles that end at seams."""
    return token // block + token // chunk + 3 * sequence


@gluon.jit
def chunk_of(position, chunk):
    """The chunk of a position. Negative positions, of queries before the first key, are rounded down, too."""
    return gl.where(position < 0, position - chunk + 1, position) // chunk


@gluon.jit
def sequence_tiles(len_q, len_k, chunk, BLOCK: gl.constexpr):
    """(first tile, number of tiles, chunks added so that no position is negative) of a sequence. Tiles are numbered from the first added
    chunk on."""
    shift = len_k - len_q
    added = (gl.maximum(-shift, 0) + chunk - 1) // chunk
    start = shift + added * chunk
    per_chunk = (chunk + BLOCK - 1) // BLOCK
    first = start // chunk * per_chunk + start % chunk // BLOCK
    last = start + gl.maximum(len_q, 1) - 1
    return first, last // chunk * per_chunk + last % chunk // BLOCK - first + 1, added


@gluon.jit
def decode_tile(index, program, config):
    """(sequence, head, position of the tile's first row, first_q, len_q, first_k, len_k, whether the tile exists). The last tiles, which
    see most keys, come first; dense tiles of `head_group` heads are interleaved, so that their keys stay in L2."""
    PACKED: gl.constexpr = config.PACKED
    BLOCK: gl.constexpr = config.CONSUMERS * ROWS
    cu_seqlens_q, n_seqs = program.problem.cu_seqlens_q, program.problem.n_seqs
    seqlen_q, seqlen_k, heads = program.problem.seqlen_q, program.problem.seqlen_k, program.problem.heads
    head_group, chunk = program.problem.head_group, program.own.chunk
    if PACKED:
        slots = seqlen_q // BLOCK + seqlen_q // chunk + 3 * (n_seqs + 1)
        head = index // slots
        slot = index % slots
        sequence = find_sequence(cu_seqlens_q, slot, n_seqs, BLOCK, chunk, first_slot)
        first_q, len_q, first_k, len_k = both_bounds(sequence, program.problem, PACKED)
        place = slot - first_slot(first_q, sequence, BLOCK, chunk)
        first, tiles, added = sequence_tiles(len_q, len_k, chunk, BLOCK)
    else:
        first, tiles, added = sequence_tiles(seqlen_q, seqlen_k, chunk, BLOCK)
        owner, place = by_groups(index, tiles, n_seqs * heads, head_group, True)
        sequence, head = owner // heads, owner % heads
        first_q, len_q, first_k, len_k = 0, seqlen_q, 0, seqlen_k
    there = (place < tiles) & (len_q > 0)
    per_chunk = (chunk + BLOCK - 1) // BLOCK
    tile = first + tiles - 1 - place
    position = (tile // per_chunk - added) * chunk + tile % per_chunk * BLOCK
    return sequence, head, position, first_q, len_q, first_k, len_k, there


@gluon.jit
def next_tile(index, program, config):
    sequence, head, position, first_q, len_q, first_k, len_k, there = decode_tile(index, program, config)
    while (there == 0) & (index < program.problem.n_tiles):
        index = next_index(program.problem)
        sequence, head, position, first_q, len_q, first_k, len_k, there = decode_tile(index, program, config)
    return Tile(index, (sequence, head, position), sequence, head, position - (len_k - len_q), first_q, len_q, first_k, len_k,
                Source(position, sequence))


@gluon.jit
def rows_end(position, BLOCK: gl.constexpr, len_k, chunk):
    """The position after a tile's last row: tiles end at seams, and at the sequence's last key."""
    return gl.minimum(gl.minimum(position + BLOCK, (chunk_of(position, chunk) + 1) * chunk), len_k)


@gluon.jit
def is_merged(position, index, chunk, near):
    """Whether a tile from `position` on, in chunk `index`, has one rotary position for all chunks before its own."""
    return (index > 0) & (position - index * chunk >= near)


@gluon.jit
def relation_keys(relation, index, chunk, last, merged, BLOCK_N: gl.constexpr):
    """(first key, number of tiles) of a relation, for queries of chunk `index` up to position `last`. Relation 0 is the chunk itself, 1 the
    chunk before it, 2 all chunks before that one. If merged, 1 is all chunks before the own one. Queries that see no key get one tile all
    the same."""
    own = gl.maximum(index, 0) * chunk
    begin = gl.where(relation == 0, own, gl.where((relation == 1) & (merged == 0), gl.maximum(own - chunk, 0), 0))
    end = gl.where(relation == 0, gl.maximum(last, own) + 1, gl.where(relation == 1, own, gl.where(merged, 0, gl.maximum(own - chunk, 0))))
    return begin, (end - begin + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def load_tile(tile, step, q_step, program, config):
    """LOAD_TILE: relation by relation, each with the copy of the queries that is rotated for it."""
    chunk, near, batches = program.own.chunk, program.own.near, program.own.batches
    own = chunk_of(tile.own.position, chunk)
    last = rows_end(tile.own.position, config.CONSUMERS * ROWS, tile.len_k, chunk) - 1
    merged = is_merged(tile.own.position, own, chunk, near)
    batch = tile.own.sequence
    if config.PACKED:
        batch = 0
    keys = Keys(tile.own.sequence, tile.head // program.problem.group, tile.first_k, tile.len_k)
    for relation in range(gl.minimum(gl.maximum(own, 0), 2 - merged.to(gl.int32)) + 1):
        begin, tiles = relation_keys(relation, own, chunk, last, merged, config.BLOCK_N)
        copy = relation + (merged & (relation == 1)).to(gl.int32)
        queries = Tile(tile.index, tile.words, copy * batches + batch, tile.head, tile.row, tile.first_q, tile.len_q, tile.first_k,
                       tile.len_k, tile.own)
        step, q_step = load_segment(program.descs.q, program.descs.k, queries, keys, begin, tiles - 1, tiles, step, q_step, program,
                                    config)
    return step, q_step


@gluon.jit
def span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN. The `row` of a consumer's tile is a position here."""
    chunk, near = program.own.chunk, program.own.near
    own = chunk_of(tile.row, chunk)
    last = rows_end(tile.row, config.CONSUMERS * ROWS, tile.len_k, chunk) - 1
    position = tile.row + ME * ROWS
    my_last = gl.minimum(position + ROWS - 1, last)
    merged = is_merged(tile.row, own, chunk, near)
    begin, tiles = relation_keys(0, own, chunk, my_last, merged, config.BLOCK_N)
    unseen = relation_keys(0, own, chunk, last, merged, config.BLOCK_N)[1] - tiles
    shift = tile.len_k - tile.len_q
    return Span(position - shift, my_last + 1 - shift, tile.len_k, 0, unseen, 0, 0, 0, 0, Seen(position, own, my_last, merged, begin))
