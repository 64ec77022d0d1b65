"""The Hopper backward where two consumers make all of dQ, dK and dV between them.

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads; each consumer holds dK and dV of 64 keys
in registers, walks the queries, of all heads of a group, and makes half of dQ = dS K from both consumers' dS: half of the columns in
steps of 64 queries, half of the rows in steps of 128. TMA adds the halves to memory, told to by the consumers, or by another warp, which
waits for its turn where the sums are to come in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import invalidate, mbarrier, tma, warpgroup_mma_wait
from attnzoo_kernels.flash.hopper_gradients import await_turn, store_keys, sum_so_far, turn_of, write_to
from attnzoo_kernels.flash.hopper_loads import HALF, WORK, await_work, end_tile, load, queries_seeing, walk_barriers, word
from attnzoo_kernels.flash.hopper_steps import add_half, dq_before, hand_on_dq, pair_step, write_half


@gluon.jit
def pass_turn(turn):
    """Once all that this warp added by TMA is in memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, one) + turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise("{ .reg .pred one; cp.async.bulk.wait_group 0; bar.warp.sync -1; setp.eq.s32 one, $1, 0; "
                              "@one red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, 0; }",
                              "=r,r,l", [gl.arange(0, 32, one), address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_dq(dq_desc, turns, dq_tiles, work, bars, group, head_tiles, window_right, ROWS: gl.constexpr, WIDTH: gl.constexpr,
            HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr):
    """The warp that has both halves of dQ added to memory; the consumers run up to a step ahead of its waiting."""
    work_full, work_empty, dq_full, dq_empty = bars[6], bars[7], bars[9], bars[10]
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin = word(work, slot, 4)
        tiles = word(work, slot, 7) - begin
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        tile = word(work, slot, 11) + begin
        mbarrier.arrive(work_empty.index(slot), count=1)
        for _ in range(group):
            for j in range(tiles):
                now = 0
                mine = 1  # the first in turn writes over what was there
                if ORDERED:
                    now = gl.load(turns + tile, volatile=True)
                    mine = turn_of(begin + j, key, len_q, len_k, window_right, HAS_RIGHT, ROWS)
                for c in gl.static_range(2):
                    mbarrier.wait(dq_full.index(c), step & 1)
                    if ORDERED and c == 0:
                        await_turn(turns + tile, now, begin + j, key, len_q, len_k, window_right, HAS_RIGHT, ROWS)
                    if mine == 0:
                        write_half(dq_desc, dq_tiles, tile, c, ROWS * WIDTH)
                    else:
                        add_half(dq_desc, dq_tiles, tile, c, ROWS * WIDTH)
                for c in gl.static_range(2):
                    tma.store_wait(1 - c)
                    mbarrier.arrive(dq_empty.index(c), count=1)
                if ORDERED:
                    pass_turn(turns + tile)
                tile += 1
                step += 1
            tile += head_tiles - tiles
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit
def pair_tiles(dtype: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """((q, dO, statistics, K, V), dS, dQ, dK or dV on the way out, the numbers of a tile's rows) in shared memory, of a walk by pairs."""
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, WIDTH], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], rows_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], rows_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], keys_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], keys_layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], keys_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, HALF, ROWS], gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype))
    half: gl.constexpr = [ROWS * WIDTH // 64, 32]
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2] + half, gl.NVMMASharedLayout.get_default_for(half, gl.float32))
    stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * ROWS],
                                            gl.NVMMASharedLayout.get_default_for([1, 2 * ROWS], gl.float32))
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], flat)
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    return (q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles), ds_tiles, dq_tiles, out_tiles, columns


