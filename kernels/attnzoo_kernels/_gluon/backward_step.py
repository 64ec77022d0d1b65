"""One step of a Hopper backward by two consumers, its barriers and its shared memory. All tiles of scores are transposed, keys by queries.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_dq import dq_before, dq_half, hand_on_dq
from attnzoo_kernels._gluon.backward_tiles import HALF, WORK
from attnzoo_kernels._gluon.hopper import (
    await_full,
    barrier,
    barriers,
    fence_async_shared,
    mbarrier,
    product_layout,
    release,
    ring,
    shared_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)


class Barriers(NamedTuple):
    """`full`: the data was loaded or made. `empty`: it was read. Barriers that each consumer has its own of are tuples."""

    q_full: Any
    do_full: Any
    step_empty: Any
    k_full: Any
    v_full: Any
    kv_empty: Any
    work_full: Any
    work_empty: Any
    ds_full: Any
    dq_full: Any
    dq_empty: Any
    ds_empty: Any


class Shared(NamedTuple):
    """Tiles in shared memory."""

    q: Any
    do: Any
    stats: Any  # LSE in base 2 and delta of each query
    k: Any
    v: Any
    ds: Any  # dS of two steps and both consumers
    dq: Any  # each consumer's half of dQ, from where TMA adds it to global memory
    out: Any  # dK or dV, from where TMA stores them
    columns: Any  # the numbers 0, 1, 2 ... of a step's queries, for masks
    work: Any  # the words of KeyTile


@gluon.jit
def step_barriers(STAGES: gl.constexpr, KEY_READERS: gl.constexpr, TILE_READERS: gl.constexpr):
    """The first eight of Barriers, for what the producer warp loads. Both consumers read each step. KEY_READERS: how many arrivals release
    the keys and values. TILE_READERS: how many release a tile's words."""
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
        mbarrier.init(work_empty.index(i), count=TILE_READERS)
    return q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty


@gluon.jit
def pair_barriers(config):
    """Barriers of two consumers that share the making of dQ. DQ_WARP: a warp adds dQ to memory. DQ_LAGS: dQ is made one step late."""
    of_steps = step_barriers(config.STAGES, 2, 3 if config.DQ_WARP else 2)
    ds_full = (barriers(2, 1), barriers(2, 1))
    ds_empty, dq_full, dq_empty = (), (), ()
    if config.DQ_LAGS:
        ds_empty = (barriers(2, 1), barriers(2, 1))
    if config.DQ_WARP:
        dq_full, dq_empty = barriers(2, 1), barriers(2, 1)
    return Barriers(*of_steps, ds_full, dq_full, dq_empty, ds_empty)


@gluon.jit
def column_numbers(ROWS: gl.constexpr):
    """The `columns` of Shared, for steps of ROWS queries."""
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    return columns


