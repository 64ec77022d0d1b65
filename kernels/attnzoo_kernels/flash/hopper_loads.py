"""Tiles of keys of the Hopper backward: which comes next, which queries see it, and the warp that loads both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import async_load, box, mbarrier, ring
from attnzoo_kernels._gluon.tiles import find_sequence

ROWS = gl.constexpr(64)  # queries of a step, if nothing else is said
KEYS = gl.constexpr(128)  # of a program
HALF = gl.constexpr(64)  # keys of a consumer
WORK = gl.constexpr(2)  # tiles that the loading warp may be ahead


@gluon.jit
def query_tiles(key, len_q, len_k, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                 ROWS: gl.constexpr = ROWS):
    """Tiles of queries that see the KEYS keys from `key` on: (begin, full_begin, full_end, end); before full_begin and from full_end on
    they need a mask."""
    shift = len_k - len_q
    last = gl.minimum(key + KEYS, len_k) - 1
    tiles = (len_q + ROWS - 1) // ROWS
    begin = 0
    full_begin = 0
    end = tiles
    full_end = tiles
    if HAS_RIGHT:
        begin = gl.minimum(gl.maximum(key - shift - window_right, 0) // ROWS, tiles)
        full_begin = (gl.maximum(last - shift - window_right, 0) + ROWS - 1) // ROWS
    if HAS_LEFT:
        end = gl.minimum(tiles, (gl.maximum(last - shift + window_left + 1, 0) + ROWS - 1) // ROWS)
        full_end = gl.minimum(tiles, gl.maximum(key - shift + window_left + 1, 0) // ROWS)
    end = gl.maximum(end, begin)
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    if key + KEYS > len_k:  # keys behind the end
        full_begin = end
    full_end = gl.maximum(gl.minimum(full_end, end), full_begin)
    return begin, full_begin, full_end, end


@gluon.jit
def word(work, slot, WHICH: gl.constexpr):
    """Of the tile in a slot: 0 whether there is one, 1 batch, 2 key head, 3 first key, 4 to 7 the bounds of query_tiles, 8 queries and 9
    keys of its sequence, 10 where the sequence's keys begin, 11 where the tiles of dQ of its first head begin, 12 where NUMBERED
    the tile's number."""
    return gl.max(work.index(slot).slice(WHICH, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def walk_barriers(STAGES: gl.constexpr, KEY_READERS: gl.constexpr, WORK_READERS: gl.constexpr):
    """(q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty) of a walk with two consumers."""
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    step_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    work_full = gl.allocate_shared_memory(gl.int64, [WORK, 1], bar)
    work_empty = gl.allocate_shared_memory(gl.int64, [WORK, 1], bar)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(kv_empty, count=KEY_READERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(step_empty.index(i), count=2)
    for i in gl.static_range(WORK):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=WORK_READERS)
    return q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty


@gluon.jit
def await_work(work, work_full, taken):
    """Whether there is another tile; its words lie in the slot that is returned."""
    slot, phase = ring(taken, WORK)
    mbarrier.wait(work_full.index(slot), phase)
    return slot, word(work, slot, 0)


@gluon.jit
def announce(work, work_full, slot, words):
    """Tells the others of a tile by what `word` reads."""
    n = gl.arange(0, work.shape[1], gl.BlockedLayout([1], [32], [1], [0]))
    written = n * 0
    for i in gl.static_range(len(words)):
        written = gl.where(n == i, words[i], written)
    work.index(slot).store(written)
    mbarrier.arrive(work_full.index(slot), count=1)


@gluon.jit
def end_tile(work, slot, bars, NUMBERED: gl.constexpr = False):
    """Gives K, V and the slot back; what writing the tile out still needs: (batch, key head, first key, where the sequence's keys begin,
    how many it has, the tile's number if NUMBERED)."""
    kv_empty, work_empty = bars[5], bars[7]
    mbarrier.arrive(kv_empty, count=1)
    batch, kv_head, key, first_k = word(work, slot, 1), word(work, slot, 2), word(work, slot, 3), word(work, slot, 10)
    len_k = word(work, slot, 9)
    number = 0
    if NUMBERED:
        number = word(work, slot, 12)
    mbarrier.arrive(work_empty.index(slot), count=1)
    return batch, kv_head, key, first_k, len_k, number


@gluon.jit
def queries_seeing(key, len_q, len_k, window_left, window_right, HAS_RIGHT: gl.constexpr, layout: gl.constexpr):
    """(first, last) query that sees each of the HALF keys from `key` on; the last one counts under a window only."""
    shift = len_k - len_q
    j = gl.arange(0, HALF, gl.SliceLayout(1, layout)) + key
    low = gl.where(j < len_k, 0, 1 << 30)
    if HAS_RIGHT:  # keys behind the end are seen by no query that there is
        low = gl.where(j < len_k, j - shift - window_right, 1 << 30)
    return low, j - shift + window_left


@gluon.jit
def load_step(q_desc, do_desc, stats_desc, tiles, bars, slot, batch, head, row, stats_tile):
    q_tiles, do_tiles, stats_tiles = tiles[0], tiles[1], tiles[2]
    q_full, do_full = bars[0], bars[1]
    bar = q_full.index(slot)
    mbarrier.expect(bar, q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
    async_load(q_desc, [batch, head, row, 0], bar, box(q_tiles.index(slot), q_desc))
    async_load(stats_desc, [0, 0, stats_tile, 0], bar, box(stats_tiles.index(slot), stats_desc))
    bar = do_full.index(slot)
    mbarrier.expect(bar, do_desc.block_type.nbytes)
    async_load(do_desc, [batch, head, row, 0], bar, box(do_tiles.index(slot), do_desc))


@gluon.jit
def load_keys(k_desc, v_desc, tiles, bars, taken, batch, kv_head, key):
    k_tiles, v_tiles = tiles[3], tiles[4]
    k_full, v_full, kv_empty = bars[3], bars[4], bars[5]
    mbarrier.wait(kv_empty, (taken & 1) ^ 1)
    mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
    for c in gl.static_range(2):
        async_load(k_desc, [batch, kv_head, key + c * HALF, 0], k_full, box(k_tiles.index(c), k_desc))
    mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
    for c in gl.static_range(2):
        async_load(v_desc, [batch, kv_head, key + c * HALF, 0], v_full, box(v_tiles.index(c), v_desc))


@gluon.jit
def load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED: gl.constexpr):
    if PACKED:
        if key + KEYS > len_k:
            load_keys(tail_descs[2], tail_descs[3], tiles, bars, taken, sequence, kv_head, 0)
        else:
            load_keys(descs[3], descs[4], tiles, bars, taken, 0, kv_head, first_k + key)
    else:
        load_keys(descs[3], descs[4], tiles, bars, taken, batch, kv_head, key)


@gluon.jit
def take_keys(shape, n_tiles, PACKED: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr = ROWS):
    """The next tile from the counter that has keys: (its number, sequence, key head, first key, first_q, len_q, first_k, len_k, first tile
    of dQ)."""
    index = gl.atomic_add(shape[0], 1, sem="relaxed")
    sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = decode_keys(index, shape, PACKED, ORDERED, ROWS)
    if PACKED:
        while (key >= len_k) & (index < n_tiles):
            index = gl.atomic_add(shape[0], 1, sem="relaxed")
            sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = decode_keys(index, shape, PACKED, ORDERED, ROWS)
    return index, sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile


@gluon.jit
def decode_keys(index, shape, PACKED: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr):
    """Of the index-th tile what take_keys gives behind its number."""
    _, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles = shape
    if PACKED:
        slots = seqlen_k // KEYS + n_seqs + 1
        kv_head = index // slots
        slot = index % slots
        sequence = find_sequence(cu_seqlens_k, slot, n_seqs, KEYS)
        after = gl.minimum(sequence + 1, n_seqs)
        first_q = gl.load(cu_seqlens_q + sequence)
        first_k = gl.load(cu_seqlens_k + sequence)
        len_q = gl.load(cu_seqlens_q + after) - first_q
        len_k = gl.where(sequence == n_seqs, seqlen_k, gl.load(cu_seqlens_k + after)) - first_k
        tile = slot - (first_k // KEYS + sequence)
        if ORDERED:
            tiles = (len_k + KEYS - 1) // KEYS
            tile = gl.where(tile < tiles, tiles - 1 - tile, tile)
        dq_tile = kv_head * group * head_tiles + first_q // ROWS + sequence
    else:
        rows = n_seqs * kv_heads
        key_tiles = (seqlen_k + KEYS - 1) // KEYS
        first_row = index // (head_group * key_tiles) * head_group
        members = gl.maximum(gl.minimum(head_group, rows - first_row), 1)
        place = index - first_row * key_tiles
        owner = first_row + place % members
        tile = place // members
        if ORDERED:
            tile = key_tiles - 1 - tile
        sequence, kv_head = owner // kv_heads, owner % kv_heads
        first_q, first_k, len_q, len_k = 0, 0, seqlen_q, seqlen_k
        dq_tile = owner * group * head_tiles
    return sequence, kv_head, tile * KEYS, first_q, len_q, first_k, len_k, dq_tile


@gluon.jit
def load(descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES: gl.constexpr, PACKED: gl.constexpr,
         HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr = ROWS, NUMBERED: gl.constexpr = False):
    """Takes tiles, tells the others which, and loads what they need.

    Dense tiles go by groups of `head_group` heads, whose queries stay in L2, inside a group by first key; ORDERED from the last one down,
    so that a tile only ever waits for those that were taken before it. What a tile at the end of a packed sequence would read of the next
    one comes from copies with zeros behind the end (`tail_descs`).
    """
    q_desc, do_desc, stats_desc = descs[0], descs[1], descs[2]
    step_empty, work_full, work_empty = bars[2], bars[6], bars[7]
    group, head_tiles = shape[7], shape[9]
    step = 0
    taken = 0
    more = 1
    while more != 0:
        slot, phase = ring(taken, WORK)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        index, sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = take_keys(shape, n_tiles, PACKED, ORDERED, ROWS)
        batch = sequence
        if PACKED:
            batch = 0
        begin, full_begin, full_end, end = query_tiles(key, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, ROWS)
        number = 0
        if NUMBERED:
            number = index
        more = (index < n_tiles).to(gl.int32)
        words = (more, batch, kv_head, key, begin, full_begin, full_end, end, len_q, len_k, first_k, dq_tile, number)
        announce(work, work_full, slot, words)
        if more != 0:
            stats_tile = dq_tile
            loaded = 0
            for member in range(group):
                head = kv_head * group + member
                for j in range(begin, end):
                    stage, stage_phase = ring(step, STAGES)
                    mbarrier.wait(step_empty.index(stage), stage_phase ^ 1)
                    if PACKED:
                        if (j + 1) * ROWS > len_q:
                            load_step(tail_descs[0], tail_descs[1], stats_desc, tiles, bars, stage, sequence, head, 0, stats_tile + j)
                        else:
                            load_step(q_desc, do_desc, stats_desc, tiles, bars, stage, 0, head, first_q + j * ROWS, stats_tile + j)
                    else:
                        load_step(q_desc, do_desc, stats_desc, tiles, bars, stage, batch, head, j * ROWS, stats_tile + j)
                    if loaded == 0:  # behind the first queries: keys and values have one buffer, which is freed late
                        load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED)
                        loaded = 1
                    step += 1
                stats_tile += head_tiles
            if loaded == 0:
                load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED)
        taken += 1
