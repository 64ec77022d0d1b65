"""What the producer warp of differential attention's Hopper backward loads: hooks for both branches' queries and keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_load import load_gradients, load_halves
from attnzoo_kernels._gluon.hopper import async_load, box, mbarrier

STATS = gl.constexpr(256)  # floats of a TMA box of row statistics; a step has two boxes


class Branches(NamedTuple):
    """Descriptors of both branches' operands; k2 is None where they share their keys."""

    q1: Any
    q2: Any
    do: Any
    k1: Any
    k2: Any
    v: Any


@gluon.jit
def _load_queries(branches, stats_desc, first, second, smem, bars, stage, batch, head, row, stats_tile):
    """Both branches' queries into buffers of a stage."""
    bar = bars.q_full.index(stage)
    mbarrier.expect(bar, 2 * branches.q1.block_type.nbytes + 2 * stats_desc.block_type.nbytes)
    async_load(branches.q1, [batch, head, row, 0], bar, box(first, branches.q1))
    for n in gl.static_range(2):
        async_load(stats_desc, [0, 0, stats_tile * 2 + n, 0], bar, box(smem.stats.index(stage * 2 + n), stats_desc))
    async_load(branches.q2, [batch, head, row, 0], bar, box(second, branches.q2))
    load_gradients(branches.do, smem, bars, stage, batch, head, row)


@gluon.jit
def load_queries(branches, stats_desc, smem, bars, tile_params, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr, config):
    """LOAD_Q: both branches' queries use one buffer."""
    _load_queries(branches, stats_desc, smem.q.index(stage * 2), smem.q.index(stage * 2 + 1), smem, bars, stage, batch, head, row,
                  stats_tile)


@gluon.jit
def load_queries_apart(branches, stats_desc, smem, bars, tile_params, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr,
                       config):
    """LOAD_Q: each branch's queries have a buffer of their own."""
    _load_queries(branches, stats_desc, smem.q[0].index(stage), smem.q[1].index(stage), smem, bars, stage, batch, head, row, stats_tile)


@gluon.jit
def load_keys(branches, smem, bars, batch, kv_head, key):
    """LOAD_K: the second branch's keys behind the first's."""
    load_halves(branches.k1, smem.k, bars.k_full, batch, kv_head, key, branches.k2)
    load_halves(branches.v, smem.v, bars.v_full, batch, kv_head, key)
