"""The forward of chosen blocks on Hopper: four warps gather the query rows of a block, four others compute their parts of the output."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward_launch import heads_in_l2
from attnzoo_kernels._gluon.hopper import (
    await_stage,
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
    why_not_tma,
)
from attnzoo_kernels._gluon.softmax import log2
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import LN2, LOG2E
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


class Tiles(NamedTuple):
    """In shared memory."""

    q: Any  # [STAGES, STEP, WIDTH]
    k: Any  # [1, BLOCK_N, WIDTH]
    v: Any  # [1, BLOCK_N, VALUE_WIDTH]
    part: Any  # [1, STEP, VALUE_WIDTH]


class Bars(NamedTuple):
    """Rings of mbarriers."""

    rows_full: Any
    rows_empty: Any
    block_full: Any


class Program(NamedTuple):
    """What the warps of a program share."""

    item: Any
    tiles: Tiles
    bars: Bars
    q: Any
    q_strides: Any
    k_desc: Any
    v_desc: Any
    part_desc: Any
    pair: Any
    lse: Any
    scale: Any  # softmax_scale * log2(e)


@gluon.jit
def _copy_queries(slot, own, inside, program, config):
    copy_rows(program.tiles.q.index(slot), program.q, program.q_strides, own, config, config.WIDTH)


@gluon.jit
def _gather(program, config):
    gather(_copy_queries, program, config)


@gluon.jit
def _start_scores(step, steps, program, config):
    """Begins the products of a step's queries and the block's keys, [STEP, BLOCK_N]. Returns them and the slot of the queries. Behind the
    last step it does not wait for queries, and the products are of no use."""
    tiles = program.tiles
    slot = await_stage(program.bars.rows_full, step, config.STAGES, steps)
    fence_async_shared()
    scores = gl.zeros([STEP, config.BLOCK_N], gl.float32, product_layout(config.BLOCK_N))
    return warpgroup_mma(tiles.q.index(slot), tiles.k.index(0).permute((1, 0)), scores, use_acc=False, is_async=True), slot


@gluon.jit
def _finish_scores(scores, slot, program):
    """Waits for a step's scores and gives its queries back."""
    scores = warpgroup_mma_wait(0, deps=[scores])
    release(program.bars.rows_empty.index(slot))
    return scores


@gluon.jit
def _attend(program, config):
    """The softmax of each row over the block. Pairs that stand for no block give zeros and an LSE of -inf."""
    item, v = program.item, program.tiles.v.index(0)
    scores_layout: gl.constexpr = product_layout(config.BLOCK_N)
    out_layout: gl.constexpr = product_layout(config.VALUE_WIDTH)
    lane = gl.arange(0, STEP, gl.SliceLayout(1, scores_layout))
    steps = gl.cdiv(item.rows, STEP)
    if item.keys == 0:
        for step in range(steps):
            row = step * STEP + lane
            gl.store(program.lse + item.part + row, -float("inf"), mask=row < item.rows)
        store_no_parts(config.VALUE_WIDTH, program)
    elif steps > 0:
        mbarrier.wait(program.bars.block_full.index(0), 0)
        scores, slot = _start_scores(0, steps, program, config)
        scores = _finish_scores(scores, slot, program)
        for step in range(steps):
            row_max = gl.max(scores, 1) * program.scale
            weights = gl.exp2(scores * program.scale - row_max[:, None])
            row_sum = gl.sum(weights, 1)
            p = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, out_layout, 2))
            # [STEP, VALUE_WIDTH]
            out = gl.zeros([STEP, config.VALUE_WIDTH], gl.float32, out_layout)
            out = warpgroup_mma(p, v, out, use_acc=False, is_async=True)
            # the next scores are computed while this step's output is stored
            scores, slot = _start_scores(step + 1, steps, program, config)
            row = step * STEP + lane
            gl.store(program.lse + item.part + row, (row_max + log2(row_sum)) * LN2, mask=row < item.rows)
            inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, out_layout))
            out = warpgroup_mma_wait(1, deps=[out])
            store_part(out * inverse[:, None], step, program)
            scores = _finish_scores(scores, slot, program)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def routed_hopper_fwd_kernel(q_ptr, k_desc, v_desc, part_desc, pair_ptr, cu_seqlens_q, cu_seqlens_k, lse_ptr, q_strides, softmax_scale,
                             count, none, total, total_q, total_k, HEADS: gl.constexpr, ROWS: gl.constexpr, TOGETHER: gl.constexpr,
                             SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr,
                             CHUNK: gl.constexpr, STAGES: gl.constexpr):
    """Output and LSE of each part row."""
    config = Constants(HEADS=HEADS, ROWS=ROWS, TOGETHER=TOGETHER, SLOTS=SLOTS, BLOCK_N=BLOCK_N, WIDTH=WIDTH, VALUE_WIDTH=VALUE_WIDTH,
                       CHUNK=CHUNK, STAGES=STAGES)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tiles = Tiles(q=shared_tiles(dtype, STAGES, STEP, WIDTH), k=shared_tiles(dtype, 1, BLOCK_N, WIDTH),
                  v=shared_tiles(dtype, 1, BLOCK_N, VALUE_WIDTH), part=shared_tiles(dtype, 1, STEP, VALUE_WIDTH))
    bars = Bars(rows_full=row_barriers(STAGES), rows_empty=barriers(STAGES, 1), block_full=barriers(1, 1))
    item = find_item(cu_seqlens_q, cu_seqlens_k, count, none, total, total_q, total_k, config)
    program = Program(item, tiles, bars, q_ptr, q_strides, k_desc, v_desc, part_desc, pair_ptr, lse_ptr, softmax_scale * LOG2E)
    gl.warp_specialize([(_attend, (program, config)), (_gather, (program, config))], [4], [40])
    invalidate(bars)


def forward_tile(block_size: int) -> Tile:
    """Two programs share a multiprocessor's registers and shared memory."""
    return Tile(32, 4 if block_size == 64 else 2, 128)


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, block_size: int, grad_out: Tensor | None) -> str | None:
    """Why the Hopper kernels do not take the chosen blocks of a call, of its forward if grad_out is None; None if they do."""
    if block_size != 64 and (block_size != 128 or grad_out is not None):
        return f"blocks must have 64 tokens, or 128 in the forward, got {block_size}"
    if any(x.shape[-1] not in (64, 128) for x in (q, v)):
        return "heads of queries and values must have 64 or 128 columns"
    return why_not_tma(q, k, v) if grad_out is None else why_not_tma(q, k, v, grad_out)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, place: Tensor, pair: Tensor, chosen_q: Tensor, chosen_k: Tensor, rows: int,
                   block_size: int, softmax_scale: float) -> tuple[Tensor, Tensor, int]:
    """As walk.launch_forward."""
    # the queries of these heads stay in L2 while all blocks of a key head are walked over
    together = heads_together(rows, heads_in_l2(q.shape[0], q.shape[-1]))
    programs, numbers, constants = plan_launch(forward_tile(block_size), together, q, k, v, place, pair, chosen_q, rows, block_size)
    part = q.new_empty(pair.numel() * rows, 1, v.shape[-1])
    lse = torch.empty(1, part.shape[0], dtype=torch.float32, device=q.device)
    with on_device_of(q):
        routed_hopper_fwd_kernel[(programs,)](
            q, *(descriptor(x, block_size, x.shape[-1]) for x in (k, v)), descriptor(part, 64, v.shape[-1], True), pair, chosen_q, chosen_k,
            lse, units_of(q), softmax_scale, *numbers, **constants)
    return part, lse, together
