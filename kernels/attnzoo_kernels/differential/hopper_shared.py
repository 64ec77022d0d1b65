"""The Gluon kernel of differential attention's Hopper backward where both paths read the same keys: FlashAttention's walk in pairs.

A step is 64 queries of both paths, side by side as 128 columns of scores against the same keys: scores, dK and dQ are one product each for
both paths, as are dO Vᵀ and dV of their combined weights. Each consumer makes one path's dQ from both consumers' dS, a step late, so that
they need not keep step with each other; a warp has it added to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import (
    barrier,
    barriers,
    fence_async_shared,
    invalidate,
    mbarrier,
    release,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels.differential.hopper_gradients import halves, statistics, weights_of, whole
from attnzoo_kernels.differential.hopper_loads import STATS, load
from attnzoo_kernels.flash.hopper_gradients import dq_product, store_keys
from attnzoo_kernels.flash.hopper_loads import HALF, ROWS, WORK, await_work, end_tile, queries_seeing, walk_barriers, word
from attnzoo_kernels.flash.hopper_pair import add_dq
from attnzoo_kernels.flash.hopper_steps import as_registers

BOTH = gl.constexpr(128)  # queries of both paths in a step


@gluon.jit
def _dq_of(k_tiles, ds_tiles, ds_full, step, some, ME: gl.constexpr):
    """Path ME's dQ of the step before `step`, in flight once the other consumer's dS is there; of no use unless there was `some`."""
    slot, phase = ring(step + 1, 2)
    mbarrier.wait(ds_full[1 - ME].index(slot), phase ^ 1, pred=some)
    WIDTH: gl.constexpr = k_tiles.shape[2]
    return dq_product(k_tiles, ds_tiles, slot, ME * ROWS, 0, WIDTH)


@gluon.jit
def _hand_on(dq, dq_tiles, bars, step, ME: gl.constexpr):
    """dQ of the step before `step` to the warp that adds it to memory, and the other consumer's dS back to it."""
    dq_full, dq_empty, ds_empty = bars[9], bars[10], bars[11]
    WIDTH: gl.constexpr = dq.shape[1]
    mbarrier.wait(dq_empty.index(ME), step & 1)
    dq_tiles.index(ME)._reinterpret(gl.float32, [ROWS, WIDTH], as_registers(WIDTH)).store(dq)
    fence_async_shared()
    barrier()
    release(dq_full.index(ME))
    release(ds_empty[1 - ME].index((step + 1) % 2))


