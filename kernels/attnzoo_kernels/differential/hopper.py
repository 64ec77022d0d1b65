"""Differential attention's forward for Hopper in Gluon: one launch, both softmaxes of a tile one after the other in the same program.

Two accumulators at once would not leave registers for the overlap of products and softmax that flash's forward has. So each warp group
walks the keys of the second path, keeps that result in float32 in shared memory, or above head_dim 64 in memory that stays in L2, walks
those of the first path and subtracts; the values, which both paths read, come from L2 the second time.
"""

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.counter import tile_counter
from attnzoo_kernels._gluon.hopper import (
    async_store,
    box,
    descriptor,
    fence_async_shared,
    invalidate,
    load_tile,
    mbarrier,
    ring,
    tma,
    warpgroup_mma_wait,
    why_not_tma,
)
from attnzoo_kernels._gluon.tiles import masks_in_loop, sequence_bounds
from attnzoo_kernels._gluon.walk import hand_on, store_rows, store_statistics, walk_keys
from attnzoo_kernels._gluon.work import consumer_tiles, forward_barriers, leave_at_zero, loaded_tiles, next_tile, publish, take
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, block_width, multiprocessors, on_device_of
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import HopperTile, hopper_forward_tile
from attnzoo_kernels.flash.options import Layout, layout

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes


