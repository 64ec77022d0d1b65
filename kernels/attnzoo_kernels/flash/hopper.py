"""FlashAttention-3's forward for Hopper in Gluon: a warp loads through TMA, warp groups of 64 queries have products and softmax in flight.

A program stays on its multiprocessor and takes tiles from a counter. Each warp group of matrix instructions (a consumer) walks the keys
from the last tile that it sees to the first; while the tensor cores add up P V of one tile, they multiply Q K^T of the next.
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
    load_box,
    mbarrier,
    place,
    release,
    ring,
    tma,
    warpgroup_mma_wait,
    why_not_tma,
)
from attnzoo_kernels._gluon.tiles import masks_in_loop, sequence_bounds
from attnzoo_kernels._gluon.walk import hand_on, store_statistics, walk_keys
from attnzoo_kernels._gluon.work import consumer_tiles, forward_barriers, leave_at_zero, loaded_tiles, next_tile, publish, take
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, multiprocessors, on_device_of
from attnzoo_kernels.flash.options import Layout, Options, layout
from attnzoo_kernels.flash.tiles import HopperTile, hopper_forward_tile

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes


@gluon.jit
def part_of(consumer: gl.constexpr, taken, CONSUMERS: gl.constexpr, HALVED: gl.constexpr):
    """Which part of a tile's rows is a consumer's. Of two each gets the first one in turn, half of whose last tile of keys no row sees."""
    part = consumer
    if HALVED and CONSUMERS == 2:
        part = consumer ^ (taken & 1)
    return part


@gluon.jit
def _announce(queries, taken, sequence, head, row, first_q, len_q, CONSUMERS: gl.constexpr, PACKED: gl.constexpr,
              Q_SLOTS: gl.constexpr, HALVED: gl.constexpr):
    """Tells the consumers of a tile and loads its queries."""
    q_desc, q_tiles, work, bars = queries
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    publish(work, work_full, work_empty, taken, sequence, head, row)
    slot, phase = ring(taken, Q_SLOTS)
    for c in gl.static_range(CONSUMERS):
        at = slot * CONSUMERS + c
        mbarrier.wait(q_empty.index(at), phase ^ 1)
        my_row = row + part_of(c, taken, CONSUMERS, HALVED) * ROWS
        load_box(q_desc, q_tiles, q_full, at, place(sequence, head, first_q, my_row, len_q, PACKED))


@gluon.jit
def _produce(loads, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
             HAS_RIGHT: gl.constexpr, Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr, HALVED: gl.constexpr):
    """Takes tiles, tells the consumers which (-1 ends), and loads what they need."""
    (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads,
     group, head_group, n_tiles, window_left, window_right) = loads
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    queries = (q_desc, q_tiles, work, bars)
    TILE: gl.constexpr = CONSUMERS * ROWS
    step = 0
    taken = 0
    index, sequence, head, row, first_q, len_q, first_k, len_k = next_tile(
        gl.program_id(0), counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE, PACKED,
        HAS_RIGHT)
    if index < n_tiles:
        _announce(queries, taken, sequence, head, row, first_q, len_q, CONSUMERS, PACKED, Q_SLOTS, HALVED)
    while index < n_tiles:
        begin, end = loaded_tiles(row, TILE, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        batch, kv_head, first, length = sequence, head // group, first_k, len_k
        key = (end - 1) * BLOCK_N
        for j in range(end - begin):
            slot, phase = ring(step, STAGES)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            load_box(k_desc, k_tiles, k_full, slot, place(batch, kv_head, first, key, length, PACKED))
            if j == end - begin - 1:  # before V, which waits for its place; not earlier: a tile is for the program that is ready first
                index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                index, sequence, head, row, first_q, len_q, first_k, len_k = next_tile(
                    index, counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE, PACKED,
                    HAS_RIGHT)
                taken += 1
                if index < n_tiles:
                    _announce(queries, taken, sequence, head, row, first_q, len_q, CONSUMERS, PACKED, Q_SLOTS, HALVED)
            if JOINT_RELEASE:  # V of a step is free with K of the next
                next_slot, next_phase = ring(step + 1, STAGES)
                mbarrier.wait(k_empty.index(next_slot), next_phase ^ 1)
            else:
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
            load_box(v_desc, v_tiles, v_full, slot, place(batch, kv_head, first, key, length, PACKED))
            key -= BLOCK_N
            step += 1
    leave_at_zero(counter, index, n_tiles)
    publish(work, work_full, work_empty, taken, -1, 0, 0)


@gluon.jit
def _taken_tile(work, bars, taken, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, PACKED: gl.constexpr):
    """The next tile: (sequence or -1, head, row, first_q, len_q, len_k)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    sequence, head, row = take(work, work_full, work_empty, taken)
    some = gl.maximum(sequence, 0)
    first_q, len_q = sequence_bounds(cu_seqlens_q, some, n_seqs, seqlen_q, PACKED, True)
    first_k, len_k = sequence_bounds(cu_seqlens_k, some, n_seqs, seqlen_k, PACKED, False)
    return sequence, head, row, first_q, len_q, len_k