@gluon.jit
def _step(dk, dv, tiles, ds_tiles, dq_tiles, columns, bars, step, some, scale, low, high, STAGES: gl.constexpr, ME: gl.constexpr,
          MASKED: gl.constexpr, HAS_LEFT: gl.constexpr):
    """Adds the step's share to dK and dV, and hands on path ME's dQ of the step before, if there was `some`."""
    q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, step_empty, ds_full, ds_empty = bars[0], bars[1], bars[2], bars[8], bars[11]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOTH, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    column: gl.constexpr = gl.SliceLayout(0, half_layout)
    dtype: gl.constexpr = q_tiles.dtype
    stage, phase = ring(step, STAGES)
    mbarrier.wait(q_full.index(stage), phase)
    # [HALF, BLOCK_D] x [BLOCK_D, BOTH]
    pending = warpgroup_mma(k_tiles.index(ME), q_tiles.index(stage).permute((1, 0)), gl.zeros([HALF, BOTH], gl.float32, scores_layout),
                            use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    # [HALF, BLOCK_DV] x [BLOCK_DV, ROWS]
    dweights_pending = warpgroup_mma(v_tiles.index(ME), do_tiles.index(stage).permute((1, 0)),
                                     gl.zeros([HALF, ROWS], gl.float32, half_layout), use_acc=False, is_async=True)
    left, right = halves(warpgroup_mma_wait(1, deps=(pending,)))
    left = weights_of(left, stats_tiles, stage, 0, 0, columns, low, high, scale, MASKED, HAS_LEFT)
    right = weights_of(right, stats_tiles, stage, 2, 0, columns, low, high, scale, MASKED, HAS_LEFT)
    right = right * statistics(stats_tiles, stage, 4, 0, column, ROWS)
    p = gl.convert_layout((left - right).to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    # [HALF, ROWS] x [ROWS, BLOCK_DV]
    dv_pending = warpgroup_mma(p, do_tiles.index(stage), dv, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=(dweights_pending,))
    left = left * (dweights - statistics(stats_tiles, stage, 1, 0, column, ROWS))
    right = right * (statistics(stats_tiles, stage, 3, 0, column, ROWS) - dweights)
    dscores = whole(left.to(dtype), right.to(dtype), scores_layout)
    slot, slot_phase = ring(step, 2)
    mbarrier.wait(ds_empty[ME].index(slot), slot_phase ^ 1)
    ds_tiles.index(slot * 2 + ME).store(dscores)
    fence_async_shared()
    barrier()
    release(ds_full[ME].index(slot))
    ds = gl.convert_layout(dscores, gl.DotOperandLayout(0, dk.type.layout, 2))
    dq_pending = _dq_of(k_tiles, ds_tiles, ds_full, step, some, ME)
    # [HALF, BOTH] x [BOTH, BLOCK_D]
    dk_pending = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
    dv, dq, p = warpgroup_mma_wait(1, deps=(dv_pending, dq_pending, p))
    if some:
        _hand_on(dq, dq_tiles, bars, step, ME)
    dk, ds = warpgroup_mma_wait(0, deps=(dk_pending, ds))
    release(step_empty.index(stage))
    return dk, dv


@gluon.jit
def _consume(outs, tiles, ds_tiles, dq_tiles, out_tiles, columns, work, bars, scale, dk_scale, kv_heads, group, window_left, window_right,
             HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
             ME: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """dK and dV of 64 keys of each tile, and path ME's dQ."""
    dk_desc, dv_desc, dk_ptr, dv_ptr = outs
    k_full, v_full, work_full = bars[3], bars[4], bars[6]
    dtype: gl.constexpr = tiles[0].dtype
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin, full_begin, full_end, end = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6), word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        low, high = queries_seeing(key + ME * HALF, len_q, len_k, window_left, window_right, HAS_RIGHT, half_layout)
        dk = gl.zeros([HALF, BLOCK_D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16]))
        dv = gl.zeros([HALF, BLOCK_DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16]))
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        bounds = (begin, full_begin, full_end, end)
        first = step
        for _ in range(group):
            before = step - begin
            for part in gl.static_range(3):
                if part != 2 or HAS_LEFT:
                    for i in range(bounds[part], bounds[part + 1]):
                        dk, dv = _step(dk, dv, tiles, ds_tiles, dq_tiles, columns, bars, before + i, before + i > first, scale,
                                       low - i * ROWS, high - i * ROWS, STAGES, ME, part != 1, HAS_LEFT)
            step = before + end
        if step > first:
            dq_pending = _dq_of(tiles[3], ds_tiles, bars[8], step, True, ME)
            _hand_on(warpgroup_mma_wait(0, deps=(dq_pending,)), dq_tiles, bars, step, ME)
        batch, kv_head, key, first_k, len_k, _ = end_tile(work, slot, bars)
        row = key + ME * HALF
        tile = out_tiles.index(ME)
        store_keys(dv_desc, dv_ptr, kv_heads * VALUE_DIM, VALUE_DIM, tile, dv.to(dtype), batch, kv_head, first_k, row, len_k, VALUE_DIM,
                   PACKED)
        dk = (dk * dk_scale).to(dtype)
        store_keys(dk_desc, dk_ptr, kv_heads * HEAD_DIM, HEAD_DIM, tile, dk, batch, kv_head, first_k, row, len_k, HEAD_DIM, PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_shared_kernel(q1_desc, q2_desc, do_desc, k_desc, v_desc, stats_desc, q1_tail_desc, q2_tail_desc, do_tail_desc,
                                   k_tail_desc, v_tail_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, counter, cu_seqlens_q,
                                   cu_seqlens_k, softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads,
                                   group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
                                   BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
                                   HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q1_desc.dtype
    d_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    dv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_D], d_layout)  # of both paths in turn
    q_pairs = q_tiles._reinterpret(dtype, [STAGES, BOTH, BLOCK_D], d_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_DV], dv_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], d_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_DV], dv_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, HALF, BOTH], gl.NVMMASharedLayout.get_default_for([HALF, BOTH], dtype))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], gl.NVMMASharedLayout.get_default_for([128, 32], gl.float32))
    out_tiles = gl.allocate_shared_memory(dtype, [2, HALF, 64], square)
    stats_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, STATS],
                                            gl.NVMMASharedLayout.get_default_for([1, STATS], gl.float32))
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], flat)
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    work = gl.allocate_shared_memory(gl.int32, [WORK, 16], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 2, 3)
    ds_full, ds_empty = (barriers(2, 1), barriers(2, 1)), (barriers(2, 1), barriers(2, 1))
    dq_full, dq_empty = barriers(2, 1), barriers(2, 1)
    descs = (q1_desc, q2_desc, do_desc, k_desc, k_desc, v_desc, stats_desc)
    tail_descs = (q1_tail_desc, q2_tail_desc, do_tail_desc, k_tail_desc, k_tail_desc, v_tail_desc)
    outs = (dk_desc, dv_desc, dk_ptr, dv_ptr)
    loaded = (q_tiles, q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles)
    tiles = (q_pairs, do_tiles, stats_tiles, k_tiles, v_tiles)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, dq_full, dq_empty, ds_empty)
    shape = (counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    gl.warp_specialize([
        (_consume, (outs, tiles, ds_tiles, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, kv_heads, group, window_left,
                    window_right, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT)),
        (_consume, (outs, tiles, ds_tiles, dq_tiles, out_tiles, columns, work, bars, scale, softmax_scale, kv_heads, group, window_left,
                    window_right, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT)),
        (load, (descs, tail_descs, loaded, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                True, True)),
        (add_dq, (dq_desc, counter, dq_tiles, work, bars, group, head_tiles, window_right, BOTH, BLOCK_D, HAS_RIGHT, False)),
    ], [4, 1, 1], [REGISTERS, 24, 24])
    invalidate(bars)
