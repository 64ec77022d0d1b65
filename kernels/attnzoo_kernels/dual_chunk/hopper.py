"""Dual Chunk attention's forward for Hopper in Gluon: flash's persistent programs, with the queries exchanged where a stage begins.

A tile of queries lies in one chunk. It walks its own chunk's keys, those of the chunk before and all others, each from the last one down:
tiles of keys begin at seams, so that only the first tile of a stage can need a mask.
"""

import functools

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
    mbarrier,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
    why_not_tma,
)
from attnzoo_kernels._gluon.softmax import partial_row_sums, softmax_step
from attnzoo_kernels._gluon.tiles import sequence_bounds
from attnzoo_kernels._gluon.walk import clear_rows, hand_on, keys_seen, store_statistics
from attnzoo_kernels._gluon.work import forward_barriers, take
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, multiprocessors, on_device_of
from attnzoo_kernels.dual_chunk.hopper_tiles import Q_SLOTS, chunk_of, is_merged, produce, rows_end, stage_keys
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import rotated_copies
from attnzoo_kernels.dual_chunk.tiles import HopperTile, hopper_forward_tile
from attnzoo_kernels.flash.options import Layout, layout

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes


@gluon.jit
def _clear_behind(valid, v_tiles, v_full, step, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Zeros for a step's values behind the sequence's end, if it has them: no weight of zero makes up for what another one has there."""
    if valid < BLOCK_N:
        slot, phase = ring(step, STAGES)
        mbarrier.wait(v_full.index(slot), phase)
        clear_rows(v_tiles.index(slot), valid, BLOCK_N, BLOCK_DV)


@gluon.jit
def _walk(q_tiles, k_tiles, v_tiles, bars, step, q_step, position, own, last, len_k, chunk, merged, BLOCK_DV: gl.constexpr,
          BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ME: gl.constexpr, PACKED: gl.constexpr, SEAMS: gl.constexpr,
          HOLD: gl.constexpr):
    """As walk.walk_keys over the stages of 64 queries of chunk `own` from `position` on, whose copies follow each other in the ring of
    queries; SEAMS: the first tile of keys of each stage reaches into the next one."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars[0], bars[1], bars[2], bars[3], bars[4], bars[5]
    dtype: gl.constexpr = k_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    begin, tiles = stage_keys(0, own, chunk, last, merged, BLOCK_N)
    q_slot, q_phase = ring(q_step, Q_SLOTS)
    place = q_slot * CONSUMERS + ME
    mbarrier.wait(q_full.index(place), q_phase)
    slot, phase = ring(step, STAGES)
    mbarrier.wait(k_full.index(slot), phase)
    # [ROWS, BLOCK_N]
    pending = warpgroup_mma(q_tiles.index(place), k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    if PACKED:
        _clear_behind(len_k - begin - (tiles - 1) * BLOCK_N, v_tiles, v_full, step, BLOCK_DV, BLOCK_N, STAGES)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    # counted from the chunk's first key: columns that are no multiples of BLOCK_N cost registers, for which ptxas has the loop below take
    # a thread's two rows in turn
    scores = keys_seen(scores, position - begin, (tiles - 1) * BLOCK_N, len_k - begin, len_k - begin, 0, 0, False, True)
    top = gl.max(scores, 1)
    base = gl.where(top == -float("inf"), 0.0, top)
    weights = gl.exp2(scores - base[:, None])
    norm = partial_row_sums(weights)
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    # [ROWS, BLOCK_DV]
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, acc_layout)

    successive_step = step + tiles
    inter_step = successive_step + stage_keys(1, own, chunk, last, merged, BLOCK_N)[1]
    last_step = inter_step + stage_keys(2, own, chunk, last, merged, BLOCK_N)[1]
    step += 1
    if HOLD:
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1, pred=step < last_step)
    for n in range(3):
        stop = gl.where(n == 0, successive_step, gl.where(n == 1, inter_step, last_step))
        if (n > 0) & (stop > step):
            mbarrier.arrive(q_empty.index(place), count=1)
            q_step += 1
            q_slot, q_phase = ring(q_step, Q_SLOTS)
            place = q_slot * CONSUMERS + ME
            mbarrier.wait(q_full.index(place), q_phase)
            if PACKED and SEAMS:
                stage_begin, stage_tiles = stage_keys(n, own, chunk, last, merged, BLOCK_N)
                _clear_behind(len_k - stage_begin - (stage_tiles - 1) * BLOCK_N, v_tiles, v_full, step, BLOCK_DV, BLOCK_N, STAGES)
        for s in range(step, stop):
            slot, phase = ring(s, STAGES)
            before, phase_before = ring(s - 1, STAGES)
            if not HOLD:
                mbarrier.wait(k_full.index(slot), phase)
            pending = warpgroup_mma(q_tiles.index(place), k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase_before)
            acc_pending = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(pending,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            if SEAMS:
                if (n > 0) & (s == step):
                    keys = gl.where(n == 2, own - 1, gl.where(merged, own, 1)) * chunk
                    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
                    scores = gl.where((j <= (keys - 1) % BLOCK_N)[None, :], scores, -float("inf"))
            weights, top, norm, rescale = softmax_step(scores, top, norm, 1.0, False)
            if HOLD:  # the spin loop of this wait keeps the exponentials above the wait for the product, where they overlap with it
                mbarrier.wait(k_full.index((s + 1) % STAGES), ((s + 1) // STAGES) & 1, pred=s + 1 < last_step)
            acc = warpgroup_mma_wait(0, deps=(acc_pending,))
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(rescale, acc_row)[:, None]
            p = gl.convert_layout(weights.to(dtype), weights_layout)
        step = gl.maximum(step, stop)

    mbarrier.arrive(q_empty.index(place), count=1)
    before, phase_before = ring(last_step - 1, STAGES)
    mbarrier.wait(v_full.index(before), phase_before)
    acc_pending = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    total = gl.convert_layout(gl.sum(norm, 1), gl.SliceLayout(1, scores_layout))
    return acc_pending, top, total, last_step, q_step + 1


@gluon.jit
def _consume(rows, VALUE_DIM: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
             ME: gl.constexpr, PACKED: gl.constexpr, SEAMS: gl.constexpr, HOLD: gl.constexpr, PARTIAL: gl.constexpr):
    """64 rows of each tile."""
    (out_desc, out_ptr, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, shape, stride_os, stride_oh,
     stride_stats) = rows
    cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, _, chunk, near = shape
    k_full, k_empty, v_full, v_empty, work_full, work_empty = bars[2], bars[3], bars[4], bars[5], bars[6], bars[7]
    TILE: gl.constexpr = CONSUMERS * ROWS
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    step = 0
    taken = 0
    q_step = 0
    sequence, head, position = take(work, work_full, work_empty, taken)
    while sequence >= 0:
        first_q, len_q = sequence_bounds(cu_seqlens_q, sequence, n_seqs, seqlen_q, PACKED, True)
        first_k, len_k = sequence_bounds(cu_seqlens_k, sequence, n_seqs, seqlen_k, PACKED, False)
        own = chunk_of(position, chunk)
        last = rows_end(position, TILE, len_k, chunk) - 1
        mine = position + ME * ROWS
        my_last = gl.minimum(mine + ROWS - 1, last)
        merged = is_merged(position, own, chunk, near)
        unseen = stage_keys(0, own, chunk, last, merged, BLOCK_N)[1] - stage_keys(0, own, chunk, my_last, merged, BLOCK_N)[1]
        step = hand_on(k_full, k_empty, v_full, v_empty, step, unseen, STAGES, False)
        acc_pending, top, total, step, q_step = _walk(
            q_tiles, k_tiles, v_tiles, bars, step, q_step, mine, own, my_last, len_k, chunk, merged, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS,
            ME, PACKED, SEAMS, HOLD)
        first = mine - (len_k - len_q)  # row of the sequence; those before it, and behind the tile's end, are not there
        begin = gl.maximum(-first, 0)
        end = my_last + 1 - mine
        i = gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        if PACKED:
            rows_before = head.to(gl.int64) * seqlen_q + first_q
        else:
            rows_before = (sequence * heads + head).to(gl.int64) * seqlen_q
        inverse = store_statistics(lse_ptr, stats_ptr, stride_stats, rows_before + first + i, (i >= begin) & (i < end), top, total)
        tma.store_wait(0)
        acc = warpgroup_mma_wait(0, deps=(acc_pending,))
        mbarrier.arrive(v_empty.index((step - 1) % STAGES), count=1)
        out = (acc * gl.convert_layout(inverse, acc_row)[:, None]).to(q_tiles.dtype)
        batch = sequence
        if PACKED:
            batch = 0
        whole = begin < end
        if PARTIAL:
            whole = (begin == 0) & (end == ROWS)
        if whole:
            out_tiles.index(ME).store(out)
            fence_async_shared()
            async_store(out_desc, [batch, head, first_q + first, 0], box(out_tiles.index(ME), out_desc))
        elif PARTIAL:
            r = gl.arange(0, ROWS, acc_row)
            columns = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, acc_layout))
            rows_ptr = out_ptr + (batch.to(gl.int64) * seqlen_q + (first_q + first)) * stride_os + head.to(gl.int64) * stride_oh
            gl.store(rows_ptr + (r * stride_os)[:, None] + columns[None, :], out,
                     mask=((r >= begin) & (r < end))[:, None] & (columns < VALUE_DIM)[None, :])
        taken += 1
        sequence, head, position = take(work, work_full, work_empty, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_os", "stride_oh", "stride_stats", "n_seqs", "seqlen_q", "seqlen_k", "heads",
                              "head_group", "chunk", "near", "group", "batches", "n_tiles"],
           do_not_specialize_on_alignment=["lse_ptr", "stats_ptr", "cu_seqlens_q", "cu_seqlens_k"])
