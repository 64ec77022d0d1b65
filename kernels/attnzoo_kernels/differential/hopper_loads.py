"""The warp that loads for differential attention's Hopper backward: tiles of keys of both paths and the queries that see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import async_load, box, mbarrier, ring
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS, ROWS, WORK, announce, query_tiles, take_keys

STATS = gl.constexpr(256)  # floats of a box of row statistics; two boxes a step


@gluon.jit
def _load_step(q1_desc, q2_desc, do_desc, stats_desc, tiles, bars, slot, batch, head, row, stats_tile,
               PAIRED: gl.constexpr):
    q1_tiles, q2_tiles, do_tiles, stats_tiles = tiles[0], tiles[1], tiles[2], tiles[3]
    q_full, do_full = bars[0], bars[1]
    bar = q_full.index(slot)
    mbarrier.expect(bar, 2 * q1_desc.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
    STRIDE: gl.constexpr = 2 if PAIRED else 1
    async_load(q1_desc, [batch, head, row, 0], bar, box(q1_tiles.index(slot * STRIDE), q1_desc))
    for n in gl.static_range(2):
        async_load(stats_desc, [0, 0, stats_tile * 2 + n, 0], bar, box(stats_tiles.index(slot * 2 + n), stats_desc))
    async_load(q2_desc, [batch, head, row, 0], bar, box(q2_tiles.index(slot * STRIDE + STRIDE - 1), q2_desc))
    bar = do_full.index(slot)
    mbarrier.expect(bar, do_desc.block_type.nbytes)
    async_load(do_desc, [batch, head, row, 0], bar, box(do_tiles.index(slot), do_desc))


@gluon.jit
def _load_keys(k1_desc, k2_desc, v_desc, tiles, bars, taken, batch, kv_head, key, SHARED_K: gl.constexpr):
    k_tiles, v_tiles = tiles[4], tiles[5]
    k_full, v_full, kv_empty = bars[3], bars[4], bars[5]
    paths: gl.constexpr = 1 if SHARED_K else 2
    mbarrier.wait(kv_empty, (taken & 1) ^ 1)
    mbarrier.expect(k_full, 2 * paths * k1_desc.block_type.nbytes)
    for c in gl.static_range(2):
        async_load(k1_desc, [batch, kv_head, key + c * HALF, 0], k_full, box(k_tiles.index(c), k1_desc))
        if not SHARED_K:
            async_load(k2_desc, [batch, kv_head, key + c * HALF, 0], k_full, box(k_tiles.index(2 + c), k2_desc))
    mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
    for c in gl.static_range(2):
        async_load(v_desc, [batch, kv_head, key + c * HALF, 0], v_full, box(v_tiles.index(c), v_desc))


@gluon.jit
def _load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED: gl.constexpr,
                    SHARED_K: gl.constexpr):
    if PACKED:
        if key + KEYS > len_k:
            _load_keys(tail_descs[3], tail_descs[4], tail_descs[5], tiles, bars, taken, sequence, kv_head, 0, SHARED_K)
        else:
            _load_keys(descs[3], descs[4], descs[5], tiles, bars, taken, 0, kv_head, first_k + key, SHARED_K)
    else:
        _load_keys(descs[3], descs[4], descs[5], tiles, bars, taken, batch, kv_head, key, SHARED_K)


@gluon.jit
def load(descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES: gl.constexpr, PACKED: gl.constexpr,
         HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SHARED_K: gl.constexpr, PAIRED: gl.constexpr):
    """Takes tiles, tells the others which, and loads what they need; descs and tail_descs: of q1, q2, dO, k1, k2 and v. PAIRED: both paths'
    queries go to one buffer in turn."""
    stats_desc = descs[6]
    step_empty, work_full, work_empty = bars[2], bars[6], bars[7]
    group, head_tiles = shape[7], shape[9]
    step = 0
    taken = 0
    more = 1
    while more != 0:
        slot, phase = ring(taken, WORK)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        index, sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = take_keys(shape, n_tiles, PACKED, False)
        batch = sequence
        if PACKED:
            batch = 0
        begin, full_begin, full_end, end = query_tiles(key, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        more = (index < n_tiles).to(gl.int32)
        announce(work, work_full, slot, (more, batch, kv_head, key, begin, full_begin, full_end, end, len_q, len_k, first_k, dq_tile))
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
                            _load_step(tail_descs[0], tail_descs[1], tail_descs[2], stats_desc, tiles, bars, stage, sequence, head, 0,
                                       stats_tile + j, PAIRED)
                        else:
                            _load_step(descs[0], descs[1], descs[2], stats_desc, tiles, bars, stage, 0, head, first_q + j * ROWS,
                                       stats_tile + j, PAIRED)
                    else:
                        _load_step(descs[0], descs[1], descs[2], stats_desc, tiles, bars, stage, batch, head, j * ROWS, stats_tile + j,
                                   PAIRED)
                    if loaded == 0:  # behind the first queries: keys and values have one buffer, which is freed late
                        _load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED,
                                        SHARED_K)
                        loaded = 1
                    step += 1
                stats_tile += head_tiles
            if loaded == 0:
                _load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED, SHARED_K)
        taken += 1
