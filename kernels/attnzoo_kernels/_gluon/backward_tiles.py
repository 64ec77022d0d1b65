"""The tile scheduler of a Hopper backward: which tile of keys comes next, which queries see it, and how the producer warp publishes it."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import await_full, mbarrier, read_word
from attnzoo_kernels._gluon.tiles import by_groups, find_sequence, sequence_bounds

ROWS = gl.constexpr(64)  # queries of a step by default
KEYS = gl.constexpr(128)  # keys of a tile
HALF = gl.constexpr(64)  # keys of a consumer
WORK = gl.constexpr(2)  # how many tiles of keys the producer warp may be ahead


class Problem(NamedTuple):
    """What the tile scheduler reads: the kernel's arguments."""

    counter: Any  # of tiles, in global memory
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    n_seqs: Any
    seqlen_q: Any  # where packed, the total
    seqlen_k: Any
    kv_heads: Any
    group: Any  # query heads of a key head
    head_group: Any  # key heads whose tiles are interleaved
    head_tiles: Any  # tiles of dQ, and of row statistics, that a query head has
    n_tiles: Any
    window_left: Any
    window_right: Any


class KeyTile(NamedTuple):
    """A tile of KEYS keys, as the producer warp publishes it to the other warps: int32 words in shared memory."""

    more: Any  # 0 after the last tile
    batch: Any  # coordinate in the tensors: 0 where sequences are packed
    kv_head: Any
    key: Any  # its first key, counted in its sequence
    begin: Any  # the tiles of queries that see it are begin .. end
    full_begin: Any  # tiles of queries before this one, and from full_end on, need a mask
    full_end: Any
    end: Any
    len_q: Any  # of its sequence
    len_k: Any
    first_k: Any  # where its sequence's keys begin
    dq_tile: Any  # number of the first tile of dQ of its sequence, for the group's first query head
    number: Any  # number of the tile, for kernels that need one


@gluon.constexpr_function
def _place_of(name):
    fields = KeyTile._fields
    return fields.index(name)


@gluon.jit
def word(work, slot, NAME: gl.constexpr):
    """The field NAME of the KeyTile in a slot. Fields are read only where they are needed, because holding them would take registers."""
    WHICH: gl.constexpr = _place_of(NAME)
    return read_word(work.index(slot).slice(WHICH, 1))


@gluon.jit
def announce(work, full, slot, tile):
    """Writes a KeyTile's words to a slot, and tells the other warps by the slot's barrier in `full`."""
    n = gl.arange(0, work.shape[1], gl.BlockedLayout([1], [32], [1], [0]))
    written = n * 0
    for i in gl.static_range(len(tile)):
        written = gl.where(n == i, tile[i], written)
    work.index(slot).store(written)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def await_tile(work, full, taken):
    """Waits for the next tile: (its slot, whether there is one)."""
    slot = await_full(full, taken, WORK)
    return slot, word(work, slot, "more")


class Seen(NamedTuple):
    """Those fields of a KeyTile that say which queries see it."""

    key: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    tiles: Any  # end - begin
    len_q: Any
    len_k: Any


@gluon.jit
def seen_by(work, slot):
    """The Seen of the tile in a slot."""
    key, begin, full_begin = word(work, slot, "key"), word(work, slot, "begin"), word(work, slot, "full_begin")
    full_end, end = word(work, slot, "full_end"), word(work, slot, "end")
    return Seen(key, begin, full_begin, full_end, end, end - begin, word(work, slot, "len_q"), word(work, slot, "len_k"))


