"""The producer warp of a Hopper forward: it takes tiles, publishes them to the consumers, and loads what they need by TMA."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, place_of_queries
from attnzoo_kernels._gluon.hopper import async_load, await_empty, beside, box, load_box, mbarrier, place
from attnzoo_kernels._gluon.tile_scheduler import leave_at_zero, next_index, publish, rows_of

NONE = gl.constexpr((-1, 0, 0))  # the words that are published after the last tile: a sequence of -1


@gluon.jit
def load_parts(desc, tiles, full, slot, at, config):
    """load_box; with PARTS, one box for each part of the columns."""
    if config.PARTS is None:
        load_box(desc, tiles, full, slot, at)
    else:
        WIDTH: gl.constexpr = tiles.shape[2]
        bar = full.index(slot)
        mbarrier.expect(bar, config.PARTS * desc.block_type.nbytes)
        for part in gl.static_range(config.PARTS):
            async_load(desc, beside(at, part * WIDTH), bar, box(tiles.index(slot * config.PARTS + part), desc))


@gluon.jit
def load_queries(desc, tile, q_step, program, config):
    """Loads a tile of queries, for each consumer its 64 rows, as the q_step-th load of queries."""
    for consumer in gl.static_range(config.CONSUMERS):
        at, phase = place_of_queries(q_step, consumer, config)
        mbarrier.wait(program.bars.q_empty.index(at), phase ^ 1)
        row = tile.row + rows_of(consumer, q_step, config) * ROWS
        load_parts(desc, program.tiles.q, program.bars.q_full, at,
                   place(tile.sequence, tile.head, tile.first_q, row, tile.len_q, config.PACKED and not config.Q_UNGUARDED), config)


class Keys(NamedTuple):
    """Where a tile's keys and values lie: those of one sequence and head."""

    sequence: Any
    kv_head: Any
    first: Any
    length: Any


@gluon.jit
def load_keys(desc, step, keys, key, program, config):
    """Loads the tile of keys that begins at `key`, for a step of the mainloop."""
    slot = await_empty(program.bars.k_empty, step, config.STAGES)
    load_parts(desc, program.tiles.k, program.bars.k_full, slot,
               place(keys.sequence, keys.kv_head, keys.first, key, keys.length, config.PACKED), config)


@gluon.jit
def load_values(step, keys, key, program, config):
    """Loads the values of the tile of keys that begins at `key`, for a step of the mainloop."""
    if config.JOINT_RELEASE:  # the values of a step are released with the keys of the next step
        await_empty(program.bars.k_empty, step + 1, config.STAGES)
    else:
        await_empty(program.bars.v_empty, step, config.STAGES)
    load_box(program.descs.v, program.tiles.v, program.bars.v_full, step % config.STAGES,
             place(keys.sequence, keys.kv_head, keys.first, key, keys.length, config.PACKED))


@gluon.jit
def _start_tile(tile, taken, program, config):
    """Publishes a tile to the consumers and loads its queries, if there is such a tile."""
    if tile.index < program.problem.n_tiles:
        publish(program, taken, tile.words)
        load_queries(program.descs.q, tile, taken, program, config)


@gluon.jit
def start_at(index, before, program, config):
    """Finds the next tile from `index` on, publishes it and loads its queries. Returns the tile. before: the number of this program's last
    tile, counted from 0; -1 if there was none."""
    tile = config.NEXT_TILE(index, program, config)
    _start_tile(tile, before + 1, program, config)
    return tile


@gluon.jit
def stop(index, taken, program):
    """Tells the consumers that there are no more tiles. index: the index past the last tile that this program got from the counter."""
    leave_at_zero(program.problem, index)
    publish(program, taken, NONE)


@gluon.jit
def load_piece(tile, keys, begin, end, step, taken, program, config, NEXT: gl.constexpr = None, at=None):
    """Loads a piece of a tile's keys and values: the tiles of keys end - 1 down to begin. Before the last values of the tile's last piece
    it starts the next tile of queries. Returns (tile, next step, the tile's number, where the next piece is).

    NEXT(at, program, config): where the next piece of this tile of queries is, below 0 if this is the last one. None: this is the last one.
    """
    following = -1
    key = (end - 1) * config.BLOCK_N
    for j in range(end - begin):
        load_keys(program.descs.k, step, keys, key, program, config)
        if config.LOAD_BIAS is not None:
            config.LOAD_BIAS(step % config.STAGES, tile, key, program, config)
        if NEXT is not None:
            if j == 0:  # found while loads are in flight, so that the next ones do not wait for it
                following = NEXT(at, program, config)
        # before the load of the values, which may have to wait; not earlier, so that the program that is ready first gets the tile
        if (j == end - begin - 1) & (following < 0):
            tile = start_at(next_index(program.problem), taken, program, config)
            taken += 1
        load_values(step, keys, key, program, config)
        key -= config.BLOCK_N
        step += 1
    return tile, step, taken, following


@gluon.jit
def produce_prefetched(program, config):
    """PRODUCE where a tile's queries have room while the consumers work on the tile before: they are loaded before the last values of that
    tile."""
    problem = program.problem
    step = 0
    taken = 0
    tile = start_at(gl.program_id(0), -1, program, config)
    while tile.index < problem.n_tiles:
        begin, end = config.LOADED_TILES(tile, program, config)
        keys = Keys(tile.sequence, tile.head // problem.group, tile.first_k, tile.len_k)
        tile, step, taken, _ = load_piece(tile, keys, begin, end, step, taken, program, config)
    stop(tile.index, taken, program)


@gluon.jit
def load_segment(q_desc, k_desc, tile, keys, first, entry, tiles, step, q_step, program, config):
    """Loads `tiles` tiles of keys and values, and the queries of `tile` beside the first one. Returns (step, q_step).

    The first tile lies `entry` tiles after the key `first`. The next ones follow downwards, unless NEXT_KEYS gives them.
    """
    for j in range(tiles):
        key = first + entry * config.BLOCK_N
        if config.NEXT_KEYS is None:
            entry -= 1
        else:
            entry = config.NEXT_KEYS(j, tile, program, config)
        load_keys(k_desc, step, keys, key, program, config)
        if j == 0:
            load_queries(q_desc, tile, q_step, program, config)
        load_values(step, keys, key, program, config)
        step += 1
    return step, q_step + 1


@gluon.jit
def load_one_segment(tile, step, q_step, program, config):
    """LOAD_TILE for all keys that a tile sees. The queries are loaded after the first keys. If there is one query slot, loading them
    earlier, before the last values of the tile before, would hold these values up until the consumers release the slot."""
    begin, end = config.LOADED_TILES(tile, program, config)
    keys = Keys(tile.sequence, tile.head // program.problem.group, tile.first_k, tile.len_k)
    return load_segment(program.descs.q, program.descs.k, tile, keys, 0, end - 1, end - begin, step, q_step, program, config)


@gluon.jit
def produce_segments(program, config):
    """PRODUCE where queries are loaded beside the first keys that they see. LOAD_TILE loads one segment of keys after the other."""
    problem = program.problem
    step = 0
    taken = 0
    q_step = 0
    tile = config.NEXT_TILE(gl.program_id(0), program, config)
    while tile.index < problem.n_tiles:
        publish(program, taken, tile.words)
        index = tile.index
        if config.INDEX_EARLY:
            index = next_index(problem)
        step, q_step = config.LOAD_TILE(tile, step, q_step, program, config)
        if not config.INDEX_EARLY:  # so that the program that is ready first gets the next tile
            index = next_index(problem)
        tile = config.NEXT_TILE(index, program, config)
        taken += 1
    stop(tile.index, taken, program)
