"""Tiles of queries of the Hopper forward, which end at chunk seams, the keys of their stages, and the warp that loads both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import load_tile, mbarrier, ring
from attnzoo_kernels._gluon.tiles import sequence_bounds
from attnzoo_kernels._gluon.work import leave_at_zero, publish

Q_SLOTS = gl.constexpr(2)  # tiles of queries that fit: the next stage's are loaded while the last one's are read


@gluon.jit
def _find_sequence(cu_seqlens, slot, n_seqs, chunk, BLOCK: gl.constexpr):
    """As tiles.find_sequence for tiles that end at seams: b owns the slots from c // BLOCK + c // chunk + 3 b on, c = cu_seqlens[b]."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    sequence = -1
    for start in range(0, n_seqs + 1, 32):
        b = start + lanes
        token = gl.load(cu_seqlens + b, mask=b <= n_seqs, other=0)
        sequence += gl.sum(((token // BLOCK + token // chunk + 3 * b <= slot) & (b <= n_seqs)).to(gl.int32), 0)
    return sequence


@gluon.jit
def chunk_of(position, chunk):
    """Which chunk a position is in; negative ones, of queries before the first key, round down too."""
    return gl.where(position < 0, position - chunk + 1, position) // chunk


@gluon.jit
def _sequence_tiles(len_q, len_k, chunk, BLOCK: gl.constexpr):
    """(first tile, tiles, chunks added so that nothing is negative) of a sequence, numbered from chunk 0 of the added ones on."""
    shift = len_k - len_q
    added = (gl.maximum(-shift, 0) + chunk - 1) // chunk
    start = shift + added * chunk
    per_chunk = (chunk + BLOCK - 1) // BLOCK
    first = start // chunk * per_chunk + start % chunk // BLOCK
    last = start + gl.maximum(len_q, 1) - 1
    return first, last // chunk * per_chunk + last % chunk // BLOCK - first + 1, added


@gluon.jit
def _decode(index, shape, BLOCK: gl.constexpr, PACKED: gl.constexpr):
    """(sequence, head, position of the tile's first row, first_q, len_q, first_k, len_k, whether there is such a tile). The last tiles,
    which walk most keys, come first: dense ones by groups of heads whose keys stay in L2."""
    cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, chunk, _ = shape
    if PACKED:
        slots = seqlen_q // BLOCK + seqlen_q // chunk + 3 * (n_seqs + 1)
        head = index // slots
        slot = index % slots
        sequence = _find_sequence(cu_seqlens_q, slot, n_seqs, chunk, BLOCK)
        first_q, len_q = sequence_bounds(cu_seqlens_q, sequence, n_seqs, seqlen_q, PACKED, True)
        first_k, len_k = sequence_bounds(cu_seqlens_k, sequence, n_seqs, seqlen_k, PACKED, False)
        place = slot - (first_q // BLOCK + first_q // chunk + 3 * sequence)
        first, tiles, added = _sequence_tiles(len_q, len_k, chunk, BLOCK)
    else:
        first, tiles, added = _sequence_tiles(seqlen_q, seqlen_k, chunk, BLOCK)
        first_group = index // (head_group * tiles) * head_group
        members = gl.maximum(gl.minimum(head_group, n_seqs * heads - first_group), 1)
        place = index - first_group * tiles
        owner = first_group + place % members
        place = place // members
        sequence, head = owner // heads, owner % heads
        first_q, len_q, first_k, len_k = 0, seqlen_q, 0, seqlen_k
    there = (place < tiles) & (len_q > 0)
    per_chunk = (chunk + BLOCK - 1) // BLOCK
    tile = first + tiles - 1 - place
    position = (tile // per_chunk - added) * chunk + tile % per_chunk * BLOCK
    return sequence, head, position, first_q, len_q, first_k, len_k, there


@gluon.jit
def rows_end(position, BLOCK: gl.constexpr, len_k, chunk):
    """Position behind the last row of a tile: tiles end at seams, and queries with the last key."""
    return gl.minimum(gl.minimum(position + BLOCK, (chunk_of(position, chunk) + 1) * chunk), len_k)


@gluon.jit
def is_merged(position, index, chunk, near):
    """Whether a tile from `position` on, in chunk `index`, stands at one position to all chunks before its own."""
    return (index > 0) & (position - index * chunk >= near)


@gluon.jit
def stage_keys(stage, index, chunk, last, merged, BLOCK_N: gl.constexpr):
    """(first key, tiles) of a stage for queries of chunk `index` up to position `last`: 0 the chunk itself, 1 the one before, 2 all before
    that, or, merged, 1 all before. Queries without a key walk one tile all the same."""
    own = gl.maximum(index, 0) * chunk
    begin = gl.where(stage == 0, own, gl.where((stage == 1) & (merged == 0), gl.maximum(own - chunk, 0), 0))
    end = gl.where(stage == 0, gl.maximum(last, own) + 1, gl.where(stage == 1, own, gl.where(merged, 0, gl.maximum(own - chunk, 0))))
    return begin, (end - begin + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr,
            PACKED: gl.constexpr):
    """Takes tiles, tells the consumers which (-1 ends), and loads keys stage by stage, with each the queries rotated for it."""
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, shape, group, batches, n_tiles = loads
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    chunk, near = shape[7], shape[8]
    TILE: gl.constexpr = CONSUMERS * ROWS
    step = 0
    taken = 0
    q_step = 0
    index = gl.program_id(0)
    while index < n_tiles:
        sequence, head, position, first_q, len_q, first_k, len_k, there = _decode(index, shape, TILE, PACKED)
        upcoming = index
        if there:
            publish(work, work_full, work_empty, taken, sequence, head, position)
            batch = sequence
            if PACKED:
                batch = 0
            kv_head = head // group
            own = chunk_of(position, chunk)
            last = rows_end(position, TILE, len_k, chunk) - 1
            row = first_q + position - (len_k - len_q)
            merged = is_merged(position, own, chunk, near)
            for stage in range(gl.minimum(gl.maximum(own, 0), 2 - merged.to(gl.int32)) + 1):
                begin, tiles = stage_keys(stage, own, chunk, last, merged, BLOCK_N)
                copy = stage + (merged & (stage == 1)).to(gl.int32)
                key = first_k + begin + (tiles - 1) * BLOCK_N
                for j in range(tiles):
                    slot, phase = ring(step, STAGES)
                    mbarrier.wait(k_empty.index(slot), phase ^ 1)
                    load_tile(k_desc, k_tiles, k_full, slot, batch, kv_head, key)
                    if j == 0:
                        q_slot, q_phase = ring(q_step, Q_SLOTS)
                        for c in gl.static_range(CONSUMERS):
                            place = q_slot * CONSUMERS + c
                            mbarrier.wait(q_empty.index(place), q_phase ^ 1)
                            load_tile(q_desc, q_tiles, q_full, place, copy * batches + batch, head, row + c * ROWS)
                        q_step += 1
                    mbarrier.wait(v_empty.index(slot), phase ^ 1)
                    load_tile(v_desc, v_tiles, v_full, slot, batch, kv_head, key)
                    if (j == 0) & (stage == 0):  # while the consumers are busy: a tile asked for late begins late
                        upcoming = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                    key -= BLOCK_N
                    step += 1
            taken += 1
        else:
            upcoming = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        index = upcoming
    leave_at_zero(counter, index, n_tiles)
    publish(work, work_full, work_empty, taken, -1, 0, 0)