@gluon.jit
def _queries_in_registers(tile, full, empty, taken, some, scores_layout: gl.constexpr):
    """A consumer's queries of its next tile, if there is `some`."""
    mbarrier.wait(full, taken & 1, pred=some)
    q = tile.load(gl.DotOperandLayout(0, scores_layout, 2))
    # loads may still be on their way, and TMA is fast where it only writes zeros, behind a sequence's end
    fence_async_shared()
    mbarrier.arrive(empty, count=1)
    return q


@gluon.jit
def _consume(rows, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
             ME: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LOOP_MASK: gl.constexpr,
             Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr, HOLD: gl.constexpr, HALVED: gl.constexpr, AHEAD: gl.constexpr,
             FROM_ZERO: gl.constexpr):
    """64 rows of each tile. AHEAD: it takes the next tile while the last product of this one is in flight."""
    (out_desc, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q,
     seqlen_k, heads, window_left, window_right, scale, stride_stats) = rows
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16]))
    step = 0
    taken = 0
    sequence, head, row, first_q, len_q, len_k = _taken_tile(
        work, bars, taken, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, PACKED)
    if Q_SLOTS == 1:
        q = _queries_in_registers(q_tiles.index(ME), q_full.index(ME), q_empty.index(ME), taken, sequence >= 0, scores_layout)
    while sequence >= 0:
        part = part_of(ME, taken, CONSUMERS, HALVED)
        my_row, loaded_begin, loaded_end, begin, full_begin, full_end, end = consumer_tiles(
            row, part, ROWS, CONSUMERS, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        if AHEAD:  # all is handed on before the walk: the producer may need it to get to the tile that is waited for behind it
            end = gl.where(my_row < len_q, end, loaded_begin + 1)
            begin = loaded_begin
        step = hand_on(k_full, k_empty, v_full, v_empty, step, loaded_end - end, STAGES, JOINT_RELEASE)
        if Q_SLOTS > 1:
            q_slot, q_phase = ring(taken, Q_SLOTS)
            q_place = q_slot * CONSUMERS + ME
            mbarrier.wait(q_full.index(q_place), q_phase)
            q = q_tiles.index(q_place)
        acc_pending, top, total, step = walk_keys(
            q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, begin, full_begin, full_end, end, my_row, len_q, len_k,
            window_left, window_right, scale, ROWS, BLOCK_DV, BLOCK_N, STAGES, False, HAS_LEFT, HAS_RIGHT, LOOP_MASK, JOINT_RELEASE, HOLD,
            HALVED=HALVED, FROM_ZERO=FROM_ZERO)
        if Q_SLOTS > 1:
            mbarrier.arrive(q_empty.index(q_place), count=1)
        i = my_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        if PACKED:
            rows_before = head.to(gl.int64) * seqlen_q + first_q
        else:
            rows_before = (sequence * heads + head).to(gl.int64) * seqlen_q
        inverse = store_statistics(lse_ptr, stats_ptr, stride_stats, rows_before + i, i < len_q, top, total)
        out_place = place(sequence, head, first_q, my_row, len_q, PACKED)
        some = my_row < len_q
        taken += 1
        if AHEAD:
            sequence, head, row, first_q, len_q, len_k = _taken_tile(
                work, bars, taken, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, PACKED)
            if Q_SLOTS == 1:
                q = _queries_in_registers(q_tiles.index(ME), q_full.index(ME), q_empty.index(ME), taken, sequence >= 0, scores_layout)
        tma.store_wait(0)
        acc = warpgroup_mma_wait(0, deps=(acc_pending,))
        if not JOINT_RELEASE:
            release(v_empty.index((step - 1) % STAGES))
        if some:
            out_tiles.index(ME).store((acc * gl.convert_layout(inverse, acc_row)[:, None]).to(q_tiles.dtype))
            fence_async_shared()
            async_store(out_desc, out_place, box(out_tiles.index(ME), out_desc))
        if not AHEAD:
            step = hand_on(k_full, k_empty, v_full, v_empty, step, begin - loaded_begin, STAGES, JOINT_RELEASE)
            sequence, head, row, first_q, len_q, len_k = _taken_tile(
                work, bars, taken, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, PACKED)
            if Q_SLOTS == 1:
                q = _queries_in_registers(q_tiles.index(ME), q_full.index(ME), q_empty.index(ME), taken, sequence >= 0, scores_layout)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_stats", "window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group",
                              "head_group", "n_tiles"], do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def flash_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, counter, stride_stats, scale,
                            window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles,
                            BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                            CONSUMERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                            LOOP_MASK: gl.constexpr, Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr, HOLD: gl.constexpr,
                            HALVED: gl.constexpr, AHEAD: gl.constexpr, FROM_ZERO: gl.constexpr, REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, BLOCK_D],
                                        gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype))
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_DV], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype))
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_DV],
                                        gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_DV], dtype))
    work, bars = forward_barriers(Q_SLOTS * CONSUMERS, STAGES, CONSUMERS)
    loads = (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k,
             heads, group, head_group, n_tiles, window_left, window_right)
    rows = (out_desc, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, cu_seqlens_q, cu_seqlens_k, n_seqs,
            seqlen_q, seqlen_k, heads, window_left, window_right, scale, stride_stats)
    # partitions get constants only where the tuple is written out
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rows, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                        Q_SLOTS, JOINT_RELEASE, HOLD, HALVED, AHEAD, FROM_ZERO)),
            (_consume, (rows, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                        Q_SLOTS, JOINT_RELEASE, HOLD, HALVED, AHEAD, FROM_ZERO)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS, PACKED, HAS_LEFT, HAS_RIGHT, Q_SLOTS, JOINT_RELEASE, HALVED)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rows, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                        Q_SLOTS, JOINT_RELEASE, HOLD, HALVED, AHEAD, FROM_ZERO)),
            (_consume, (rows, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                        Q_SLOTS, JOINT_RELEASE, HOLD, HALVED, AHEAD, FROM_ZERO)),
            (_consume, (rows, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 2, PACKED, HAS_LEFT, HAS_RIGHT, LOOP_MASK,
                        Q_SLOTS, JOINT_RELEASE, HOLD, HALVED, AHEAD, FROM_ZERO)),
            (_produce, (loads, BLOCK_N, STAGES, CONSUMERS, PACKED, HAS_LEFT, HAS_RIGHT, Q_SLOTS, JOINT_RELEASE, HALVED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    invalidate(bars)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, q: Layout, k: Layout, v: Layout, options: Options,
          tile: HopperTile | None = None) -> tuple[Launch, HopperTile, int, int]:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    heads, head_dim = q[0][-2:]
    value_dim, group = v[0][-1], heads // k[0][-2]
    width, value_width = 64 if head_dim <= 64 else 128, 64 if value_dim <= 64 else 128
    mean = seqlen_q if options.sequences is None else seqlen_q // sequences
    tile = tile or hopper_forward_tile(width, value_width, mean, causal=options.window_right >= 0, window=options.window_left >= 0,
                                       packed=options.sequences is not None)
    n_tiles = options.programs(heads, seqlen_q, sequences, ROWS.value * tile.consumers)
    head_group = max(1, L2_GROUP // (2 * seqlen_k * (width + value_width))) * group
    scalars = (math.prod(q[0][:-1]), options.softmax_scale * math.log2(math.e), options.window_left, options.window_right, sequences,
               seqlen_q, seqlen_k, heads, group, head_group, n_tiles)
    shift = 0 if same_lengths else seqlen_k - seqlen_q if options.sequences is None else None
    loop_mask = masks_in_loop(options.window_left, options.window_right, shift, ROWS.value)
    # half of the first tile left out: 64 causal 512, 2048, 8192 257, 436, 557 TFLOP/s for 247, 430, 550; at 128 351, 590, 712 for 347, 601,
    # 730; three consumers whose loop masks would spill
    halved = options.window_right >= 0 and (width == value_width == 64 or mean <= 512) and not (tile.consumers == 3 and loop_mask)
    constants = {
        "BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "PACKED": options.sequences is not None, "HAS_LEFT": options.window_left >= 0,
        "HAS_RIGHT": options.window_right >= 0, "LOOP_MASK": loop_mask, "Q_SLOTS": tile.q_slots, "JOINT_RELEASE": tile.joint_release,
        "HOLD": tile.hold, "HALVED": halved, "AHEAD": tile.ahead, "FROM_ZERO": tile.from_zero and not loop_mask,
        "REGISTERS": tile.registers,
    }
    launch = Launch(flash_fwd_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1)
    return launch, tile, width, value_width


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, *, sinks: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0 or sinks:
        return "it has no softcap, alibi_slopes, dropout_p or sinks"
    if options.softmax_scale <= 0:
        return f"softmax_scale must be positive, got {options.softmax_scale}"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   options: Options, tile: HopperTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for what forward_reason lets through."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, *lse_shape, dtype=torch.float32, device=q.device)
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    launch, tile, width, value_width = _plan(q.device, q.dtype, same_lengths, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        descriptors = (descriptor(x, rows, columns, cu_seqlens_q is not None) for x, rows, columns in (
            (q, ROWS.value, width), (k, tile.block_n, width), (v, tile.block_n, value_width), (out, ROWS.value, value_width)))
        launch(*descriptors, lse, stats, cu_seqlens_q, cu_seqlens_k, tile_counter(q.device))
    return out, lse, stats
