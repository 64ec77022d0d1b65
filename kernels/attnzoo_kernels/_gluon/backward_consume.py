"""The mainloop of a Hopper backward's consumers. Each consumer sums up dK and dV of its keys over the steps of queries that see them.

A step is one tile of queries of one head. Steps are numbered over all tiles of keys of a program, so that a step's number gives its slot in
the rings of shared memory. In the functions below,
    at          is the number of the first step of a tile of keys
    bounds      are (begin, full_begin, full_end, end): the tiles of queries that see it, as in KeyTile
    low, high   are the first and the last query that sees each of a consumer's keys
    tile_params is what TILE_PARAMS returned for the tile of keys, head_params what HEAD_PARAMS returned for a query head
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_dq import dq_before, hand_on_dq, sum_so_far, write_to
from attnzoo_kernels._gluon.backward_tiles import HALF, await_tile, first_and_last_query, seen_by, word
from attnzoo_kernels._gluon.hopper import mbarrier, place, product_layout, store_tile, tma, warpgroup_mma_wait


class Gradients(NamedTuple):
    """Where dK and dV are stored: through TMA, except for the ends of packed sequences, which go through pointers."""

    dk_desc: Any
    dv_desc: Any
    dk_ptr: Any
    dv_ptr: Any
    stride_dk: Any  # between rows
    stride_dv: Any
    stride_dk_head: Any
    stride_dv_head: Any
    dv_from: Any = None  # float32 (tiles, KEYS, WIDTH): the sum of dV from earlier launches, which is added; null: there is none
    dv_to: Any = None  # where the sum is stored for the next launch; null: dV is stored as the gradient


@gluon.jit
def store_keys(desc, pointer, stride_row, stride_head, buffer, x, batch, kv_head, first_k, key, len_k, DIM: gl.constexpr,
               PACKED: gl.constexpr):
    """Stores the rows from `key` on of a sequence. Rows past the sequence's end are not stored."""
    if PACKED:
        if key + HALF > len_k:
            rows = key + gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))
            columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
            at = pointer + ((first_k + rows).to(gl.int64) * stride_row + kv_head * stride_head)[:, None] + columns[None, :]
            gl.store(at, x, mask=(rows < len_k)[:, None] & (columns < DIM)[None, :])
        else:
            store_tile(desc, buffer, x, place(0, kv_head, first_k, key, len_k, False), False)
    else:
        store_tile(desc, buffer, x, place(batch, kv_head, 0, key, len_k, False), False)


@gluon.jit
def store_dv(grads, buffer, dv, batch, kv_head, first_k, key, len_k, config):
    store_keys(grads.dv_desc, grads.dv_ptr, grads.stride_dv, grads.stride_dv_head, buffer, dv.to(buffer.dtype), batch, kv_head, first_k,
               key, len_k, config.VALUE_DIM, config.PACKED)


@gluon.jit
def store_dk(grads, buffer, dk, batch, kv_head, first_k, key, len_k, config):
    store_keys(grads.dk_desc, grads.dk_ptr, grads.stride_dk, grads.stride_dk_head, buffer, dk.to(buffer.dtype), batch, kv_head, first_k,
               key, len_k, config.HEAD_DIM, config.PACKED)


@gluon.jit
def end_tile(work, bars, slot, NEEDS_NUMBER: gl.constexpr = False):
    """Releases K, V and the tile's slot. Returns what storing the tile needs: (batch, key head, first key, where the sequence's keys begin,
    how many keys the sequence has, the tile's number if NEEDS_NUMBER)."""
    mbarrier.arrive(bars.kv_empty, count=1)
    batch, kv_head = word(work, slot, "batch"), word(work, slot, "kv_head")
    key, first_k, len_k = word(work, slot, "key"), word(work, slot, "first_k"), word(work, slot, "len_k")
    number = 0
    if NEEDS_NUMBER:
        number = word(work, slot, "number")
    mbarrier.arrive(bars.work_empty.index(slot), count=1)
    return batch, kv_head, key, first_k, len_k, number


@gluon.jit
def all_queries(tile_params, smem, slot, member, bounds):
    """BOUNDS: (begin, full_begin, full_end, end) of a query head's steps; those before full_begin and from full_end on need a mask."""
    return bounds


@gluon.jit
def same_tile(tile_params, bars, step, n, config):
    """QUERY_TILE: the tile of queries of the n-th step is the n-th one."""
    return n


@gluon.jit
def pair_start(own, smem, slot, config):
    """INIT_GRADS: (dK, dV), zeros."""
    dk = gl.zeros([HALF, config.WIDTH], gl.float32, product_layout(config.WIDTH))
    return dk, gl.zeros([HALF, config.VALUE_WIDTH], gl.float32, product_layout(config.VALUE_WIDTH))


@gluon.jit
def scale_of_head(scale, tile_params, smem, slot, member, dq_tile, problem, config, ME: gl.constexpr):
    """HEAD_PARAMS: the scale that brings scores to base 2."""
    return scale


