"""The backward of chosen blocks of 64 tokens on Hopper. Four warps gather the rows of a block's queries and dO, and the numbers that the
backward reads of each row. Four others compute dS, and dK and dV of the block. Four more compute the parts of dQ from dS. Scores are
transposed, keys by rows."""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attnzoo_kernels._gluon.hopper import (
    await_empty,
    await_full,
    barriers,
    descriptor,
    fence_async_shared,
    invalidate,
    mbarrier,
    product_layout,
    release,
    shared_tiles,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import LOG2E
from attnzoo_kernels.routed.hopper_rows import (
    NUMBERS,
    STEP,
    Constants,
    Tile,
    copy_rows,
    find_item,
    gather,
    heads_together,
    plan_launch,
    row_barriers,
    store_no_parts,
    store_part,
    units_of,
)
from attnzoo_kernels.routed.walk import add_keys, row_statistics

DS_SLOTS = gl.constexpr(2)


class Tiles(NamedTuple):
    """In shared memory."""

    q: Any  # [STAGES, STEP, WIDTH]
    do: Any  # [STAGES, STEP, VALUE_WIDTH]
    stats: Any  # [2 * STAGES, STEP] in float32: for each stage the LSE in base 2, then delta
    k: Any  # [1, BLOCK_N, WIDTH]
    v: Any  # [1, BLOCK_N, VALUE_WIDTH]
    ds: Any  # [DS_SLOTS, BLOCK_N, STEP]
    part: Any  # [1, STEP, WIDTH], of dQ


class Bars(NamedTuple):
    """Rings of mbarriers."""

    rows_full: Any
    rows_empty: Any
    ds_full: Any
    ds_empty: Any
    block_full: Any


class Program(NamedTuple):
    """What the warps of a program share."""

    item: Any
    tiles: Tiles
    bars: Bars
    q: Any
    do: Any
    stats: Any  # (2, own rows + 1): the LSE in base 2, then delta; see walk.row_statistics
    q_strides: Any
    do_strides: Any
    k_desc: Any
    v_desc: Any
    part_desc: Any
    pair: Any
    dk: Any  # [BLOCK_N, WIDTH], of this program
    dv: Any  # [BLOCK_N, VALUE_WIDTH]
    softmax_scale: Any


@gluon.jit
def _copy_step(slot, own, inside, program, config):
    tiles, item = program.tiles, program.item
    copy_rows(tiles.q.index(slot), program.q, program.q_strides, own, config, config.WIDTH)
    copy_rows(tiles.do.index(slot), program.do, program.do_strides, own, config, config.VALUE_WIDTH)
    numbers = program.stats + gl.where(inside, own.to(gl.int32), item.nowhere)
    for n in gl.static_range(2):
        async_copy.async_copy_global_to_shared(tiles.stats.index(2 * slot + n), numbers + n * (item.nowhere + 1))


@gluon.jit
def _gather(program, config):
    gather(_copy_step, program, config)


@gluon.jit
def _derive_keys(program, config):
    """dK and dV of the block, and dS of each step, which it leaves to _derive_queries. Rows past the item's end have an LSE of +inf, so
    that their weights are zero."""
    item, tiles, bars = program.item, program.tiles, program.bars
    scores_layout: gl.constexpr = product_layout(STEP)
    of_rows: gl.constexpr = gl.SliceLayout(0, scores_layout)
    dk_layout: gl.constexpr = product_layout(config.WIDTH)
    dv_layout: gl.constexpr = product_layout(config.VALUE_WIDTH)
    k, v = tiles.k.index(0), tiles.v.index(0)
    # [BLOCK_N, WIDTH] and [BLOCK_N, VALUE_WIDTH]
    dk = gl.zeros([config.BLOCK_N, config.WIDTH], gl.float32, dk_layout)
    dv = gl.zeros([config.BLOCK_N, config.VALUE_WIDTH], gl.float32, dv_layout)
    steps = gl.cdiv(item.rows, STEP)
    if (item.keys > 0) & (steps > 0):
        mbarrier.wait(bars.block_full.index(0), 0)
        for step in range(steps):
            slot = await_full(bars.rows_full, step, config.STAGES)
            fence_async_shared()
            q, do = tiles.q.index(slot), tiles.do.index(slot)
            # [BLOCK_N, STEP]
            scores = gl.zeros([config.BLOCK_N, STEP], gl.float32, scores_layout)
            scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=False, is_async=True)
            dp = gl.zeros([config.BLOCK_N, STEP], gl.float32, scores_layout)
            dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            weights = gl.exp2(scores * (program.softmax_scale * LOG2E) - tiles.stats.index(2 * slot).load(of_rows)[None, :])
            p = gl.convert_layout(weights.to(do.dtype), gl.DotOperandLayout(0, dv_layout, 2))
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = (weights * (dp - tiles.stats.index(2 * slot + 1).load(of_rows)[None, :])).to(q.dtype)
            ds_slot = await_empty(bars.ds_empty, step, DS_SLOTS)
            tiles.ds.index(ds_slot).store(ds)
            fence_async_shared()
            mbarrier.arrive(bars.ds_full.index(ds_slot), count=1)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2)), q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
            release(bars.rows_empty.index(slot))
        _store_keys(program.dk, dk * program.softmax_scale)
        _store_keys(program.dv, dv)


