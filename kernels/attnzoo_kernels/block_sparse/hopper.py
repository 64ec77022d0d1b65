"""Block-sparse forward for Hopper in Gluon: FlashAttention's persistent walk, along lists of kept tiles that a loading warp reads ahead.

Two warp groups of 64 queries each share a tile's list, from its last entry to its first; entries that need a mask are the list's last ones.
Where blocks have 64 queries, one warp group has a list, and two or three programs share a multiprocessor.
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
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._gluon.walk import store_statistics, walk_keys
from attnzoo_kernels._gluon.work import WORK, forward_barriers, leave_at_zero
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of
from attnzoo_kernels.block_sparse.hopper_lists import find_list, list_lengths, listed_tile
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import HopperTile, hopper_forward_tile
from attnzoo_kernels.flash.hopper_loads import announce, await_work, word
from attnzoo_kernels.flash.options import Layout, layout

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes


@gluon.jit
def _find(index, order, count, entries, tiles, heads, n_tiles, width, stride_batch, stride_head):
    """The index-th tile: (its batch, head and number, its list's number, length, entries that need no mask, where it lies, last entry)."""
    batch, head, tile = listed_tile(index, order, tiles, heads, n_tiles)
    number = batch * stride_batch + head * stride_head + tile
    length, clear = list_lengths(count, number)
    begin = find_list(entries, number, width)
    last = gl.load(begin + gl.maximum(length - 1, 0))
    return batch, head, tile, number, length, clear, begin, gl.where(length > 0, last, 0)


@gluon.jit
def _produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Takes tiles, tells the consumers which, and loads what they need: a tile that sees no key gets one to look at."""
    (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, order, entries, count, tiles, width, stride_batch, stride_head,
     heads, group, n_tiles) = loads
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    step = 0
    taken = 0
    index = gl.program_id(0)
    batch, head, tile, number, length, clear, begin, listed = _find(index, order, count, entries, tiles, heads, n_tiles, width,
                                                                    stride_batch, stride_head)
    while index < n_tiles:
        slot, phase = ring(taken, WORK)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        announce(work, work_full, slot, (1, batch, head, tile, length, clear, listed * BLOCK_N, number))
        kv_head = head // group
        row = tile * (CONSUMERS * ROWS)
        steps = gl.maximum(length, 1)
        for j in range(steps):
            key = listed * BLOCK_N
            listed = gl.load(begin + gl.maximum(length - 2 - j, 0))  # a step ahead: the load of keys would wait for it
            slot, phase = ring(step, STAGES)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            load_tile(k_desc, k_tiles, k_full, slot, batch, kv_head, key)
            if j == 0:
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(c), (taken & 1) ^ 1)
                    load_tile(q_desc, q_tiles, q_full, c, batch, head, row + c * ROWS)
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            load_tile(v_desc, v_tiles, v_full, slot, batch, kv_head, key)
            step += 1
        index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        batch, head, tile, number, length, clear, begin, listed = _find(index, order, count, entries, tiles, heads, n_tiles, width,
                                                                        stride_batch, stride_head)
        taken += 1
    leave_at_zero(counter, index, n_tiles)
    slot, phase = ring(taken, WORK)
    mbarrier.wait(work_empty.index(slot), phase ^ 1)
    announce(work, work_full, slot, (0,))


@gluon.jit
def _consume(rows, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ME: gl.constexpr,
             HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LOOP_MASK: gl.constexpr):
    """64 rows of each tile."""
    (out_desc, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, entries, width, heads, seqlen_q, seqlen_k, window_left,
     window_right, scale, stride_stats) = rows
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16]))
    step = 0
    taken = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        batch, head = word(work, slot, 1), word(work, slot, 2)
        row = (word(work, slot, 3) * CONSUMERS + ME) * ROWS
        length, clear, column = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6)
        begin = find_list(entries, word(work, slot, 7), width)
        mbarrier.arrive(work_empty.index(slot), count=1)
        mbarrier.wait(q_full.index(ME), taken & 1)
        q = q_tiles.index(ME).load(gl.DotOperandLayout(0, scores_layout, 2))
        fence_async_shared()
        mbarrier.arrive(q_empty.index(ME), count=1)
        # an empty list: a tile of a sequence without keys
        acc_pending, top, total, step = walk_keys(
            q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, 0, 0, clear, gl.maximum(length, 1), row, seqlen_q,
            gl.where(length > 0, seqlen_k, 0), window_left, window_right, scale, ROWS, BLOCK_DV, BLOCK_N, STAGES, False, HAS_LEFT,
            HAS_RIGHT, LOOP_MASK, False, False, (begin, column))
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        rows_before = (batch * heads + head).to(gl.int64) * seqlen_q
        inverse = store_statistics(lse_ptr, stats_ptr, stride_stats, rows_before + i, i < seqlen_q, top, total)
        tma.store_wait(0)
        acc = warpgroup_mma_wait(0, deps=(acc_pending,))
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        if row < seqlen_q:
            out_tiles.index(ME).store((acc * gl.convert_layout(inverse, acc_row)[:, None]).to(q_tiles.dtype))
            fence_async_shared()
            async_store(out_desc, [batch, head, row, 0], box(out_tiles.index(ME), out_desc))
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_stats", "stride_lb", "stride_lh", "list_tiles", "list_width", "window_left", "window_right",
                              "seqlen_q", "seqlen_k", "heads", "group", "n_tiles"],
           do_not_specialize_on_alignment=["order", "index", "count", "counter"])
def block_sparse_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, order, index, count, counter, stride_stats,
                                   stride_lb, stride_lh, list_tiles, list_width, scale, window_left, window_right, seqlen_q, seqlen_k,
                                   heads, group, n_tiles, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
                                   STAGES: gl.constexpr, CONSUMERS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                                   LOOP_MASK: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_D], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype))
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_DV], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype))
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_DV],
                                        gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_DV], dtype))
    work = gl.allocate_shared_memory(gl.int32, [WORK, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _, bars = forward_barriers(CONSUMERS, STAGES, CONSUMERS)
    loads = (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, order, index, count, list_tiles, list_width, stride_lb,
             stride_lh, heads, group, n_tiles)
    rows = (out_desc, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, index, list_width, heads, seqlen_q, seqlen_k,
            window_left, window_right, scale, stride_stats)
    # partitions get constants only where the tuple is written out
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (rows, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, HAS_LEFT, HAS_RIGHT, LOOP_MASK)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (_consume, (rows, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, HAS_LEFT, HAS_RIGHT, LOOP_MASK)),
            (_consume, (rows, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, HAS_LEFT, HAS_RIGHT, LOOP_MASK)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS)),
        ], [4, 1], [240, 24])
    invalidate(bars)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, q: Layout, k: Layout, v: Layout, options: Options,
          tile: HopperTile | None = None) -> tuple[Launch, HopperTile, Grid, int, int]:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    heads = q[0][-2]
    width, value_width = (64 if x[0][-1] <= 64 else 128 for x in (q, v))
    tile = tile or hopper_forward_tile(width, value_width, options.block_q, options.block_k)
    grid = options.grid(q[0], k[0], tile)
    left, right = options.window_left, options.window_right
    # the diagonal crosses two tiles of keys where they are the smaller ones
    loop_mask = masks_in_loop(left, right, seqlen_k - seqlen_q, tile.block_m) or right >= 0 and tile.block_n < tile.block_m
    n_tiles = options.programs(heads, seqlen_q, sequences, tile.block_m)
    *lists, _, scale, _, _, _, _, _, _, group = options.scalars(grid, q[0], k[0], by_keys=False)
    scalars = (math.prod(q[0][:-1]), *lists, scale, left, right, seqlen_q, seqlen_k, heads, group, n_tiles)
    constants = {"BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": tile.block_n, "STAGES": tile.stages,
                 "CONSUMERS": tile.block_m // ROWS.value, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "LOOP_MASK": loop_mask}
    # several programs share the registers that the compiler would give to one
    registers = {"maxnreg": 256 // tile.programs // 8 * 8} if tile.programs > 1 else {}
    launch = Launch(block_sparse_fwd_hopper_kernel, min(n_tiles, tile.programs * multiprocessors(device)), scalars, constants, 4, 1,
                    options=registers)
    return launch, tile, grid, width, value_width


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.sequences is not None:
        return "it has no packed sequences"
    if options.block_q % 64 or options.block_k % 64:
        return f"blocks must be multiples of 64 tokens, got {options.block_q} x {options.block_k}"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: Options,
                   tile: HopperTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for what forward_reason lets through."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, *lse_shape, dtype=torch.float32, device=q.device)
    launch, tile, grid, width, value_width = _plan(q.device, q.dtype, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        lists = options.lists(mask, grid, q.shape, k.shape, by_keys=False)
        launch(descriptor(q, ROWS.value, width), descriptor(k, tile.block_n, width), descriptor(v, tile.block_n, value_width),
               descriptor(out, ROWS.value, value_width), lse, stats, lists.order, lists.index, lists.count,
               tile_counter(q.device))
    return out, lse, stats
