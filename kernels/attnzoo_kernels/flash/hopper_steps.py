"""Steps of the Hopper backward's walk by pairs of consumers: what one does with some queries, and how dQ leaves for memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import (
    async_add,
    async_store,
    barrier,
    box,
    fence_async_shared,
    mbarrier,
    release,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels.flash.hopper_gradients import base_2_scores, dq_product, row_statistics
from attnzoo_kernels.flash.hopper_loads import HALF


@gluon.constexpr_function
def as_registers(columns):
    """A product [64, columns] in the order of its registers, in which dQ lies in memory, as the tile [2 * columns, 32] that TMA reads:
    swizzled by 128 bytes."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 2], [4, 4], [17, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout(bases[: 11 if columns == 32 else 12], [], 1024)


@gluon.jit
def add_half(dq_desc, dq_tiles, dq_tile, HALF_OF: gl.constexpr, SIZE: gl.constexpr):
    """One half of a tile of dQ, SIZE floats, to memory."""
    async_add(dq_desc, [0, 0, dq_tile * (SIZE // 32) + HALF_OF * (SIZE // 64), 0], box(dq_tiles.index(HALF_OF), dq_desc))


@gluon.jit
def write_half(dq_desc, dq_tiles, dq_tile, HALF_OF: gl.constexpr, SIZE: gl.constexpr):
    """As add_half, over what was there."""
    async_store(dq_desc, [0, 0, dq_tile * (SIZE // 32) + HALF_OF * (SIZE // 64), 0], box(dq_tiles.index(HALF_OF), dq_desc))


@gluon.jit
def dq_half(k_tiles, ds_tiles, slot, ROWS: gl.constexpr, ME: gl.constexpr):
    """A consumer's half of dQ, in flight: half of the columns of 64 queries, half of the rows of 128."""
    WIDTH: gl.constexpr = k_tiles.shape[2]
    if ROWS == 64:
        dq = dq_product(k_tiles, ds_tiles, slot, 0, ME * (WIDTH // 2), WIDTH // 2)
    else:
        dq = dq_product(k_tiles, ds_tiles, slot, ME * 64, 0, WIDTH)
    return dq


@gluon.jit
def dq_before(k_tiles, ds_tiles, ds_full, step, some, ROWS: gl.constexpr, ME: gl.constexpr):
    """dq_half of the step before `step`, once the other consumer's dS is there; of no use unless there was `some`."""
    slot, phase = ring(step + 1, 2)
    mbarrier.wait(ds_full[1 - ME].index(slot), phase ^ 1, pred=some)
    return dq_half(k_tiles, ds_tiles, slot, ROWS, ME)


@gluon.jit
def hand_on_dq(dq, dq_desc, dq_tiles, dq_tile, bars, step, ROWS: gl.constexpr, ME: gl.constexpr, WRITER: gl.constexpr,
               LATE: gl.constexpr):
    """dQ on its way to memory. LATE: it is that of the step before `step`, whose dS the other consumer gets back."""
    dq_full, dq_empty = bars[9], bars[10]
    if WRITER and LATE:
        mbarrier.wait(dq_empty.index(ME), step & 1)
    elif WRITER:
        mbarrier.wait(dq_empty.index(ME), (step & 1) ^ 1)
    else:
        tma.store_wait(0)
    COLUMNS: gl.constexpr = dq.shape[1]
    dq_tiles.index(ME)._reinterpret(gl.float32, [64, COLUMNS], as_registers(COLUMNS)).store(dq)
    fence_async_shared()
    if WRITER or LATE:
        barrier()
    if LATE:
        ds_empty = bars[11]
        release(ds_empty[1 - ME].index((step + 1) % 2))
    if WRITER:
        release(dq_full.index(ME))
    else:
        add_half(dq_desc, dq_tiles, dq_tile, ME, 128 * COLUMNS)


@gluon.jit
def pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, dq_tile, columns, bars, step, scale, low, high, ROWS: gl.constexpr,
              STAGES: gl.constexpr, ME: gl.constexpr, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, WRITER: gl.constexpr,
              LATE: gl.constexpr = False, some=True):
    """Adds the step's share to dK and dV, and hands on this consumer's half of dQ; LATE: that of the step before, if there was `some`, so
    that the consumers need not keep step with each other.

    Scores and dP are in flight together, dQ before dK: it goes its way while the tensor cores are busy with dK.
    """
    q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, step_empty, ds_full = bars[0], bars[1], bars[2], bars[8]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dtype: gl.constexpr = q_tiles.dtype
    nothing = gl.zeros([HALF, ROWS], gl.float32, scores_layout)
    stage, phase = ring(step, STAGES)
    mbarrier.wait(q_full.index(stage), phase)
    # [HALF, WIDTH] x [WIDTH, ROWS]
    pending = warpgroup_mma(k_tiles.index(ME), q_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dweights_pending = warpgroup_mma(v_tiles.index(ME), do_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(pending,))
    weights = gl.exp2(base_2_scores(scores, stats_tiles, columns, stage, scale, low, high, MASKED, HAS_LEFT))
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    dweights = warpgroup_mma_wait(0, deps=(dweights_pending,))
    delta = row_statistics(stats_tiles, stage, 1, ROWS, gl.SliceLayout(0, scores_layout))
    dscores = (weights * (dweights - delta[None, :])).to(dtype)
    ds_slot, ds_phase = ring(step, 2)
    if LATE:
        ds_empty = bars[11]
        mbarrier.wait(ds_empty[ME].index(ds_slot), ds_phase ^ 1)
    ds_tiles.index(ds_slot * 2 + ME).store(dscores)
    # [HALF, ROWS] x [ROWS, WIDTH]
    dv_pending = warpgroup_mma(p, do_tiles.index(stage), dv, is_async=True)
    fence_async_shared()
    barrier()
    release(ds_full[ME].index(ds_slot))
    ds = gl.convert_layout(dscores, weights_layout)
    if LATE:
        dq_pending = dq_before(k_tiles, ds_tiles, ds_full, step, some, ROWS, ME)
    else:
        mbarrier.wait(ds_full[1 - ME].index(ds_slot), ds_phase)
        dq_pending = dq_half(k_tiles, ds_tiles, ds_slot, ROWS, ME)
    dk_pending = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
    dv, dq, p = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending, p))
    if LATE:
        if some:
            hand_on_dq(dq, dq_desc, dq_tiles, dq_tile, bars, step, ROWS, ME, WRITER, LATE)
    else:
        hand_on_dq(dq, dq_desc, dq_tiles, dq_tile, bars, step, ROWS, ME, WRITER, LATE)
    dk, ds = warpgroup_mma_wait(0, deps=(dk_pending, ds))
    release(step_empty.index(stage))
    return dk, dv
