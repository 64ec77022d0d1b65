"""The Hopper backward where two consumers make all of dQ, dK and dV between them.

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads; each consumer holds dK and dV of 64 keys
in registers, walks the queries, of all heads of a group, and makes half of dQ = dS K from both consumers' dS: half of the columns in
steps of 64 queries, half of the rows in steps of 128. TMA adds the halves to memory, told to by the consumers, or by another warp, which
waits for its turn where the sums are to come in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import (
    async_add,
    async_store,
    barrier,
    box,
    fence_async_shared,
    invalidate,
    mbarrier,
    release,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels.flash.hopper_gradients import await_turn, dq_product, row_statistics, store_keys, turn_of
from attnzoo_kernels.flash.hopper_loads import HALF, WORK, await_work, load, walk_barriers, word

# [64, 64] in the order of registers, in which dQ lies in memory, as the tile [128, 32] that TMA reads: swizzled by 128 bytes
AS_REGISTERS = gl.constexpr(gl.SharedLinearLayout(
    [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 2], [4, 4], [17, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 1024))


@gluon.jit
def _weights(scores, stats_tiles, columns, slot, scale, low, high, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr):
    """Scores in base 2 less the LSE; -inf where a query does not see the key."""
    column: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    x = scores * scale - row_statistics(stats_tiles, slot, 0, scores.shape[1], column)[None, :]
    if MASKED:  # the columns' numbers come from memory: in registers they would have to be spilled
        c = columns.load(column)[None, :]
        seen = c >= low[:, None]
        if HAS_LEFT:
            seen = seen & (c <= high[:, None])
        x = gl.where(seen, x, -float("inf"))
    return x


@gluon.jit
def add_half(dq_desc, dq_tiles, dq_tile, HALF_OF: gl.constexpr, SIZE: gl.constexpr):
    """One half of a tile of dQ, SIZE floats, to memory."""
    async_add(dq_desc, [0, 0, dq_tile * (SIZE // 32) + HALF_OF * (SIZE // 64), 0], box(dq_tiles.index(HALF_OF), dq_desc))


@gluon.jit
def write_half(dq_desc, dq_tiles, dq_tile, HALF_OF: gl.constexpr, SIZE: gl.constexpr):
    """As add_half, over what was there."""
    async_store(dq_desc, [0, 0, dq_tile * (SIZE // 32) + HALF_OF * (SIZE // 64), 0], box(dq_tiles.index(HALF_OF), dq_desc))


@gluon.jit
def pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, dq_tile, columns, bars, step, scale, low, high, ROWS: gl.constexpr,
              STAGES: gl.constexpr, ME: gl.constexpr, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, WRITER: gl.constexpr):
    """Adds the step's share to dK and dV, and hands on this consumer's half of dQ.

    Scores and dP are in flight together, dQ before dK: it goes its way while the tensor cores are busy with dK.
    """
    q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, step_empty, ds_full, dq_full, dq_empty = bars[0], bars[1], bars[2], bars[8], bars[9], bars[10]
    WIDTH: gl.constexpr = dk.shape[1]
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
    weights = gl.exp2(_weights(scores, stats_tiles, columns, stage, scale, low, high, MASKED, HAS_LEFT))
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    dweights = warpgroup_mma_wait(0, deps=(dweights_pending,))
    delta = row_statistics(stats_tiles, stage, 1, ROWS, gl.SliceLayout(0, scores_layout))
    dscores = (weights * (dweights - delta[None, :])).to(dtype)
    ds_slot, ds_phase = ring(step, 2)
    ds_tiles.index(ds_slot * 2 + ME).store(dscores)
    # [HALF, ROWS] x [ROWS, WIDTH]
    dv_pending = warpgroup_mma(p, do_tiles.index(stage), dv, is_async=True)
    fence_async_shared()
    barrier()
    release(ds_full[ME].index(ds_slot))
    ds = gl.convert_layout(dscores, weights_layout)
    mbarrier.wait(ds_full[1 - ME].index(ds_slot), ds_phase)
    if ROWS == 64:
        dq_pending = dq_product(k_tiles, ds_tiles, ds_slot, 0, ME * (WIDTH // 2), WIDTH // 2)
    else:
        dq_pending = dq_product(k_tiles, ds_tiles, ds_slot, ME * 64, 0, WIDTH)
    dk_pending = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
    dv, dq, p = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending, p))
    if WRITER:
        mbarrier.wait(dq_empty.index(ME), (step & 1) ^ 1)
    else:
        tma.store_wait(0)
    dq_tiles.index(ME)._reinterpret(gl.float32, [64, 64], AS_REGISTERS).store(dq)
    fence_async_shared()
    if WRITER:
        barrier()
        release(dq_full.index(ME))
    else:
        add_half(dq_desc, dq_tiles, dq_tile, ME, ROWS * WIDTH)
    dk, ds = warpgroup_mma_wait(0, deps=(dk_pending, ds))
    release(step_empty.index(stage))
    return dk, dv


@gluon.jit
def pass_turn(turn):
    """Once all that this warp added by TMA is in memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, one) + turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise("{ .reg .pred one; cp.async.bulk.wait_group 0; bar.warp.sync -1; setp.eq.s32 one, $1, 0; "
                              "@one red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, 0; }",
                              "=r,r,l", [gl.arange(0, 32, one), address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_dq(dq_desc, turns, dq_tiles, work, bars, group, head_tiles, window_right, ROWS: gl.constexpr, WIDTH: gl.constexpr,
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
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], gl.NVMMASharedLayout.get_default_for([128, 32], gl.float32))
    stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * ROWS],
                                            gl.NVMMASharedLayout.get_default_for([1, 2 * ROWS], gl.float32))
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], flat)
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    return (q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles), ds_tiles, dq_tiles, out_tiles, columns


