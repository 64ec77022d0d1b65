"""The Gluon kernel of the Hopper backward up to width 64: FlashAttention's walk, each 128 keys along their list of tiles of 64 queries.

As there one warp loads, two consumers hold dK and dV of 64 keys each, and a warp group of its own adds dQ = dS K to a float32 buffer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import barriers, invalidate, mbarrier, ring, tma, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels.block_sparse.hopper_lists import end_tile, find_list, list_lengths, load
from attnzoo_kernels.flash.hopper_gradients import add_to, dq_product, group_step
from attnzoo_kernels.flash.hopper_loads import HALF, ROWS, WORK, await_work, queries_seeing, walk_barriers, word


@gluon.jit
def _make_dq(dq_ptr, k_tiles, ds_tiles, work, bars, lists, kv_heads, group, head_tiles, WIDTH: gl.constexpr, GROUPED: gl.constexpr):
    """The warp group of its own: dQ of every step from both consumers' dS."""
    entries, count, width, stride_head = lists[1], lists[2], lists[4], lists[6]
    kv_empty, work_full, work_empty, ds_full, ds_empty = bars[5], bars[6], bars[7], bars[8], bars[9]
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        head = (word(work, slot, 1) * kv_heads + word(work, slot, 2)) * group
        length, number = word(work, slot, 4), word(work, slot, 6)
        mbarrier.arrive(work_empty.index(slot), count=1)
        for member in range(group):
            first_tile = dq_ptr + ((head + member) * head_tiles).to(gl.int64) * (ROWS * WIDTH)
            of_head = number + member * stride_head
            if GROUPED:
                length, _ = list_lengths(count, of_head)
            entry = find_list(entries, of_head, width)
            listed = gl.load(entry)
            for _ in range(length):
                row_tile = listed
                entry += 1
                listed = gl.load(entry)
                ds_slot, phase = ring(step, 2)
                mbarrier.wait(ds_full.index(ds_slot), phase)
                dq = warpgroup_mma_wait(0, deps=(dq_product(k_tiles, ds_tiles, ds_slot, 0, 0, WIDTH),))
                mbarrier.arrive(ds_empty.index(ds_slot), count=1)
                add_to(first_tile + row_tile.to(gl.int64) * (ROWS * WIDTH), dq)
                step += 1
        mbarrier.arrive(kv_empty, count=1)
        taken += 1
        slot, more = await_work(work, work_full, taken)


@gluon.jit
def _consume(outs, tiles, buffers, bars, lists, scales, sizes, WIDTH: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
             GROUPED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc = outs
    numbers, ds_tiles, out_tiles, columns, work = buffers
    count, stride_head = lists[2], lists[6]
    scale, dk_scale = scales
    group, len_q, len_k, window_left, window_right = sizes
    q_tiles, k_tiles = tiles[0], tiles[3]
    q_full, k_full, v_full, work_full = bars[0], bars[3], bars[4], bars[6]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        length, clear, number = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6)
        low, high = queries_seeing(key + ME * HALF, len_q, len_k, window_left, window_right, HAS_RIGHT, scores_layout)
        dk = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        for member in range(group):
            if GROUPED:
                length, clear = list_lengths(count, number + member * stride_head)
            if length > 0:
                stage, phase = ring(step, STAGES)
                mbarrier.wait(q_full.index(stage), phase)
                # [HALF, WIDTH] x [WIDTH, ROWS]
                pending = warpgroup_mma(k_tiles.index(ME), q_tiles.index(stage).permute((1, 0)),
                                        gl.zeros([HALF, ROWS], gl.float32, scores_layout), use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(pending,))
                bounds = (0, gl.minimum(clear, length - 1), length - 1, length)
                for part in gl.static_range(3):
                    for i in range(bounds[part], bounds[part + 1]):
                        row_tile = word(numbers, (step + i) % STAGES, 0)
                        scores, dk, dv = group_step(
                            scores, dk, dv, tiles, ds_tiles, columns, bars, step + i, scale, low - row_tile * ROWS, high - row_tile * ROWS,
                            WIDTH, STAGES, ME, part > 0, part == 2, HAS_LEFT)
                step += length
        end_tile(work, slot, bars, dk_desc, dv_desc, out_tiles.index(ME), dk, dv, dk_scale, ME)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "kv_heads", "head_tiles", "n_tiles", "list_tiles",
                              "list_width", "stride_lb", "stride_lh"],
           do_not_specialize_on_alignment=["order", "index", "count", "counter"])
def block_sparse_bwd_hopper_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_ptr, order, index, count, counter,
                                   stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, window_left, window_right, seqlen_q,
                                   seqlen_k, kv_heads, group, head_tiles, n_tiles, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
                                   HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
                                   LOAD_REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], rows_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], rows_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], rows_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], rows_layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, HALF, WIDTH], rows_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, HALF, ROWS], gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype))
    stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * ROWS],
                                            gl.NVMMASharedLayout.get_default_for([1, 2 * ROWS], gl.float32))
    columns = gl.allocate_shared_memory(gl.int32, [ROWS], flat)
    columns.store(gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    work = gl.allocate_shared_memory(gl.int32, [WORK, 8], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 3, 3)
    ds_full, ds_empty = barriers(2, 2), barriers(2, 1)
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    tiles = (q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, ds_empty)
    lists = (order, index, count, list_tiles, list_width, stride_lb, stride_lh)
    outs = (dk_desc, dv_desc)
    buffers = (numbers, ds_tiles, out_tiles, columns, work)
    scales = (scale, softmax_scale)
    sizes = (group, seqlen_q, seqlen_k, window_left, window_right)
    # partitions get constants only where the tuple is written out
    gl.warp_specialize([
        (_make_dq, (dq_ptr, k_tiles, ds_tiles, work, bars, lists, kv_heads, group, head_tiles, WIDTH, GROUPED)),
        (_consume, (outs, tiles, buffers, bars, lists, scales, sizes, WIDTH, STAGES, 0, GROUPED, HAS_LEFT, HAS_RIGHT)),
        (_consume, (outs, tiles, buffers, bars, lists, scales, sizes, WIDTH, STAGES, 1, GROUPED, HAS_LEFT, HAS_RIGHT)),
        (load, (descs, tiles, numbers, bars, work, lists, counter, kv_heads, group, head_tiles, n_tiles, STAGES, GROUPED)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