def dual_chunk_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, counter,
                                 stride_os, stride_oh, stride_stats, n_seqs, seqlen_q, seqlen_k, heads, head_group, chunk, near, group,
                                 batches, n_tiles, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                                 BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PACKED: gl.constexpr,
                                 SEAMS: gl.constexpr, HOLD: gl.constexpr, PARTIAL: gl.constexpr, REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    values_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_DV], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, BLOCK_D],
                                        gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype))
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_DV], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], keys_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_DV], values_layout)
    work, bars = forward_barriers(Q_SLOTS * CONSUMERS, STAGES, CONSUMERS)
    shape = (cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, chunk, near)
    loads = (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, work, bars, counter, shape, group, batches, n_tiles)
    rows = (out_desc, out_ptr, lse_ptr, stats_ptr, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, shape, stride_os, stride_oh,
            stride_stats)
    # partitions get constants only where the tuple is written out
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, SEAMS, HOLD, PARTIAL)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, SEAMS, HOLD, PARTIAL)),
            (produce, (loads, BLOCK_N, STAGES, CONSUMERS, ROWS, PACKED)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 0, PACKED, SEAMS, HOLD, PARTIAL)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 1, PACKED, SEAMS, HOLD, PARTIAL)),
            (_consume, (rows, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, CONSUMERS, 2, PACKED, SEAMS, HOLD, PARTIAL)),
            (produce, (loads, BLOCK_N, STAGES, CONSUMERS, ROWS, PACKED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    invalidate(bars)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, packed: int | None, chunk: int, near: int, queries: Layout, keys: Layout, v: Layout,
          out: Layout, stride_stats: int, tile: HopperTile | None) -> tuple[Launch, HopperTile, int, int]:
    shape, heads, value_dim, group = queries[0], queries[0][-2], v[0][-1], queries[0][-2] // keys[0][-2]
    batches, seqlen_q, seqlen_k = shape[0] // 3, shape[1], keys[0][1]
    sequences = batches if packed is None else packed
    width, value_width = 64 if shape[-1] <= 64 else 128, 64 if value_dim <= 64 else 128
    tile = tile or hopper_forward_tile(width, value_width, seqlen_q // (packed or 1), chunk)
    in_l2 = 2 * L2_GROUP  # at 16384 2 % faster than half of it, 48 MiB 1 % slower
    head_group = max(1, in_l2 // (2 * seqlen_k * (width + value_width))) * group
    block = ROWS.value * tile.consumers
    n_tiles = heads * (seqlen_q // block + seqlen_q // chunk + 3 * (packed + 1) if packed is not None
                       else batches * dense_tiles(seqlen_q, seqlen_k, chunk, block))
    scalars = (*out[1][-3:-1], stride_stats, sequences, seqlen_q, seqlen_k, heads, head_group, chunk, near, group, batches,
               n_tiles)
    constants = {
        "VALUE_DIM": value_dim, "BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "PACKED": packed is not None, "SEAMS": chunk % tile.block_n != 0,
        # tiles that TMA cannot store: behind their end lie others' rows, or they begin before row 0, which it traps on; only compiled where
        # there are any, as the offsets of plain stores would take a dozen registers all through the walk
        "PARTIAL": packed is not None or chunk % block != 0 or (seqlen_k - seqlen_q) % block != 0,
        "HOLD": tile.hold, "REGISTERS": tile.registers,
    }
    launch = Launch(dual_chunk_fwd_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1)
    return launch, tile, width, value_width


def dense_tiles(seqlen_q: int, seqlen_k: int, chunk: int, block: int) -> int:
    """Tiles of one head's queries, whose first lies at position seqlen_k - seqlen_q."""
    per_chunk = -(-chunk // block)

    def tile(position: int) -> int:
        return position // chunk * per_chunk + position % chunk // block

    return tile(seqlen_k - 1) - tile(seqlen_k - seqlen_q) + 1


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if not options.causal or options.stages != 7:
        return "it is causal and has all three stages"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options,
                   tile: HopperTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for what forward_reason lets through."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = torch.empty((q.shape[1], q.shape[0]) if options.packed else (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32,
                      device=q.device)
    stats = lse.new_empty(2, *lse.shape)
    with on_device_of(q):
        for part in parts(q, k, extras, options):
            _launch(*map(part.tokens, (q, k, v, out)), part.rows(lse), part.rows(stats), part.extras, options, tile)
    return out, lse, stats


def _launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stats: Tensor, extras: Extras, options: Options,
            tile: HopperTile | None) -> None:
    _, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True, near=options.near)
    keys = rotated_copies(k, extras, options, seqlen_q, 1, queries=False)
    launch, *tile = _plan(q.device, q.dtype, options.sequences, options.chunk, options.near,
                          *map(layout, (queries, keys, v, out)), stats.stride(0), tile)
    run(launch, *tile, queries, keys, v, out, lse, stats, *extras[3:], tile_counter(q.device))


def run(launch: Launch, tile: HopperTile, width: int, value_width: int, queries: Tensor, keys: Tensor, v: Tensor, out: Tensor,
        *rest) -> None:
    launch(descriptor(queries, ROWS.value, width), descriptor(keys, tile.block_n, width), descriptor(v, tile.block_n, value_width),
           descriptor(out, ROWS.value, value_width), out, *rest)