@gluon.jit
def head_steps(sums, at, before, bounds, dq_tile, dq_end, low, high, tile_params, smem, bars, dq_desc, head_params, config,
               ME: gl.constexpr):
    """The steps of one query head, in segments with a mask and without. Each step hands on its part of dQ.

    sums: what STEP updates and returns. before: what is added to the number of a tile of queries to get the number of its step. dq_tile:
    the number of the head's first tile of dQ. dq_end: under DQ_LAGS, the end of the dQ tiles of the previous head.
    """
    ROWS: gl.constexpr = config.ROWS
    for segment in gl.static_range(1 if config.LISTED else 0, 3 if config.LISTED or config.HAS_LEFT else 2):
        for i in range(bounds[segment], bounds[segment + 1]):
            j = config.QUERY_TILE(tile_params, bars, before + i, i, config)
            made = dq_tile + j
            if config.DQ_LAGS:
                made = gl.where(i > bounds[0], dq_tile + j, dq_end) - 1
            if not config.DQ_WARP:
                made += config.DQ_BUFFER(tile_params, j, config)
            sums = config.STEP(sums, smem, bars, dq_desc, made, before + i, before + i > at, head_params, low - j * ROWS, high - j * ROWS,
                               config, ME, segment != 1)
    return sums


@gluon.jit
def hand_on_last_dq(at, step, dq_end, smem, bars, dq_desc, config, ME: gl.constexpr):
    """Under DQ_LAGS, hands on dQ of the step before `step`, if that is one of this tile's steps."""
    if config.DQ_LAGS:
        if step > at:
            dq = warpgroup_mma_wait(0, deps=(dq_before(smem, bars, step, True, config, ME),))
            hand_on_dq(dq, dq_desc, smem, dq_end - 1, bars, step, config, ME)


@gluon.jit
def pair_mainloop(state, at, bounds, low, high, tile_params, slot, smem, bars, dq_desc, problem, scale, config, ME: gl.constexpr):
    """MAINLOOP: the steps of all query heads of a group. With INIT_SUMS, each head has sums of its own beside `state`."""
    dq_tile = word(smem.work, slot, "dq_tile")
    before = at - bounds[0]
    dq_end = dq_tile  # the end of the dQ tiles made so far
    for member in range(problem.group):
        head_bounds = config.BOUNDS(tile_params, smem, slot, member, bounds)
        head_params = config.HEAD_PARAMS(scale, tile_params, smem, slot, member, dq_tile, problem, config, ME)
        sums = state
        if config.INIT_SUMS is not None:
            sums = state + (config.INIT_SUMS(),)
        sums = head_steps(sums, at, before, head_bounds, dq_tile, dq_end, low, high, tile_params, smem, bars, dq_desc, head_params, config,
                          ME)
        if config.INIT_SUMS is not None:
            config.STORE_SUMS(sums[len(state)], head_params, head_bounds, config, ME)
        state = sums[:len(state)]
        before += head_bounds[3] - head_bounds[0]
        dq_end = dq_tile + head_bounds[3]
        dq_tile += problem.head_tiles
    hand_on_last_dq(at, before + bounds[0], dq_end, smem, bars, dq_desc, config, ME)
    return state, before + bounds[0]


@gluon.jit
def pair_store(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME: gl.constexpr):
    """STORE_GRADS: dK and dV. The sum of dV may go through memory from one launch to the next: see Gradients."""
    dk, dv = state
    if grads.dv_from is not None:
        dv += sum_so_far(grads.dv_from, number, ME, config.VALUE_WIDTH, product_layout(config.VALUE_WIDTH))
        if grads.dv_to.to(gl.int64, bitcast=True) != 0:
            write_to(grads.dv_to + (number * 2 + ME).to(gl.int64) * (HALF * config.VALUE_WIDTH), dv)
        else:
            store_dv(grads, buffer, dv, batch, kv_head, first_k, row, len_k, config)
    else:
        store_dv(grads, buffer, dv, batch, kv_head, first_k, row, len_k, config)
    store_dk(grads, buffer, dk * dk_scale, batch, kv_head, first_k, row, len_k, config)


@gluon.jit
def consume(grads, smem, bars, dq_desc, problem, own, scale, dk_scale, config, ME: gl.constexpr):
    """A consumer's whole work: dK and dV of its 64 keys of each tile. own: the variant's own struct, which only its hooks read."""
    work = smem.work
    taken = 0
    at = 0
    slot, more = await_tile(work, bars.work_full, taken)
    while more != 0:
        seen = seen_by(work, slot)
        bounds = seen.begin, seen.full_begin, seen.full_end, seen.end
        tile_params = own
        if config.TILE_PARAMS is not None:
            tile_params = config.TILE_PARAMS(own, seen.key, seen.len_q, seen.len_k, config)
        low, high = first_and_last_query(seen.key + ME * HALF, seen.len_q, seen.len_k, problem.window_left, problem.window_right, config,
                                         product_layout(config.ROWS))
        state = config.INIT_GRADS(own, smem, slot, config)
        mbarrier.wait(bars.k_full, taken & 1)
        mbarrier.wait(bars.v_full, taken & 1)
        state, at = config.MAINLOOP(state, at, bounds, low, high, tile_params, slot, smem, bars, dq_desc, problem, scale, config, ME)
        batch, kv_head, key, first_k, len_k, number = end_tile(work, bars, slot, config.NEEDS_NUMBER or grads.dv_from is not None)
        config.STORE_GRADS(grads, own, smem.out.index(ME), state, dk_scale, batch, kv_head, first_k, key + ME * HALF, len_k, number, config,
                           ME)
        taken += 1
        slot, more = await_tile(work, bars.work_full, taken)
    tma.store_wait(0)
