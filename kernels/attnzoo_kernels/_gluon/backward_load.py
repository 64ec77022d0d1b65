"""The producer warp of a Hopper backward: it loads tiles of keys and the queries that see them; hooks say what a variant loads."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, WORK, announce
from attnzoo_kernels._gluon.hopper import async_load, await_empty, box, mbarrier


class Source(NamedTuple):
    """TMA descriptors of what is loaded."""

    tensors: Any  # Operands, or what the variant's hooks take in their place
    tails: Any  # the same for the tails: copies of the ends of packed sequences, filled up with zeros; None for dense tensors
    stats: Any


class Operands(NamedTuple):
    q: Any  # q and k are tuples where their columns are split into parts
    k: Any
    v: Any
    do: Any


@gluon.constexpr_function
def box_bytes(desc):
    """How many bytes a descriptor's box has, or the boxes of all parts together."""
    return sum(map(box_bytes, desc)) if isinstance(desc, tuple | gl.tuple) else desc.block_type.nbytes


@gluon.jit
def queries_in_flight(desc, tiles, stage, at, full):
    """Starts to load a step's queries. The barrier already expects their bytes."""
    if isinstance(desc, gl.tuple):
        PARTS: gl.constexpr = len(desc)
        for n in gl.static_range(PARTS):
            async_load(desc[n], at, full, box(tiles[n].index(stage), desc[n]))
    else:
        async_load(desc, at, full, box(tiles.index(stage), desc))


@gluon.jit
def load_step(operands, stats_desc, smem, bars, stage, q_batch, batch, head, row, stats_tile):
    """Loads the queries from `row` on, their row statistics, if there are any, and the gradients of their output."""
    bar = bars.q_full.index(stage)
    if stats_desc is None:
        mbarrier.expect(bar, box_bytes(operands.q))
    else:
        mbarrier.expect(bar, box_bytes(operands.q) + stats_desc.block_type.nbytes)
    queries_in_flight(operands.q, smem.q, stage, [q_batch, head, row, 0], bar)
    if stats_desc is not None:
        async_load(stats_desc, [0, 0, stats_tile, 0], bar, box(smem.stats.index(stage), stats_desc))
    load_gradients(operands.do, smem, bars, stage, batch, head, row)


@gluon.jit
def load_gradients(do_desc, smem, bars, stage, batch, head, row):
    """Loads the gradients of the output of a step's queries."""
    bar = bars.do_full.index(stage)
    mbarrier.expect(bar, do_desc.block_type.nbytes)
    async_load(do_desc, [batch, head, row, 0], bar, box(smem.do.index(stage), do_desc))


@gluon.jit
def halves_in_flight(desc, tiles, full, batch, kv_head, key, FIRST: gl.constexpr):
    """Starts to load KEYS rows from `key` on into two tiles. The barrier already expects their bytes."""
    if isinstance(desc, gl.tuple):
        PARTS: gl.constexpr = len(desc)
        for n in gl.static_range(PARTS):
            halves_in_flight(desc[n], tiles[n], full, batch, kv_head, key, FIRST)
    else:
        for half in gl.static_range(2):
            async_load(desc, [batch, kv_head, key + half * HALF, 0], full, box(tiles.index(FIRST + half), desc))


@gluon.jit
def load_halves(desc, tiles, full, batch, kv_head, key, second=None):
    """Loads KEYS rows from `key` on into two tiles, and those of a `second` descriptor into the next two, all for one barrier."""
    mbarrier.expect(full, (2 if second is None else 4) * box_bytes(desc))
    halves_in_flight(desc, tiles, full, batch, kv_head, key, 0)
    if second is not None:
        halves_in_flight(second, tiles, full, batch, kv_head, key, 2)


@gluon.jit
def load_queries(operands, stats_desc, smem, bars, tile_params, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr, config):
    """LOAD_Q: loads a step's queries. j: number of their tile; IN_TAIL: they are read from the tail of a packed sequence."""
    load_step(operands, stats_desc, smem, bars, stage, batch, batch, head, row, stats_tile)


