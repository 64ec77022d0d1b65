"""The Gluon kernel of the Hopper backward: FlashAttention's walk, each 128 keys along their list of tiles of 64 queries.

As there one warp loads, two consumers hold dK and dV of 64 keys each and make half of dQ = dS K, and have TMA add it to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import barriers, invalidate, mbarrier, ring, tma
from attnzoo_kernels.block_sparse.hopper_lists import end_tile, list_lengths, load
from attnzoo_kernels.flash.hopper_loads import HALF, ROWS, WORK, await_work, queries_seeing, walk_barriers, word
from attnzoo_kernels.flash.hopper_pair import pair_tiles
from attnzoo_kernels.flash.hopper_steps import pair_step


@gluon.jit
def _consume(outs, tiles, buffers, bars, lists, scales, sizes, WIDTH: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
             GROUPED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc, dq_desc = outs
    numbers, ds_tiles, dq_tiles, out_tiles, columns, work = buffers
    count, stride_head = lists[2], lists[6]
    scale, dk_scale = scales
    kv_heads, group, head_tiles, len_q, len_k, window_left, window_right = sizes
    tiles_full, k_full, v_full, work_full = bars[0], bars[3], bars[4], bars[6]
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
        dq_tile = (word(work, slot, 1) * kv_heads + word(work, slot, 2)) * group * head_tiles
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        for member in range(group):
            if GROUPED:
                length, clear = list_lengths(count, number + member * stride_head)
            bounds = (0, clear, length)
            for part in gl.static_range(2):
                for i in range(bounds[part], bounds[part + 1]):
                    stage, phase = ring(step + i, STAGES)
                    mbarrier.wait(tiles_full.index(stage), phase)
                    row_tile = word(numbers, stage, 0)
                    dk, dv = pair_step(dk, dv, tiles, ds_tiles, dq_desc, dq_tiles, dq_tile + row_tile, columns, bars, step + i, scale,
                                       low - row_tile * ROWS, high - row_tile * ROWS, ROWS, STAGES, ME, part == 1, HAS_LEFT, False)
            step += length
            dq_tile += head_tiles
        end_tile(work, slot, bars, dk_desc, dv_desc, out_tiles.index(ME), dk, dv, dk_scale, ME)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "kv_heads", "head_tiles", "n_tiles", "list_tiles",
                              "list_width", "stride_lb", "stride_lh"],
           do_not_specialize_on_alignment=["order", "index", "count", "counter"])
def block_sparse_bwd_pair_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_desc, order, index, count, counter,
                                 stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, window_left, window_right, seqlen_q,
                                 seqlen_k, kv_heads, group, head_tiles, n_tiles, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
                                 HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
                                 LOAD_REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles, ds_tiles, dq_tiles, out_tiles, columns = pair_tiles(dtype, ROWS, WIDTH, STAGES)
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    work = gl.allocate_shared_memory(gl.int32, [WORK, 8], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 2, 2)
    ds_full = (barriers(2, 1), barriers(2, 1))
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, (), ())
    lists = (order, index, count, list_tiles, list_width, stride_lb, stride_lh)
    outs = (dk_desc, dv_desc, dq_desc)
    buffers = (numbers, ds_tiles, dq_tiles, out_tiles, columns, work)
    scales = (scale, softmax_scale)
    sizes = (kv_heads, group, head_tiles, seqlen_q, seqlen_k, window_left, window_right)
    # partitions get constants only where the tuple is written out
    gl.warp_specialize([
        (_consume, (outs, tiles, buffers, bars, lists, scales, sizes, WIDTH, STAGES, 0, GROUPED, HAS_LEFT, HAS_RIGHT)),
        (_consume, (outs, tiles, buffers, bars, lists, scales, sizes, WIDTH, STAGES, 1, GROUPED, HAS_LEFT, HAS_RIGHT)),
        (load, (descs, tiles, numbers, bars, work, lists, counter, kv_heads, group, head_tiles, n_tiles, STAGES, GROUPED)),
    ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
