"""The Gluon kernel of the Hopper backward: flash's walk of pairs of products, whose queries are those rotated for the stage of the keys.

A tile of 128 keys lies in one chunk, a step's queries too. dQ of the three stages is added up in three float32 buffers, because it lies
in the frame of its stage; hopper_rows.py turns it back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import async_load, barriers, box, invalidate, mbarrier, ring, tma
from attnzoo_kernels.flash.hopper_gradients import await_turn, store_keys
from attnzoo_kernels.flash.hopper_loads import (
    HALF,
    WORK,
    announce,
    await_work,
    end_tile,
    load_tile_keys,
    query_tiles,
    take_keys,
    walk_barriers,
    word,
)
from attnzoo_kernels.flash.hopper_pair import pair_tiles, pass_turn
from attnzoo_kernels.flash.hopper_steps import add_half, pair_step


@gluon.jit
def _seams(key, len_q, len_k, chunk, near, ROWS: gl.constexpr):
    """The first tiles of queries that are one chunk behind the keys, and that stand at the last copy's position to them."""
    first = ((key // chunk + 1) * chunk - (len_k - len_q)) // ROWS
    return first, first + (near + ROWS - 1) // ROWS


@gluon.jit
def _copy(tile, seams):
    return (tile >= seams[0]).to(gl.int32) + (tile >= seams[1]).to(gl.int32)


@gluon.jit
def _load_step(q_desc, do_desc, stats_desc, tiles, bars, slot, q_batch, batch, head, row, stats_tile):
    bar = bars[0].index(slot)
    mbarrier.expect(bar, q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
    async_load(q_desc, [q_batch, head, row, 0], bar, box(tiles[0].index(slot), q_desc))
    async_load(stats_desc, [0, 0, stats_tile, 0], bar, box(tiles[2].index(slot), stats_desc))
    bar = bars[1].index(slot)
    mbarrier.expect(bar, do_desc.block_type.nbytes)
    async_load(do_desc, [batch, head, row, 0], bar, box(tiles[1].index(slot), do_desc))


@gluon.jit
def _load(descs, tail_descs, tiles, bars, work, shape, chunk, near, batches, n_tiles, STAGES: gl.constexpr, PACKED: gl.constexpr,
          ORDERED: gl.constexpr, ROWS: gl.constexpr):
    """Takes tiles, tells the others which, and loads what they need; ends of packed sequences come from copies with zeros behind."""
    step_empty, work_full, work_empty = bars[2], bars[6], bars[7]
    n_seqs, group, head_tiles = shape[3], shape[7], shape[9]
    step = 0
    taken = 0
    more = 1
    while more != 0:
        slot, phase = ring(taken, WORK)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        index, sequence, kv_head, key, first_q, len_q, first_k, len_k, dq_tile = take_keys(shape, n_tiles, PACKED, ORDERED, ROWS)
        batch = sequence
        if PACKED:
            batch = 0
        begin, full_begin, full_end, end = query_tiles(key, len_q, len_k, 0, 0, False, True, ROWS)
        more = (index < n_tiles).to(gl.int32)
        announce(work, work_full, slot, (more, batch, kv_head, key, begin, full_begin, full_end, end, len_q, len_k, first_k, dq_tile))
        if more != 0:
            seams = _seams(key, len_q, len_k, chunk, near, ROWS)
            stats_tile = dq_tile
            loaded = 0
            for member in range(group):
                head = kv_head * group + member
                for j in range(begin, end):
                    stage, stage_phase = ring(step, STAGES)
                    mbarrier.wait(step_empty.index(stage), stage_phase ^ 1)
                    copy = _copy(j, seams)
                    if PACKED:
                        if (j + 1) * ROWS > len_q:
                            _load_step(tail_descs[0], tail_descs[1], descs[2], tiles, bars, stage, copy * (n_seqs + 1) + sequence, sequence,
                                       head, 0, stats_tile + j)
                        else:
                            _load_step(descs[0], descs[1], descs[2], tiles, bars, stage, copy, 0, head, first_q + j * ROWS, stats_tile + j)
                    else:
                        _load_step(descs[0], descs[1], descs[2], tiles, bars, stage, copy * batches + batch, batch, head, j * ROWS,
                                   stats_tile + j)
                    if loaded == 0:  # behind the first queries: keys and values have one buffer, which is freed late
                        load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED)
                        loaded = 1
                    step += 1
                stats_tile += head_tiles
            if loaded == 0:
                load_tile_keys(descs, tail_descs, tiles, bars, taken, sequence, batch, kv_head, key, first_k, len_k, PACKED)
        taken += 1


@gluon.jit
def _add_dq(dq_desc, turns, dq_tiles, work, bars, group, head_tiles, chunk, near, copy_tiles, ROWS: gl.constexpr, WIDTH: gl.constexpr,
            ORDERED: gl.constexpr):
    """The warp that has both halves of dQ added to their stage's buffer; the consumers run up to a step ahead of its waiting."""
    work_full, work_empty, dq_full, dq_empty = bars[6], bars[7], bars[9], bars[10]
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin = word(work, slot, 4)
        end = word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        tile = word(work, slot, 11)
        mbarrier.arrive(work_empty.index(slot), count=1)
        seams = _seams(key, len_q, len_k, chunk, near, ROWS)
        for _ in range(group):
            for i in range(begin, end):
                now = 0
                if ORDERED:
                    now = gl.load(turns + tile + i, volatile=True)
                dq_tile = tile + i + _copy(i, seams) * copy_tiles
                for c in gl.static_range(2):
                    mbarrier.wait(dq_full.index(c), step & 1)
                    if ORDERED and c == 0:
                        await_turn(turns + tile + i, now, i, key, len_q, len_k, 0, True, ROWS)
                    add_half(dq_desc, dq_tiles, dq_tile, c, ROWS * WIDTH)
                for c in gl.static_range(2):
                    tma.store_wait(1 - c)
                    mbarrier.arrive(dq_empty.index(c), count=1)
                if ORDERED:
                    pass_turn(turns + tile + i)
                step += 1
            tile += head_tiles
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit
def _consume(outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, dk_scale, group, head_tiles, chunk, near,
             copy_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
             ME: gl.constexpr, PACKED: gl.constexpr, WRITER: gl.constexpr):
    """dK and dV of 64 keys of each tile, dK in the keys' frame."""
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dks, stride_dkh, stride_dvs, stride_dvh = outs
    k_full, v_full, work_full = bars[3], bars[4], bars[6]
    dtype: gl.constexpr = tiles[0].dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    taken = 0
    at = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin, full_begin, end = word(work, slot, 4), word(work, slot, 5), word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        seams = _seams(key, len_q, len_k, chunk, near, ROWS)
        j = gl.arange(0, HALF, gl.SliceLayout(1, scores_layout)) + (key + ME * HALF)
        low = gl.where(j < len_k, j - (len_k - len_q), 1 << 30)  # keys behind the end are seen by no query that there is
        dk = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        dq_tile = word(work, slot, 11)
        before = at - begin
        bounds = (begin, full_begin, end)
        for _ in range(group):
            for part in gl.static_range(2):
                for i in range(bounds[part], bounds[part + 1]):
                    place = dq_tile + i
                    if not WRITER:
                        place += _copy(i, seams) * copy_tiles
                    dk, dv = pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, place, columns, bars, before + i, 1.0,
                                       low - i * ROWS, low, ROWS, STAGES, ME, part == 0, False, WRITER)
            before += end - begin
            dq_tile += head_tiles
        at = before + begin
        batch, kv_head, key, first_k, len_k, _ = end_tile(work, slot, bars)
        row = key + ME * HALF
        store_keys(dv_desc, dv_ptr, stride_dvs, stride_dvh, out_tiles.index(ME), dv.to(dtype), batch, kv_head, first_k, row, len_k,
                   VALUE_DIM, PACKED)
        dk = dk * dk_scale
        store_keys(dk_desc, dk_ptr, stride_dks, stride_dkh, out_tiles.index(ME), dk.to(dtype), batch, kv_head, first_k, row, len_k,
                   HEAD_DIM, PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_seqs", "batches", "seqlen_q", "seqlen_k",
                              "kv_heads", "head_group", "head_tiles", "n_tiles", "chunk", "near", "copy_tiles"],
           do_not_specialize_on_alignment=["turns", "cu_seqlens"])