@gluon.jit
def load_keys(operands, smem, bars, batch, kv_head, key):
    """LOAD_K: loads a tile's keys and values."""
    load_halves(operands.k, smem.k, bars.k_full, batch, kv_head, key)
    load_halves(operands.v, smem.v, bars.v_full, batch, kv_head, key)


@gluon.jit
def _load_queries(source, smem, bars, tile_params, stage, tile, sequence, first_q, head, j, stats_tile, config):
    """Calls LOAD_Q for the j-th tile of queries. A tile that crosses the end of a packed sequence is loaded from the tail, which has zeros
    after the end."""
    ROWS: gl.constexpr = config.ROWS
    if config.PACKED:
        if (j + 1) * ROWS > tile.len_q:
            config.LOAD_Q(source.tails, source.stats, smem, bars, tile_params, stage, sequence, head, 0, j, stats_tile + j, True, config)
        else:
            config.LOAD_Q(source.tensors, source.stats, smem, bars, tile_params, stage, 0, head, first_q + j * ROWS, j, stats_tile + j,
                          False, config)
    else:
        config.LOAD_Q(source.tensors, source.stats, smem, bars, tile_params, stage, tile.batch, head, j * ROWS, j, stats_tile + j, False,
                      config)


@gluon.jit
def _load_keys(source, smem, bars, tile, sequence, taken, config):
    mbarrier.wait(bars.kv_empty, (taken & 1) ^ 1)
    if config.PACKED:
        if tile.key + KEYS > tile.len_k:
            config.LOAD_K(source.tails, smem, bars, sequence, tile.kv_head, 0)
        else:
            config.LOAD_K(source.tensors, smem, bars, 0, tile.kv_head, tile.first_k + tile.key)
    else:
        config.LOAD_K(source.tensors, smem, bars, tile.batch, tile.kv_head, tile.key)


@gluon.jit
def all_steps(tile_params, tile, member):
    """LOADED_STEPS: (first step, end, state) of a query head; NEXT_QUERIES gets the state."""
    return tile.begin, tile.end, 0


@gluon.jit
def next_step(tile_params, state, n):
    """NEXT_QUERIES: (tile of queries of the n-th step, next state)."""
    return n, state


@gluon.jit
def load(source, smem, bars, problem, own, config):
    """The producer warp's whole work: takes tiles of keys, publishes them, and loads what they need."""
    step = 0
    taken = 0
    more = 1
    while more != 0:
        slot = await_empty(bars.work_empty, taken, WORK)
        tile, sequence, first_q = config.NEXT_TILE(problem, own, config)
        more = tile.more
        announce(smem.work, bars.work_full, slot, tile)
        if more != 0:
            tile_params = own
            if config.TILE_PARAMS is not None:
                tile_params = config.TILE_PARAMS(own, tile.key, tile.len_q, tile.len_k, config)
            stats_tile = tile.dq_tile
            loaded = 0
            for member in range(problem.group):
                head = tile.kv_head * problem.group + member
                begin, end, state = config.LOADED_STEPS(tile_params, tile, member)
                for n in range(begin, end):
                    j, state = config.NEXT_QUERIES(tile_params, state, n)
                    stage = await_empty(bars.step_empty, step, config.STAGES)
                    _load_queries(source, smem, bars, tile_params, stage, tile, sequence, first_q, head, j, stats_tile, config)
                    # keys and values have a single buffer, which is released late, so the first queries are loaded before them
                    if loaded == 0:
                        _load_keys(source, smem, bars, tile, sequence, taken, config)
                        loaded = 1
                    step += 1
                stats_tile += problem.head_tiles
            if loaded == 0:
                _load_keys(source, smem, bars, tile, sequence, taken, config)
        taken += 1