@gluon.jit
def _store_keys(ptr, x):
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    gl.store(ptr + (row * x.shape[1])[:, None] + column[None, :], x)


@gluon.jit
def _derive_queries(program, config):
    """The parts of dQ; zeros for pairs that stand for no block."""
    item, tiles, bars = program.item, program.tiles, program.bars
    steps = gl.cdiv(item.rows, STEP)
    if item.keys == 0:
        store_no_parts(config.WIDTH, program)
    elif steps > 0:
        mbarrier.wait(bars.block_full.index(0), 0)
        for step in range(steps):
            slot = await_full(bars.ds_full, step, DS_SLOTS)
            # [STEP, WIDTH]
            dq = gl.zeros([STEP, config.WIDTH], gl.float32, product_layout(config.WIDTH))
            dq = warpgroup_mma(tiles.ds.index(slot).permute((1, 0)), tiles.k.index(0), dq, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            release(bars.ds_empty.index(slot))
            store_part(dq * program.softmax_scale, step, program)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def routed_hopper_bwd_kernel(q_ptr, do_ptr, k_desc, v_desc, part_desc, stats_ptr, pair_ptr, cu_seqlens_q, cu_seqlens_k, dk_ptr, dv_ptr,
                             q_strides, do_strides, softmax_scale, count, none, total, total_q, total_k, HEADS: gl.constexpr,
                             ROWS: gl.constexpr, TOGETHER: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr,
                             WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr):
    """dQ of each part row, and this program's dK and dV."""
    config = Constants(HEADS=HEADS, ROWS=ROWS, TOGETHER=TOGETHER, SLOTS=SLOTS, BLOCK_N=BLOCK_N, WIDTH=WIDTH, VALUE_WIDTH=VALUE_WIDTH,
                       CHUNK=CHUNK, STAGES=STAGES)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, STEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = Tiles(q=shared_tiles(dtype, STAGES, STEP, WIDTH), do=shared_tiles(dtype, STAGES, STEP, VALUE_WIDTH), stats=stats,
                  k=shared_tiles(dtype, 1, BLOCK_N, WIDTH), v=shared_tiles(dtype, 1, BLOCK_N, VALUE_WIDTH),
                  ds=shared_tiles(dtype, DS_SLOTS, BLOCK_N, STEP), part=shared_tiles(dtype, 1, STEP, WIDTH))
    bars = Bars(rows_full=row_barriers(STAGES), rows_empty=barriers(STAGES, 1), ds_full=barriers(DS_SLOTS, 1),
                ds_empty=barriers(DS_SLOTS, 1), block_full=barriers(1, 1))
    item = find_item(cu_seqlens_q, cu_seqlens_k, count, none, total, total_q, total_k, config)
    at = gl.program_id(0).to(gl.int64) * BLOCK_N
    program = Program(item, tiles, bars, q_ptr, do_ptr, stats_ptr, q_strides, do_strides, k_desc, v_desc, part_desc, pair_ptr,
                      dk_ptr + at * WIDTH, dv_ptr + at * VALUE_WIDTH, softmax_scale)
    gl.warp_specialize([(_derive_keys, (program, config)), (_derive_queries, (program, config)), (_gather, (program, config))],
                       [4, 4], [112, 40])
    invalidate(bars)


def backward_tile() -> Tile:
    """A program has a multiprocessor of its own."""
    return Tile(64, 4, 168)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, place: Tensor,
                    pair: Tensor, chosen_q: Tensor, chosen_k: Tensor, rows: int, block_size: int, softmax_scale: float, dk: Tensor,
                    dv: Tensor) -> tuple[Tensor, int]:
    """As walk.launch_backward."""
    together, tile = heads_together(rows), backward_tile()
    programs, numbers, constants = plan_launch(tile, together, q, k, v, place, pair, chosen_q, rows, block_size)
    dpart = q.new_empty(pair.numel() * rows, 1, q.shape[-1])
    dk_part, dv_part = (stats.new_empty(programs, block_size, x.shape[-1]) for x in (k, v))
    with on_device_of(q):
        row_stats = row_statistics(out, grad_out, stats, grad_lse)
        routed_hopper_bwd_kernel[(programs,)](
            q, grad_out, *(descriptor(x, block_size, x.shape[-1]) for x in (k, v)), descriptor(dpart, 64, q.shape[-1], True), row_stats,
            pair, chosen_q, chosen_k, dk_part, dv_part, units_of(q), units_of(grad_out), softmax_scale, *numbers, **constants)
        turns = rows // together
        add_keys(dk, dv, dk_part, dv_part, chosen_q, chosen_k, constants["CHUNK"] * turns, turns)
    return dpart, together