@gluon.jit
def _produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
             HAS_RIGHT: gl.constexpr, JOINT_RELEASE: gl.constexpr):
    """Takes tiles, tells the consumers which (-1 ends), and loads the second path's keys, then the first one's."""
    (q1_desc, q2_desc, k1_desc, k2_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, cu_seqlens_q, cu_seqlens_k, n_seqs,
     seqlen_q, seqlen_k, heads, group, head_group, n_tiles, window_left, window_right) = loads
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    TILE: gl.constexpr = CONSUMERS * ROWS
    step = 0
    taken = 0
    index, sequence, head, row, first_q, len_q, first_k, len_k = next_tile(
        gl.program_id(0), counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE, PACKED,
        HAS_RIGHT)
    while index < n_tiles:
        publish(work, work_full, work_empty, taken, sequence, head, row)
        begin, end = loaded_tiles(row, TILE, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        batch = sequence
        if PACKED:
            batch = 0
        kv_head = head // group
        last_key = first_k + (end - 1) * BLOCK_N
        for part in gl.static_range(2):
            if part == 0:
                q_desc = q2_desc
                k_desc = k2_desc
            else:
                q_desc = q1_desc
                k_desc = k1_desc
            for j in range(end - begin):
                key = last_key - j * BLOCK_N
                slot, phase = ring(step, STAGES)
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                load_tile(k_desc, k_tiles, k_full, slot, batch, kv_head, key)
                if j == 0:
                    for c in gl.static_range(CONSUMERS):
                        place = part * CONSUMERS + c
                        mbarrier.wait(q_empty.index(place), (taken & 1) ^ 1)
                        load_tile(q_desc, q_tiles, q_full, place, batch, head, first_q + row + c * ROWS)
                if JOINT_RELEASE:  # V of a step is free with K of the next
                    next_slot, next_phase = ring(step + 1, STAGES)
                    mbarrier.wait(k_empty.index(next_slot), next_phase ^ 1)
                else:
                    mbarrier.wait(v_empty.index(slot), phase ^ 1)
                load_tile(v_desc, v_tiles, v_full, slot, batch, kv_head, key)
                if part == 1:
                    if j == end - begin - 1:  # late, so that the program that is ready first gets the next tile
                        index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                        index, sequence, head, row, first_q, len_q, first_k, len_k = next_tile(
                            index, counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE,
                            PACKED, HAS_RIGHT)
                step += 1
        taken += 1
    leave_at_zero(counter, index, n_tiles)
    publish(work, work_full, work_empty, taken, -1, 0, 0)


@gluon.jit
def _places(pointer, x):
    """Where the threads keep x in memory, each what it holds itself."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return pointer + (r * x.shape[1])[:, None] + c[None, :]


@gluon.jit
def _consume(rows, VALUE_DIM: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
             CONSUMERS: gl.constexpr, ME: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             LOOP_MASK: gl.constexpr, SAVE: gl.constexpr, SCRATCH: gl.constexpr,
             JOINT_RELEASE: gl.constexpr, HOLD: gl.constexpr):
    """64 rows of each tile."""
    (out_desc, out2_desc, out_ptr, out2_ptr, lse_ptr, stats_ptr, lam_ptr, scratch_ptr, q_tiles, k_tiles, v_tiles, out_tiles, second_tiles,
     work, bars, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, window_left, window_right, scale, stride_rows, stride_os,
     stride_oh, stride_lb, stride_ls, stride_lh) = rows
    if SCRATCH:
        second_place = scratch_ptr + (gl.program_id(0) * CONSUMERS + ME) * (ROWS * BLOCK_DV)
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    step = 0
    taken = 0
    sequence, head, row = take(work, work_full, work_empty, taken)
    while sequence >= 0:
        first_q, len_q = sequence_bounds(cu_seqlens_q, sequence, n_seqs, seqlen_q, PACKED, True)
        _, len_k = sequence_bounds(cu_seqlens_k, sequence, n_seqs, seqlen_k, PACKED, False)
        my_row, loaded_begin, loaded_end, begin, full_begin, full_end, end = consumer_tiles(
            row, ME, ROWS, CONSUMERS, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        batch = sequence
        whole = my_row < len_q
        rows_before = (sequence * heads + head).to(gl.int64) * seqlen_q
        if PACKED:
            batch = 0
            whole = my_row + ROWS <= len_q
            rows_before = head.to(gl.int64) * seqlen_q + first_q
        i = my_row + gl.arange(0, ROWS, score_row)
        # early, for memory is far away; behind the last sequence, where no query sees a key, there may be anything
        lam = gl.load(lam_ptr + batch.to(gl.int64) * stride_lb + (first_q + i).to(gl.int64) * stride_ls + head * stride_lh,
                      mask=(i < len_q) & (len_k > 0), other=0.0)
        for part in gl.static_range(2):
            place = part * CONSUMERS + ME
            step = hand_on(k_full, k_empty, v_full, v_empty, step, loaded_end - end, STAGES, JOINT_RELEASE)
            mbarrier.wait(q_full.index(place), taken & 1)
            pending, top, total, step = walk_keys(
                q_tiles.index(place), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, begin, full_begin, full_end, end, my_row,
                len_q, len_k, window_left, window_right, scale, ROWS, BLOCK_DV, BLOCK_N, STAGES, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                JOINT_RELEASE, HOLD)
            mbarrier.arrive(q_empty.index(place), count=1)
            inverse = store_statistics(lse_ptr + (1 - part) * stride_rows, stats_ptr + 2 * (1 - part) * stride_rows, stride_rows,
                                       rows_before + i, i < len_q, top, total)
            tma.store_wait(0)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            if not JOINT_RELEASE:
                mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
            out = acc * gl.convert_layout(inverse, acc_row)[:, None]
            if part == 0:
                second = out * gl.convert_layout(lam, acc_row)[:, None]
                if SCRATCH:
                    gl.store(_places(second_place, second), second)
                else:
                    second_tiles.index(ME).store(second)
            elif SCRATCH:
                out = out - gl.load(_places(second_place, out))
            else:
                out = out - second_tiles.index(ME).load(acc_layout)
            if part == 1 or SAVE:
                rounded = out.to(q_tiles.dtype)
                if whole:
                    out_tiles.index(ME).store(rounded)
                    fence_async_shared()
                    if part == 0:
                        async_store(out2_desc, [batch, head, first_q + my_row, 0], box(out_tiles.index(ME), out2_desc))
                    else:
                        async_store(out_desc, [batch, head, first_q + my_row, 0], box(out_tiles.index(ME), out_desc))
                elif PACKED:
                    pointer = out_ptr
                    if part == 0:
                        pointer = out2_ptr
                    store_rows(pointer + first_q.to(gl.int64) * stride_os + head * stride_oh, rounded, my_row, len_q, stride_os, VALUE_DIM)
            step = hand_on(k_full, k_empty, v_full, v_empty, step, begin - loaded_begin, STAGES, JOINT_RELEASE)
        taken += 1
        sequence, head, row = take(work, work_full, work_empty, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_os", "stride_oh", "stride_rows", "stride_lb", "stride_ls", "stride_lh", "window_left", "window_right",
                              "n_seqs", "seqlen_q", "seqlen_k", "heads", "group", "head_group", "n_tiles"],
           do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k"])
def differential_fwd_hopper_kernel(q1_desc, q2_desc, k1_desc, k2_desc, v_desc, out_desc, out2_desc, out_ptr, out2_ptr, lse_ptr, stats_ptr,
                                   lam_ptr, scratch_ptr, cu_seqlens_q, cu_seqlens_k, counter, stride_os, stride_oh, stride_rows, stride_lb,
                                   stride_ls, stride_lh, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group,
                                   head_group, n_tiles, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                                   BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PACKED: gl.constexpr,
                                   HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LOOP_MASK: gl.constexpr, SAVE: gl.constexpr,
                                   SCRATCH: gl.constexpr, JOINT_RELEASE: gl.constexpr, HOLD: gl.constexpr,
                                   REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q1_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, ROWS, BLOCK_D], q_layout)
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_DV], out_layout)
    second_tiles = 0
    if not SCRATCH:
        second_tiles = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, BLOCK_DV],
                                                 gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], gl.float32))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype))
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_DV],
                                        gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_DV], dtype))
    work, bars = forward_barriers(2 * CONSUMERS, STAGES, CONSUMERS)
    loads = (q1_desc, q2_desc, k1_desc, k2_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, cu_seqlens_q, cu_seqlens_k, n_seqs,
             seqlen_q, seqlen_k, heads, group, head_group, n_tiles, window_left, window_right)
    rows = (out_desc, out2_desc, out_ptr, out2_ptr, lse_ptr, stats_ptr, lam_ptr, scratch_ptr, q_tiles, k_tiles, v_tiles, out_tiles,
            second_tiles, work, bars, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, window_left, window_right, scale,
            stride_rows, stride_os, stride_oh, stride_lb, stride_ls, stride_lh)
    # partitions get constants only where the tuple is written out
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK, SAVE, SCRATCH,
                        JOINT_RELEASE, HOLD)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK, SAVE, SCRATCH,
                        JOINT_RELEASE, HOLD)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS, PACKED, HAS_LEFT, HAS_RIGHT, JOINT_RELEASE)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK, SAVE, SCRATCH,
                        JOINT_RELEASE, HOLD)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK, SAVE, SCRATCH,
                        JOINT_RELEASE, HOLD)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 2, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK, SAVE, SCRATCH,
                        JOINT_RELEASE, HOLD)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS, PACKED, HAS_LEFT, HAS_RIGHT, JOINT_RELEASE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    invalidate(bars)


def forward_reason(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor) -> str | None:
    """Why this path does not take the call; None if it does."""
    head_dim, value_dim = q1.shape[-1], v.shape[-1]
    if not (32 < head_dim <= 128 and 32 < value_dim <= (128 if head_dim <= 64 else 256)):
        return f"head_dim must be 33 to 128 and value_dim 33 to 128, above head_dim 64 to 256, got {head_dim} and {value_dim}"
    return why_not_tma(q1, q2, k1, k1 if k2 is None else k2, v)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, packed: int | None, same_lengths: bool, save: bool, shared: bool, q: Layout, k: Layout,
          v: Layout, lam: tuple[int, int, int], softmax_scale: float, left: int, right: int,
          tile: HopperTile | None = None) -> Launch:
    heads, value_dim, group = q[0][-2], v[0][-1], q[0][-2] // k[0][-2]
    sequences, seqlen_q, seqlen_k = (q[0][0], q[0][1], k[0][1]) if packed is None else (packed, q[0][0], k[0][0])
    width, value_width = max(64, block_width(q[0][-1])), max(64, block_width(value_dim))
    tile = tile or hopper_forward_tile(width, value_width)
    block = ROWS.value * tile.consumers
    n_tiles = heads * (sequences * -(-seqlen_q // block) if packed is None else seqlen_q // block + sequences + 1)
    # groups of heads whose keys stay in L2, alike in size: the last one's longest tiles would else end late
    most = max(1, L2_GROUP // (2 * seqlen_k * ((1 if shared else 2) * width + value_width)))
    kv_heads = k[0][-2] * (1 if packed is not None else sequences)
    head_group = -(-kv_heads // -(-kv_heads // most)) * group
    shift = 0 if same_lengths else seqlen_k - seqlen_q if packed is None else None
    scalars = (heads * value_dim, value_dim, math.prod(q[0][:-1]), *lam, softmax_scale * math.log2(math.e), left, right, sequences,
               seqlen_q, seqlen_k, heads, group, head_group, n_tiles)
    constants = {"VALUE_DIM": value_dim, "BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": tile.block_n,
                 "STAGES": tile.stages, "CONSUMERS": tile.consumers,
                 "PACKED": packed is not None, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0,
                 "LOOP_MASK": masks_in_loop(left, right, shift, ROWS.value), "SAVE": save,
                 "SCRATCH": width > 64,
                 "JOINT_RELEASE": tile.joint_release, "HOLD": tile.hold, "REGISTERS": tile.registers}
    return Launch(differential_fwd_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1)


def launch_forward(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
                   cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, save: bool, options: Options,
                   tile: HopperTile | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the plain path's launch_forward gives, for what forward_reason lets through."""
    out = q1.new_empty(*q1.shape[:-1], v.shape[-1])
    out2 = torch.empty_like(out) if save else out
    rows = (q1.shape[1], q1.shape[0]) if options.packed else (q1.shape[0], q1.shape[2], q1.shape[1])
    lse = torch.empty(2, *rows, dtype=torch.float32, device=q1.device)
    stats = lse.new_empty(4, *rows)
    launch = _plan(q1.device, q1.dtype, options.sequences,
                   options.packed and cu_seqlens_q is cu_seqlens_k, save, k2 is None, layout(q1), layout(k1), layout(v),
                   lambda_strides(lam, options.packed), options.softmax_scale, options.window_left, options.window_right, tile)
    width, value_width, block_n, consumers = (launch.constants[name] for name in ("BLOCK_D", "BLOCK_DV", "BLOCK_N", "CONSUMERS"))
    scratch = None
    if launch.constants["SCRATCH"]:  # small enough to stay in L2
        scratch = torch.empty(launch.programs * consumers * ROWS.value * value_width, dtype=torch.float32, device=q1.device)
    with on_device_of(q1):
        launch(descriptor(q1, ROWS.value, width), descriptor(q2, ROWS.value, width), descriptor(k1, block_n, width),
               descriptor(k1 if k2 is None else k2, block_n, width), descriptor(v, block_n, value_width),
               descriptor(out, ROWS.value, value_width), descriptor(out2, ROWS.value, value_width), out, out2, lse, stats, lam,
               scratch, cu_seqlens_q, cu_seqlens_k, tile_counter(q1.device))
    return (out, lse, out2, stats) if save else (out, lse, out.new_empty(0), lse.new_empty(0))