@gluon.jit
def _consume(outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, dk_scale, group, head_tiles, window_left,
             window_right, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
             STAGES: gl.constexpr, ME: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             WRITER: gl.constexpr, LATE: gl.constexpr):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, dv_from, dv_to = outs
    SUMMED: gl.constexpr = dv_from is not None
    k_full, v_full, work_full = bars[3], bars[4], bars[6]
    dtype: gl.constexpr = tiles[0].dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    taken = 0
    at = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin, full_begin, full_end, end = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6), word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        low, high = queries_seeing(key + ME * HALF, len_q, len_k, window_left, window_right, HAS_RIGHT, scores_layout)
        dk = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        dq_tile = word(work, slot, 11)
        before = at - begin
        dq_end = dq_tile  # behind the last one that was made
        bounds = (begin, full_begin, full_end, end)
        for _ in range(group):
            for part in gl.static_range(3):
                if part != 2 or HAS_LEFT:
                    for i in range(bounds[part], bounds[part + 1]):
                        made = dq_tile + i
                        if LATE:
                            made = gl.where(i > begin, dq_tile + i, dq_end) - 1
                        dk, dv = pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, made, columns, bars, before + i, scale,
                                           low - i * ROWS, high - i * ROWS, ROWS, STAGES, ME, part != 1, HAS_LEFT, WRITER, LATE,
                                           before + i > at)
            before += end - begin
            dq_end = dq_tile + end
            dq_tile += head_tiles
        if LATE:
            if before + begin > at:
                dq_pending = dq_before(tiles[3], ds_tiles, bars[8], before + begin, True, ROWS, ME)
                dq = warpgroup_mma_wait(0, deps=(dq_pending,))
                hand_on_dq(dq, dq_desc, dq_tiles, dq_end - 1, bars, before + begin, ROWS, ME, WRITER, LATE)
        at = before + begin
        batch, kv_head, key, first_k, len_k, number = end_tile(work, slot, bars, SUMMED)
        row = key + ME * HALF
        out_tile = out_tiles.index(ME)
        if SUMMED:
            dv += sum_so_far(dv_from, number, ME, WIDTH, acc_layout)
            if dv_to.to(gl.int64, bitcast=True) != 0:
                write_to(dv_to + (number * 2 + ME).to(gl.int64) * (HALF * WIDTH), dv)
            else:
                store_keys(dv_desc, dv_ptr, stride_dv, VALUE_DIM, out_tile, dv.to(dtype), batch, kv_head, first_k, row, len_k, VALUE_DIM,
                           PACKED)
            store_keys(dk_desc, dk_ptr, stride_dk, HEAD_DIM, out_tile, (dk * dk_scale).to(dtype), batch, kv_head, first_k, row, len_k,
                       HEAD_DIM, PACKED)
        else:
            store_keys(dv_desc, dv_ptr, stride_dv, VALUE_DIM, out_tile, dv.to(dtype), batch, kv_head, first_k, row, len_k, VALUE_DIM,
                       PACKED)
            dk = dk * dk_scale
            store_keys(dk_desc, dk_ptr, stride_dk, HEAD_DIM, out_tile, dk.to(dtype), batch, kv_head, first_k, row, len_k, HEAD_DIM,
                       PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "turns"])
def flash_bwd_pair_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                          dv_desc, dk_ptr, dv_ptr, dq_desc, dv_from, dv_to, counter, turns, cu_seqlens_q, cu_seqlens_k,
                          softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv,
                          group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
                          WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                          ORDERED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WRITER: gl.constexpr, LATE: gl.constexpr,
                          REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    """dv_from and dv_to are None, or float32 (tiles, KEYS, WIDTH) for launches that add up dV: what one left in dv_from is added unless
    that is null, and what comes out goes to dv_to, or where that is null to dv.
    """
    dtype: gl.constexpr = q_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles, ds_tiles, dq_tiles, out_tiles, columns = pair_tiles(dtype, ROWS, WIDTH, STAGES)
    work = gl.allocate_shared_memory(gl.int32, [WORK, 16], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 2, 3 if WRITER else 2)
    first_ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    second_ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    ds_empty = ()
    if LATE:
        first_ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
        second_ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
        for i in gl.static_range(2):
            mbarrier.init(first_ds_empty.index(i), count=1)
            mbarrier.init(second_ds_empty.index(i), count=1)
        ds_empty = (first_ds_empty, second_ds_empty)
    for i in gl.static_range(2):
        mbarrier.init(first_ds_full.index(i), count=1)
        mbarrier.init(second_ds_full.index(i), count=1)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    tail_descs = (q_tail_desc, do_tail_desc, k_tail_desc, v_tail_desc)
    outs = (dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, dv_from, dv_to)
    ds_full = (first_ds_full, second_ds_full)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, dq_full, dq_empty, ds_empty)
    shape = (counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    if WRITER:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT, WRITER,
                        LATE)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT, WRITER,
                        LATE)),
            (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                    ORDERED, ROWS, dv_from is not None)),
            (add_dq, (dq_desc, turns, dq_tiles, work, bars, group, head_tiles, window_right, ROWS, WIDTH, HAS_RIGHT, ORDERED)),
        ], [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT, WRITER,
                        LATE)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT, WRITER,
                        LATE)),
            (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                    ORDERED, ROWS, dv_from is not None)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate((q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, first_ds_full, second_ds_full, dq_full,
                dq_empty))
    if LATE:
        invalidate(ds_empty)
