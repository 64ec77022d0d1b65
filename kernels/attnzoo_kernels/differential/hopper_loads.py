"""What the loading warp of differential attention's Hopper backward loads: hooks for both branches' queries and keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_load import load_gradients, load_halves
from attnzoo_kernels._gluon.backward_tiles import KEYS
from attnzoo_kernels._gluon.hopper import async_load, box, mbarrier

STATS = gl.constexpr(256)  # floats of a box of row statistics; two boxes a step


class Source(NamedTuple):
    """Descriptors as those of the library, of both branches; k2 is None where they share their keys."""

    q1: Any
    q2: Any
    do: Any
    k1: Any
    k2: Any
    v: Any
    stats: Any
    q1_tail: Any
    q2_tail: Any
    do_tail: Any
    k1_tail: Any
    k2_tail: Any
    v_tail: Any


@gluon.jit
def _load_step(q1_desc, q2_desc, do_desc, stats_desc, smem, bars, stage, batch, head, row, stats_tile):
    bar = bars.q_full.index(stage)
    mbarrier.expect(bar, 2 * q1_desc.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
    async_load(q1_desc, [batch, head, row, 0], bar, box(smem.q.index(stage * 2), q1_desc))
    for n in gl.static_range(2):
        async_load(stats_desc, [0, 0, stats_tile * 2 + n, 0], bar, box(smem.stats.index(stage * 2 + n), stats_desc))
    async_load(q2_desc, [batch, head, row, 0], bar, box(smem.q.index(stage * 2 + 1), q2_desc))
    load_gradients(do_desc, smem, bars, stage, batch, head, row)


@gluon.jit
def load_queries(source, smem, bars, of_tile, stage, tile, sequence, first_q, head, j, stats_tile, c):
    """LOAD_Q: both branches' queries lie in one buffer in turn."""
    ROWS: gl.constexpr = c.ROWS
    if c.PACKED:
        if (j + 1) * ROWS > tile.len_q:
            _load_step(source.q1_tail, source.q2_tail, source.do_tail, source.stats, smem, bars, stage, sequence, head, 0, stats_tile + j)
        else:
            _load_step(source.q1, source.q2, source.do, source.stats, smem, bars, stage, 0, head, first_q + j * ROWS, stats_tile + j)
    else:
        _load_step(source.q1, source.q2, source.do, source.stats, smem, bars, stage, tile.batch, head, j * ROWS, stats_tile + j)


@gluon.jit
def _load_keys(k1_desc, k2_desc, v_desc, smem, bars, batch, kv_head, key):
    BRANCHES: gl.constexpr = 1 if k2_desc is None else 2
    mbarrier.expect(bars.k_full, 2 * BRANCHES * k1_desc.block_type.nbytes)
    load_halves(k1_desc, smem.k, bars.k_full, batch, kv_head, key)
    if BRANCHES == 2:
        load_halves(k2_desc, smem.k, bars.k_full, batch, kv_head, key, 2)
    mbarrier.expect(bars.v_full, 2 * v_desc.block_type.nbytes)
    load_halves(v_desc, smem.v, bars.v_full, batch, kv_head, key)


@gluon.jit
def load_keys(source, smem, bars, tile, sequence, c):
    """LOAD_K: the second branch's keys behind the first's."""
    if c.PACKED:
        if tile.key + KEYS > tile.len_k:
            _load_keys(source.k1_tail, source.k2_tail, source.v_tail, smem, bars, sequence, tile.kv_head, 0)
        else:
            _load_keys(source.k1, source.k2, source.v, smem, bars, 0, tile.kv_head, tile.first_k + tile.key)
    else:
        _load_keys(source.k1, source.k2, source.v, smem, bars, tile.batch, tile.kv_head, tile.key)