@gluon.jit
def query_tiles(key, len_q, len_k, window_left, window_right, config):
    """The tiles of ROWS queries that see the KEYS keys from `key` on: (begin, full_begin, full_end, end). Those before full_begin and those
    from full_end on need a mask."""
    ROWS: gl.constexpr = config.ROWS
    shift = len_k - len_q
    last = gl.minimum(key + KEYS, len_k) - 1
    tiles = (len_q + ROWS - 1) // ROWS
    begin = 0
    full_begin = 0
    end = tiles
    full_end = tiles
    if config.HAS_RIGHT:
        begin = gl.minimum(gl.maximum(key - shift - window_right, 0) // ROWS, tiles)
        full_begin = (gl.maximum(last - shift - window_right, 0) + ROWS - 1) // ROWS
    if config.HAS_LEFT:
        end = gl.minimum(tiles, (gl.maximum(last - shift + window_left + 1, 0) + ROWS - 1) // ROWS)
        full_end = gl.minimum(tiles, gl.maximum(key - shift + window_left + 1, 0) // ROWS)
    end = gl.maximum(end, begin)
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    if key + KEYS > len_k:  # some keys lie after the end
        full_begin = end
    full_end = gl.maximum(gl.minimum(full_end, end), full_begin)
    return begin, full_begin, full_end, end


@gluon.jit
def first_and_last_query(key, len_q, len_k, window_left, window_right, config, layout: gl.constexpr):
    """(first, last) query that sees each of the HALF keys from `key` on. `last` is used only under HAS_LEFT."""
    shift = len_k - len_q
    j = gl.arange(0, HALF, gl.SliceLayout(1, layout)) + key
    low = gl.where(j < len_k, 0, 1 << 30)
    if config.HAS_RIGHT:  # no query sees the keys after the end
        low = gl.where(j < len_k, j - shift - window_right, 1 << 30)
    return low, j - shift + window_left


@gluon.jit
def next_key_tile(problem, own, config):
    """NEXT_TILE: (the next tile that has keys, its sequence, where the sequence's queries begin).

    The dense tiles of `head_group` heads, whose queries stay in L2, are interleaved, in the order of their first keys. Under ORDERED the
    last keys come first: tiles add to dQ in that order, so that a tile only ever waits for tiles that were taken before it.
    """
    index = gl.atomic_add(problem.counter, 1, sem="relaxed")
    sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = decode_keys(index, problem, config)
    if config.PACKED:
        while (key >= len_k) & (index < problem.n_tiles):
            index = gl.atomic_add(problem.counter, 1, sem="relaxed")
            sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = decode_keys(index, problem, config)
    batch = sequence
    if config.PACKED:
        batch = 0
    begin, full_begin, full_end, end = query_tiles(key, len_q, len_k, problem.window_left, problem.window_right, config)
    more = (index < problem.n_tiles).to(gl.int32)
    return KeyTile(more, batch, kv_head, key, begin, full_begin, full_end, end, len_q, len_k, first_k, dq_tile, index), sequence, first_q


@gluon.jit
def decode_keys(index, problem, config):
    """(sequence, key head, first key, first_q, len_q, first_k, len_k, first tile of dQ) of the index-th tile."""
    n_seqs = problem.n_seqs
    if config.PACKED:
        slots = problem.seqlen_k // KEYS + n_seqs + 1
        kv_head = index // slots
        slot = index % slots
        sequence = find_sequence(problem.cu_seqlens_k, slot, n_seqs, KEYS)
        first_q, len_q = sequence_bounds(problem.cu_seqlens_q, sequence, n_seqs, problem.seqlen_q, True, False)
        first_k, len_k = sequence_bounds(problem.cu_seqlens_k, sequence, n_seqs, problem.seqlen_k, True, True)
        tile = slot - (first_k // KEYS + sequence)
        if config.ORDERED:
            tiles = (len_k + KEYS - 1) // KEYS
            tile = gl.where(tile < tiles, tiles - 1 - tile, tile)
        dq_tile = kv_head * problem.group * problem.head_tiles + first_q // config.ROWS + sequence
    else:
        key_tiles = (problem.seqlen_k + KEYS - 1) // KEYS
        owner, tile = by_groups(index, key_tiles, n_seqs * problem.kv_heads, problem.head_group, True)
        if config.ORDERED:
            tile = key_tiles - 1 - tile
        sequence, kv_head = owner // problem.kv_heads, owner % problem.kv_heads
        first_q, first_k, len_q, len_k = 0, 0, problem.seqlen_q, problem.seqlen_k
        dq_tile = owner * problem.group * problem.head_tiles
    return sequence, kv_head, tile * KEYS, first_q, len_q, first_k, len_k, dq_tile
