"""The Gluon kernel of differential attention's Hopper backward: all of dQ1, dQ2, dK1, dK2 and dV in one walk, transposed (keys by queries).

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads; two consumers hold dK1, dK2 and dV of 64
keys each in registers and walk the queries in steps of 64, of all heads of a group, one path after the other inside a step: dO Vᵀ and dV
are one product for both. Each consumer makes one path's dQ from both consumers' dS and adds it to a float32 buffer from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import (
    barriers,
    fence_async_shared,
    invalidate,
    mbarrier,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels.differential.hopper_loads import STATS, load
from attnzoo_kernels.flash.hopper_gradients import add_to, store_keys
from attnzoo_kernels.flash.hopper_loads import HALF, ROWS, WORK, await_work, end_tile, queries_seeing, walk_barriers, word


@gluon.jit
def halves(x):
    """The left and the right columns of x [M, N]: in a product's layout a thread holds some of both."""
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, width]), (0, 2, 1)))
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def whole(left, right, layout: gl.constexpr):
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def statistics(stats_tiles, stage, WHICH: gl.constexpr, SIDE: gl.constexpr, column: gl.constexpr, COUNT: gl.constexpr = ROWS // 2):
    """Of COUNT of a step's queries: 0 the first path's LSE in base 2, 1 its delta, 2 the second path's LSE, 3 its delta, 4 lambda."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    part: gl.constexpr = STATS // ROWS
    tile = stats_tiles.index(stage * 2 + WHICH // part)._reinterpret(gl.float32, [STATS], flat)
    return tile.slice(WHICH % part * ROWS + SIDE * COUNT, COUNT).load(column)[None, :]


@gluon.jit
def weights_of(scores, stats_tiles, stage, WHICH: gl.constexpr, SIDE: gl.constexpr, columns, low, high, scale, MASKED: gl.constexpr,
             HAS_LEFT: gl.constexpr):
    column: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    count: gl.constexpr = scores.shape[1]
    x = scores * scale - statistics(stats_tiles, stage, WHICH, SIDE, column, count)
    if MASKED:  # the columns' numbers come from memory: in registers they would have to be spilled
        c = columns.slice(SIDE * count, count).load(column)[None, :]
        seen = c >= low[:, None]
        if HAS_LEFT:
            seen = seen & (c <= high[:, None])
        x = gl.where(seen, x, -float("inf"))
    return gl.exp2(x)


@gluon.jit
def _second_half(scores, p, dweights, stats_tiles, stage, SIDE: gl.constexpr, columns, low, high, scale, MASKED: gl.constexpr,
                 HAS_LEFT: gl.constexpr, dtype: gl.constexpr):
    """Of half a step: dS of the second path, and the combined weights, rounded once more."""
    layout: gl.constexpr = scores.type.layout
    column: gl.constexpr = gl.SliceLayout(0, layout)
    weights = weights_of(scores, stats_tiles, stage, 2, SIDE, columns, low, high, scale, MASKED, HAS_LEFT)
    weights = weights * statistics(stats_tiles, stage, 4, SIDE, column)
    ds = (weights * (statistics(stats_tiles, stage, 3, SIDE, column) - dweights)).to(dtype)
    return ds, (_unpacked(p, dtype, layout) - weights).to(dtype)


@gluon.jit
def _packed(x, dtype: gl.constexpr):
    """x [M, N] rounded, two numbers a register, which the compiler does not see to."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _unpacked(x, dtype: gl.constexpr, layout: gl.constexpr):
    """What _packed made, in float32."""
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        asm: gl.constexpr = "{ .reg .b16 even, odd; mov.b32 {even, odd}, $2; cvt.f32.f16 $0, even; cvt.f32.f16 $1, odd; }"
    even, odd = gl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [x.shape[0], x.shape[1] * 2]), layout)