def dual_chunk_bwd_hopper_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                                 dv_desc, dk_ptr, dv_ptr, dq_desc, counter, turns, cu_seqlens, stride_dks, stride_dkh, stride_dvs,
                                 stride_dvh, dk_scale, n_seqs, batches, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles,
                                 n_tiles, chunk, near, copy_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr,
                                 PACKED: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
                                 WRITER: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles, ds_tiles, dq_tiles, out_tiles, columns = pair_tiles(dtype, ROWS, WIDTH, STAGES)
    work = gl.allocate_shared_memory(gl.int32, [WORK, 16], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 2, 3 if WRITER else 2)
    ds_full = (barriers(2, 1), barriers(2, 1))
    dq_full, dq_empty = barriers(2, 1), barriers(2, 1)
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    tail_descs = (q_tail_desc, do_tail_desc, k_tail_desc, v_tail_desc)
    outs = (dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dks, stride_dkh, stride_dvs, stride_dvh)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, dq_full, dq_empty)
    shape = (counter, cu_seqlens, cu_seqlens, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    if WRITER:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, dk_scale, group, head_tiles, chunk,
                        near, copy_tiles, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, WRITER)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, dk_scale, group, head_tiles, chunk,
                        near, copy_tiles, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, WRITER)),
            (_load, (descs, tail_descs, tiles, bars, work, shape, chunk, near, batches, n_tiles, STAGES, PACKED, ORDERED, ROWS)),
            (_add_dq, (dq_desc, turns, dq_tiles, work, bars, group, head_tiles, chunk, near, copy_tiles, ROWS, WIDTH, ORDERED)),
        ], [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, dk_scale, group, head_tiles, chunk,
                        near, copy_tiles, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, WRITER)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, dk_scale, group, head_tiles, chunk,
                        near, copy_tiles, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, WRITER)),
            (_load, (descs, tail_descs, tiles, bars, work, shape, chunk, near, batches, n_tiles, STAGES, PACKED, ORDERED, ROWS)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