@gluon.jit
def tile_words():
    """Shared memory in which the producer warp describes tiles to the other warps."""
    return gl.allocate_shared_memory(gl.int32, [WORK, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def pair_tiles(dtype: gl.constexpr, config, columns=None):
    """The Shared of pair_step. columns: its `columns`, if they have shared memory already."""
    ROWS: gl.constexpr = config.ROWS
    return Shared(
        q=shared_tiles(dtype, config.STAGES, ROWS, config.WIDTH), do=shared_tiles(dtype, config.STAGES, ROWS, config.WIDTH),
        k=shared_tiles(dtype, 2, HALF, config.WIDTH), v=shared_tiles(dtype, 2, HALF, config.WIDTH), out=shared_tiles(dtype, 2, HALF,
                                                                                                                     config.WIDTH),
        ds=shared_tiles(dtype, 4, HALF, ROWS), dq=shared_tiles(gl.float32, 2, ROWS * config.WIDTH // 64, 32),
        stats=shared_tiles(gl.float32, config.STAGES, 1, 2 * ROWS), columns=column_numbers(ROWS) if columns is None else columns,
        work=tile_words())


@gluon.jit
def row_statistics(stats_tiles, stage, WHICH: gl.constexpr, ROWS: gl.constexpr, column: gl.constexpr):
    """A statistic of each query of a step. WHICH: 0 for the LSE in base 2, 1 for delta."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return stats_tiles.index(stage)._reinterpret(gl.float32, [2 * ROWS], flat).slice(WHICH * ROWS, ROWS).load(column)


@gluon.jit
def masked_scores(x, columns, low, high, config):
    """Masks, by -inf, the queries that do not see a key. The queries' numbers are read from shared memory: in registers they would be
    spilled."""
    i = columns.load(gl.SliceLayout(0, x.type.layout))[None, :]
    seen = i >= low[:, None]
    if config.HAS_LEFT:
        seen = seen & (i <= high[:, None])
    return gl.where(seen, x, -float("inf"))


@gluon.jit
def base_2_scores(scores, smem, stage, scale, low, high, config, MASKED: gl.constexpr):
    """Scores in base 2 minus the LSE; exp2 of them are the weights."""
    x = scores * scale - row_statistics(smem.stats, stage, 0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
    if MASKED:
        x = masked_scores(x, smem.columns, low, high, config)
    return x


@gluon.jit
def scores_in_flight(q_tiles, smem, bars, step, config, ME: gl.constexpr):
    """(stage of a step, its scores, still in flight). If queries and keys are tuples of parts, the products of the parts are summed in one
    accumulator."""
    stage = await_full(bars.q_full, step, config.STAGES)
    if isinstance(q_tiles, gl.tuple):
        PARTS: gl.constexpr = len(q_tiles)
        pending = gl.zeros([HALF, config.ROWS], gl.float32, product_layout(config.ROWS))
        for n in gl.static_range(PARTS):
            # [HALF, width of a part] x [width of a part, ROWS]
            pending = warpgroup_mma(smem.k[n].index(ME), q_tiles[n].index(stage).permute((1, 0)), pending, use_acc=n > 0, is_async=True)
    else:
        ROWS: gl.constexpr = q_tiles.shape[1]
        # [HALF, WIDTH] x [WIDTH, ROWS]
        pending = warpgroup_mma(smem.k.index(ME), q_tiles.index(stage).permute((1, 0)),
                                gl.zeros([HALF, ROWS], gl.float32, product_layout(ROWS)), use_acc=False, is_async=True)
    return stage, pending


@gluon.jit
def products(q_tiles, smem, bars, step, config, ME: gl.constexpr):
    """(stage of a step, its scores, dO Vᵀ still in flight)."""
    stage, pending = scores_in_flight(q_tiles, smem, bars, step, config, ME)
    await_full(bars.do_full, step, config.STAGES)
    # [HALF, VALUE_WIDTH] x [VALUE_WIDTH, config.ROWS]
    dweights_pending = warpgroup_mma(smem.v.index(ME), smem.do.index(stage).permute((1, 0)),
                                     gl.zeros([HALF, config.ROWS], gl.float32, product_layout(config.ROWS)), use_acc=False, is_async=True)
    return stage, warpgroup_mma_wait(1, deps=(pending,)), dweights_pending


@gluon.jit
def add_step(sums, p, dscores, q_tiles, smem, bars, dq_desc, dq_tile, step, stage, some, step_params, head_params, config, ME: gl.constexpr,
             DV_PENDING: gl.constexpr):
    """Adds a step's share to `sums`, which are dK, dV and, with INIT_SUMS, the variant's own sums. Hands on this consumer's half of dQ.
    Returns the sums.

    p: the weights in 16 bits; under DV_PENDING, their product with dO is already in flight, in dV. Under DQ_LAGS, dQ is that of the step
    before, if this tile of keys had one (`some`); then a consumer need not wait for the other's dS of the same step.

    The product for dQ comes before that for dK, so that dQ is sent to memory while the tensor cores compute dK.
    """
    dk, dv = sums[0], sums[1]
    if config.STORE_DS is not None:
        config.STORE_DS(dscores, smem, config, ME)
    ds_slot, ds_phase = ring(step, 2)
    if config.DQ_LAGS:
        mbarrier.wait(bars.ds_empty[ME].index(ds_slot), ds_phase ^ 1)
    smem.ds.index(ds_slot * 2 + ME).store(dscores)
    dv_pending = dv
    if not DV_PENDING:
        # [HALF, config.ROWS] x [config.ROWS, VALUE_WIDTH]
        dv_pending = warpgroup_mma(p, smem.do.index(stage), dv, is_async=True)
    fence_async_shared()
    barrier()
    release(bars.ds_full[ME].index(ds_slot))
    started = ()
    if config.INIT_SUMS is not None:
        started = config.START_SUMS(sums[2], smem.ds.index(ds_slot * 2 + ME), head_params, smem, config, ME)
    ds = gl.convert_layout(dscores, gl.DotOperandLayout(0, dk.type.layout, 2))
    if config.DQ_LAGS:
        dq_pending = dq_before(smem, bars, step, some, config, ME)
    else:
        mbarrier.wait(bars.ds_full[1 - ME].index(ds_slot), ds_phase)
        dq_pending = dq_half(smem, ds_slot, config, ME)
    # [HALF, ROWS] x [ROWS, WIDTH]
    dk_pending = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
    waited = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending, p) + started)
    if config.DQ_LAGS:
        if some:
            hand_on_dq(waited[1], dq_desc, smem, dq_tile, bars, step, config, ME)
    else:
        hand_on_dq(waited[1], dq_desc, smem, dq_tile, bars, step, config, ME)
    further = ()
    if config.INIT_SUMS is not None:
        further = (config.END_SUMS(waited[3:], step_params, head_params, dq_tile, config),)
    dk, ds = warpgroup_mma_wait(0, deps=(dk_pending, ds))
    release(bars.step_empty.index(stage))
    return (dk, waited[0]) + further


@gluon.jit
def softmax_gradient(weights, dweights, smem, stage, config):
    """GRADIENT of a softmax: dS = P * (dP - delta)."""
    delta = row_statistics(smem.stats, stage, 1, config.ROWS, gl.SliceLayout(0, product_layout(config.ROWS)))
    return weights * (dweights - delta[None, :])


@gluon.jit
def softmax_weights(scores, step_params, smem, stage, head_params, low, high, config, MASKED: gl.constexpr):
    """WEIGHTS of a softmax; `head_params` is the scale that brings scores to base 2."""
    return gl.exp2(base_2_scores(scores, smem, stage, head_params, low, high, config, MASKED))


@gluon.jit
def pair_step(sums, smem, bars, dq_desc, dq_tile, step, some, head_params, low, high, config, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP: adds a step's share to the sums, and hands on dQ."""
    step_params = ()
    if config.STEP_PARAMS is not None:
        step_params = config.STEP_PARAMS(dq_tile, head_params, config)
    stage, scores, dweights_pending = products(smem.q, smem, bars, step, config, ME)
    weights = config.WEIGHTS(scores, step_params, smem, stage, head_params, low, high, config, MASKED)
    p = gl.convert_layout(weights.to(smem.q.dtype), gl.DotOperandLayout(0, sums[0].type.layout, 2))
    dweights = warpgroup_mma_wait(0, deps=(dweights_pending,))
    dscores = config.GRADIENT(weights, dweights, smem, stage, config).to(smem.q.dtype)
    return add_step(sums, p, dscores, smem.q, smem, bars, dq_desc, dq_tile, step, stage, some, step_params, head_params, config, ME, False)