@gluon.jit
def _step(scores, dk1, dk2, dv, tiles, ds_tiles, columns, bars, dq_tile, step, scale, low, high, STAGES: gl.constexpr, ME: gl.constexpr,
          SHARED_K: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr, HAS_LEFT: gl.constexpr):
    """Adds the step's share to dK1, dK2 and dV; takes its first path's scores, and gives those of the next step."""
    q1_tiles, q2_tiles, do_tiles, stats_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, step_empty, ds_full = bars[0], bars[1], bars[2], bars[8]
    scores_layout: gl.constexpr = scores.type.layout
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    dtype: gl.constexpr = q1_tiles.dtype
    second: gl.constexpr = 0 if SHARED_K else 2  # where the second path's keys lie
    nothing = gl.zeros([HALF, ROWS], gl.float32, scores_layout)
    stage, phase = ring(step, STAGES)
    slot, slot_phase = ring(step, 2)
    mbarrier.wait(do_full.index(stage), phase)
    # [HALF, BLOCK_DV] x [BLOCK_DV, ROWS], for both paths
    pending = warpgroup_mma(v_tiles.index(ME), do_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    left, right = halves(scores)
    column: gl.constexpr = gl.SliceLayout(0, left.type.layout)
    row: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    low = gl.convert_layout(low, row)
    high = gl.convert_layout(high, row)
    left = weights_of(left, stats_tiles, stage, 0, 0, columns, low, high, scale, MASKED, HAS_LEFT)
    right = weights_of(right, stats_tiles, stage, 0, 1, columns, low, high, scale, MASKED, HAS_LEFT)
    dleft, dright = halves(warpgroup_mma_wait(0, deps=(pending,)))
    ds1 = whole((left * (dleft - statistics(stats_tiles, stage, 1, 0, column))).to(dtype),
                (right * (dright - statistics(stats_tiles, stage, 1, 1, column))).to(dtype), scores_layout)
    pleft = _packed(left, dtype)
    pright = _packed(right, dtype)
    ds_tiles.index(slot * 4 + ME).store(ds1)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot * 2), count=1)
    # [HALF, BLOCK_D] x [BLOCK_D, ROWS]
    pending = warpgroup_mma(k_tiles.index(second + ME), q2_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    # [HALF, ROWS] x [ROWS, BLOCK_D]; dS from shared memory, where it lies for dQ: as operands in registers there would be no room
    dk1_pending = warpgroup_mma(ds_tiles.index(slot * 4 + ME), q1_tiles.index(stage), dk1, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(pending,))
    left, right = halves(scores)
    ds_left, p_left = _second_half(left, pleft, dleft, stats_tiles, stage, 0, columns, low, high, scale, MASKED, HAS_LEFT, dtype)
    ds_right, p_right = _second_half(right, pright, dright, stats_tiles, stage, 1, columns, low, high, scale, MASKED, HAS_LEFT, dtype)
    ds2 = whole(ds_left, ds_right, scores_layout)
    p = whole(p_left, p_right, dv_operand)
    # [HALF, ROWS] x [ROWS, BLOCK_DV]
    dv_pending = warpgroup_mma(p, do_tiles.index(stage), dv, is_async=True)
    ds_tiles.index(slot * 4 + 2 + ME).store(ds2)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot * 2 + 1), count=1)
    if SHARED_K:
        dk1_pending = warpgroup_mma(ds_tiles.index(slot * 4 + 2 + ME), q2_tiles.index(stage), dk1_pending, is_async=True)
    else:
        dk2_pending = warpgroup_mma(ds_tiles.index(slot * 4 + 2 + ME), q2_tiles.index(stage), dk2, is_async=True)
    mbarrier.wait(ds_full.index(slot * 2 + ME), slot_phase)
    width: gl.constexpr = dk1.shape[1]
    dq = gl.zeros([ROWS, width], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16]))
    for c in gl.static_range(2):
        # [ROWS, HALF] x [HALF, BLOCK_D]
        dq = warpgroup_mma(ds_tiles.index(slot * 4 + ME * 2 + c).permute((1, 0)), k_tiles.index(second * ME + c), dq, use_acc=c > 0,
                           is_async=True)
    if SHARED_K:
        dv, dk1, p = warpgroup_mma_wait(1, deps=(dv_pending, dk1_pending, p))
    else:
        dv, dk1, dk2, p = warpgroup_mma_wait(1, deps=(dv_pending, dk1_pending, dk2_pending, p))
    mbarrier.arrive(step_empty.index(stage), count=1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    add_to(dq_tile, dq)
    if not LAST:  # not before dQ is out of the registers
        next_stage, next_phase = ring(step + 1, STAGES)
        mbarrier.wait(q_full.index(next_stage), next_phase)
        pending = warpgroup_mma(k_tiles.index(ME), q1_tiles.index(next_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(pending,))
    return scores, dk1, dk2, dv


@gluon.jit
def _consume(outs, dq_ptr, tiles, ds_tiles, out_tiles, columns, work, bars, scale, dk_scale, kv_heads, group, head_tiles, window_left,
             window_right, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
             STAGES: gl.constexpr, ME: gl.constexpr, SHARED_K: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
             HAS_RIGHT: gl.constexpr):
    """dK1, dK2 and dV of 64 keys of each tile, and the dQ of path ME."""
    dk1_desc, dk2_desc, dv_desc, dk1_ptr, dk2_ptr, dv_ptr = outs
    q1_tiles, k_tiles = tiles[0], tiles[4]
    q_full, k_full, v_full, work_full = bars[0], bars[3], bars[4], bars[6]
    dtype: gl.constexpr = q1_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin, full_begin, full_end, end = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6), word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        low, high = queries_seeing(key + ME * HALF, len_q, len_k, window_left, window_right, HAS_RIGHT, scores_layout)
        dk1 = gl.zeros([HALF, BLOCK_D], gl.float32, dk_layout)
        dk2 = 0
        if not SHARED_K:
            dk2 = gl.zeros([HALF, BLOCK_D], gl.float32, dk_layout)
        dv = gl.zeros([HALF, BLOCK_DV], gl.float32, dv_layout)
        dq_tile = dq_ptr + word(work, slot, 11).to(gl.int64) * (ROWS * BLOCK_D)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        if end > begin:
            for _ in range(group):
                stage, phase = ring(step, STAGES)
                mbarrier.wait(q_full.index(stage), phase)
                # [HALF, BLOCK_D] x [BLOCK_D, ROWS]
                pending = warpgroup_mma(k_tiles.index(ME), q1_tiles.index(stage).permute((1, 0)),
                                        gl.zeros([HALF, ROWS], gl.float32, scores_layout), use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(pending,))
                before = step - begin
                bounds = (begin, gl.maximum(gl.minimum(full_begin, end - 1), begin), gl.maximum(gl.minimum(full_end, end - 1), begin),
                          end - 1, end)
                for part in gl.static_range(4):
                    if part != 2 or HAS_LEFT:
                        for i in range(bounds[part], bounds[part + 1]):
                            scores, dk1, dk2, dv = _step(
                                scores, dk1, dk2, dv, tiles, ds_tiles, columns, bars, dq_tile + i * (ROWS * BLOCK_D), before + i, scale,
                                low - i * ROWS, high - i * ROWS, STAGES, ME, SHARED_K, part != 1, part == 3, HAS_LEFT)
                step = before + end
                dq_tile += head_tiles * (ROWS * BLOCK_D)
        batch, kv_head, key, first_k, len_k, _ = end_tile(work, slot, bars)
        row = key + ME * HALF
        tile = out_tiles.index(ME)
        store_keys(dv_desc, dv_ptr, kv_heads * VALUE_DIM, VALUE_DIM, tile, dv.to(dtype), batch, kv_head, first_k, row, len_k, VALUE_DIM,
                   PACKED)
        dk1 = (dk1 * dk_scale).to(dtype)
        store_keys(dk1_desc, dk1_ptr, kv_heads * HEAD_DIM, HEAD_DIM, tile, dk1, batch, kv_head, first_k, row, len_k, HEAD_DIM, PACKED)
        if not SHARED_K:
            dk2 = (dk2 * dk_scale).to(dtype)
            store_keys(dk2_desc, dk2_ptr, kv_heads * HEAD_DIM, HEAD_DIM, tile, dk2, batch, kv_head, first_k, row, len_k, HEAD_DIM, PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_hopper_kernel(q1_desc, q2_desc, do_desc, k1_desc, k2_desc, v_desc, stats_desc, q1_tail_desc, q2_tail_desc,
                                   do_tail_desc, k1_tail_desc, k2_tail_desc, v_tail_desc, dk1_desc, dk2_desc, dv_desc, dk1_ptr, dk2_ptr,
                                   dv_ptr, dq1_ptr, dq2_ptr, counter, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale, window_left,
                                   window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                                   HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                                   SHARED_K: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                                   STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q1_desc.dtype
    paths: gl.constexpr = 1 if SHARED_K else 2
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    dv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q1_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_D], d_layout)
    q2_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_D], d_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_DV], dv_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2 * paths, HALF, BLOCK_D], d_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_DV], dv_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [8, HALF, ROWS], square)  # of two steps, both paths and both consumers
    out_tiles = gl.allocate_shared_memory(dtype, [2, HALF, 64], square)
    stats_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, STATS],
                                            gl.NVMMASharedLayout.get_default_for([1, STATS], gl.float32))
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], flat)
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    work = gl.allocate_shared_memory(gl.int32, [WORK, 16], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 2, 2)
    ds_full = barriers(4, 2)
    descs = (q1_desc, q2_desc, do_desc, k1_desc, k2_desc, v_desc, stats_desc)
    tail_descs = (q1_tail_desc, q2_tail_desc, do_tail_desc, k1_tail_desc, k2_tail_desc, v_tail_desc)
    outs = (dk1_desc, dk2_desc, dv_desc, dk1_ptr, dk2_ptr, dv_ptr)
    tiles = (q1_tiles, q2_tiles, do_tiles, stats_tiles, k_tiles, v_tiles)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full)
    shape = (counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    gl.warp_specialize([
        (_consume, (outs, dq1_ptr, tiles, ds_tiles, out_tiles, columns, work, bars, scale, softmax_scale, kv_heads, group, head_tiles,
                    window_left, window_right, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, STAGES, 0, SHARED_K, PACKED, HAS_LEFT, HAS_RIGHT)),
        (_consume, (outs, dq2_ptr, tiles, ds_tiles, out_tiles, columns, work, bars, scale, softmax_scale, kv_heads, group, head_tiles,
                    window_left, window_right, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, STAGES, 1, SHARED_K, PACKED, HAS_LEFT, HAS_RIGHT)),
        (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                SHARED_K, False)),
    ], [4, 1], [REGISTERS, 24])
    invalidate(bars)