@gluon.jit
def _consume(outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, dk_scale, group, head_tiles, window_left,
             window_right, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
             STAGES: gl.constexpr, ME: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             WRITER: gl.constexpr):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv = outs
    k_full, v_full, kv_empty, work_full, work_empty = bars[3], bars[4], bars[5], bars[6], bars[7]
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
        shift = len_k - len_q
        j = gl.arange(0, HALF, gl.SliceLayout(1, scores_layout)) + (key + ME * HALF)
        low = gl.where(j < len_k, 0, 1 << 30)
        if HAS_RIGHT:  # keys behind the end are seen by no query that there is
            low = gl.where(j < len_k, j - shift - window_right, 1 << 30)
        high = j - shift + window_left
        dk = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        dq_tile = word(work, slot, 11)
        before = at - begin
        bounds = (begin, full_begin, full_end, end)
        for _ in range(group):
            for part in gl.static_range(3):
                if part != 2 or HAS_LEFT:
                    for i in range(bounds[part], bounds[part + 1]):
                        dk, dv = pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, dq_tile + i, columns, bars, before + i, scale,
                                           low - i * ROWS, high - i * ROWS, ROWS, STAGES, ME, part != 1, HAS_LEFT, WRITER)
            before += end - begin
            dq_tile += head_tiles
        at = before + begin
        mbarrier.arrive(kv_empty, count=1)
        batch, kv_head, key, first_k = word(work, slot, 1), word(work, slot, 2), word(work, slot, 3), word(work, slot, 10)
        len_k = word(work, slot, 9)
        mbarrier.arrive(work_empty.index(slot), count=1)
        row = key + ME * HALF
        store_keys(dv_desc, dv_ptr, stride_dv, out_tiles.index(ME), dv.to(dtype), batch, kv_head, first_k, row, len_k, VALUE_DIM, PACKED)
        dk = dk * dk_scale
        store_keys(dk_desc, dk_ptr, stride_dk, out_tiles.index(ME), dk.to(dtype), batch, kv_head, first_k, row, len_k, HEAD_DIM, PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "turns"])
def flash_bwd_pair_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                          dv_desc, dk_ptr, dv_ptr, dq_desc, counter, turns, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale, window_left,
                          window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group, head_group, head_tiles, n_tiles,
                          HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr,
                          HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr,
                          STAGES: gl.constexpr, WRITER: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
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
    for i in gl.static_range(2):
        mbarrier.init(first_ds_full.index(i), count=1)
        mbarrier.init(second_ds_full.index(i), count=1)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    tail_descs = (q_tail_desc, do_tail_desc, k_tail_desc, v_tail_desc)
    outs = (dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv)
    ds_full = (first_ds_full, second_ds_full)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, dq_full, dq_empty)
    shape = (counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    if WRITER:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT, WRITER)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT, WRITER)),
            (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                    ORDERED, ROWS)),
            (_add_dq, (dq_desc, turns, dq_tiles, work, bars, group, head_tiles, window_right, ROWS, WIDTH, HAS_RIGHT, ORDERED)),
        ], [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT, WRITER)),
            (_consume, (outs, tiles, ds_tiles, dq_desc, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, head_tiles,
                        window_left, window_right, HEAD_DIM, VALUE_DIM, ROWS, WIDTH, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT, WRITER)),
            (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                    ORDERED, ROWS)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate((q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, first_ds_full, second_ds_full, dq_full,
                dq_empty))
