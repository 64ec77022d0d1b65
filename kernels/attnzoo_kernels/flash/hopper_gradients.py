"""The Gluon kernel of the Hopper backward for narrow heads: dQ, dK and dV in one walk, everything transposed (keys by queries).

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads; two consumers hold dK and dV of 64 keys
each in registers and walk the queries in steps of 64, of all heads of a group; a warp group of its own makes dQ = dS K and adds it to a
float32 buffer straight from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import (
    async_store,
    barrier,
    box,
    fence_async_shared,
    invalidate,
    mbarrier,
    ring,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS, ROWS, WORK, await_work, end_tile, load, queries_seeing, walk_barriers, word


@gluon.jit
def row_statistics(stats_tiles, slot, WHICH: gl.constexpr, ROWS: gl.constexpr, column: gl.constexpr):
    """Of a step's queries: 0 the LSE in base 2, 1 delta."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return stats_tiles.index(slot)._reinterpret(gl.float32, [2 * ROWS], flat).slice(WHICH * ROWS, ROWS).load(column)


@gluon.jit
def _places(pointer, x):
    """Addresses of x [64, N], a product, in the order of registers: four floats a thread, 16 bytes from thread to thread."""
    product: gl.constexpr = x.type.layout
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, product))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, product))
    place = ((c // 8) * 128 + (c % 8) // 2)[None, :] + ((r // 16) * 32 + (r % 8) * 4)[:, None]
    return pointer.to(gl.int64, bitcast=True) + (place * 16).to(gl.int64)


@gluon.jit
def add_to(pointer, x):
    """x [64, N] in a product's layout, added to memory in the order of registers."""
    gl.inline_asm_elementwise("{ red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0; }", "=r,f,f,f,f,l,l,l,l",
                              [x, _places(pointer, x)], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def write_to(pointer, x):
    """As add_to, over what was there."""
    gl.inline_asm_elementwise("{ st.relaxed.gpu.global.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0; }", "=r,f,f,f,f,l,l,l,l",
                              [x, _places(pointer, x)], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def sum_so_far(pointer, tile, ME: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """[HALF, WIDTH] of a tile as earlier launches left it by write_to; zeros if the pointer is null."""
    x = gl.zeros([HALF, WIDTH], gl.float32, layout)
    some = gl.full([HALF, WIDTH], 0, gl.int32, layout) + (pointer.to(gl.int64, bitcast=True) != 0).to(gl.int32)
    place = _places(pointer + (tile * 2 + ME).to(gl.int64) * (HALF * WIDTH), x)
    return gl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.s32 some, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@some ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=f,=f,=f,=f,l,l,l,l,r,r,r,r", [place, some], dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def dq_product(k_tiles, ds_tiles, slot, ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr):
    """64 rows and some columns of dQ = dS K over both consumers' keys, in flight."""
    dq = gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    for c in gl.static_range(2):
        # [64, HALF] x [HALF, COLUMNS]
        dq = warpgroup_mma(ds_tiles.index(slot * 2 + c).slice(ROW, 64, dim=1).permute((1, 0)),
                           k_tiles.index(c).slice(COLUMN, COLUMNS, dim=1), dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def turn_of(query_tile, key, len_q, len_k, window_right, HAS_RIGHT: gl.constexpr, ROWS: gl.constexpr = ROWS):
    """When a key tile adds to a query tile: one after the other of those that see it, from the last one down."""
    last = (len_k - 1) // KEYS
    if HAS_RIGHT:
        last = gl.minimum(last, ((query_tile + 1) * ROWS - 1 + len_k - len_q + window_right) // KEYS)
    return last - key // KEYS


@gluon.jit
def await_turn(turn, now, query_tile, key, len_q, len_k, window_right, HAS_RIGHT: gl.constexpr,
                ROWS: gl.constexpr = ROWS):
    """`now` was read some time ago."""
    mine = turn_of(query_tile, key, len_q, len_k, window_right, HAS_RIGHT, ROWS)
    while now != mine:
        now = gl.load(turn, volatile=True)


@gluon.jit
def _pass_turn(turn, there):
    """The next one may add: one thread says so for the warp group, all of whose additions are behind the barrier and thus released."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    barrier()
    thread = gl.arange(0, 128, one) + gl.where(there, 0, 128)
    address = gl.full([128], 0, gl.int64, one) + turn.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise("{ .reg .pred one; setp.eq.s32 one, $1, 0; @one red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, 0; }",
                              "=r,r,l", [thread, address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _make_dq(dq_ptr, turns, k_tiles, ds_tiles, work, bars, group, head_tiles, window_right, WIDTH: gl.constexpr,
             HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr):
    """The warp group of its own: dQ of every step from both consumers' dS."""
    kv_empty, work_full, work_empty, ds_full, ds_empty = bars[5], bars[6], bars[7], bars[8], bars[9]
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
        dq_tile = dq_ptr + tile.to(gl.int64) * (ROWS * WIDTH)
        turn = turns + tile
        for _ in range(group):
            for j in range(tiles):
                ds_slot, phase = ring(step, 2)
                now = 0
                if ORDERED:
                    now = gl.load(turn + j, volatile=True)
                mbarrier.wait(ds_full.index(ds_slot), phase)
                pending = dq_product(k_tiles, ds_tiles, ds_slot, 0, 0, WIDTH)
                if ORDERED:  # a step late: what was added has arrived by now, and nothing waits for it
                    _pass_turn(turn + j - 1, j > 0)
                dq = warpgroup_mma_wait(0, deps=(pending,))
                mbarrier.arrive(ds_empty.index(ds_slot), count=1)
                if ORDERED:
                    await_turn(turn + j, now, begin + j, key, len_q, len_k, window_right, HAS_RIGHT)
                    if turn_of(begin + j, key, len_q, len_k, window_right, HAS_RIGHT) == 0:
                        write_to(dq_tile, dq)
                    else:
                        add_to(dq_tile, dq)
                else:
                    add_to(dq_tile, dq)
                dq_tile += ROWS * WIDTH
                step += 1
            if ORDERED:
                _pass_turn(turn + tiles - 1, tiles > 0)
            dq_tile += (head_tiles - tiles) * (ROWS * WIDTH)
            turn += head_tiles
        mbarrier.arrive(kv_empty, count=1)
        taken += 1
        slot, more = await_work(work, work_full, taken)


@gluon.jit
def base_2_scores(scores, stats_tiles, columns, slot, scale, low, high, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr):
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
def group_step(scores, dk, dv, tiles, ds_tiles, columns, bars, step, scale, low, high, WIDTH: gl.constexpr, STAGES: gl.constexpr,
               ME: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr, HAS_LEFT: gl.constexpr):
    """Adds the step's share to dK and dV; takes its scores, and gives those of the next step."""
    q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles = tiles
    q_full, do_full, step_empty, ds_full, ds_empty = bars[0], bars[1], bars[2], bars[8], bars[9]
    scores_layout: gl.constexpr = scores.type.layout
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, scores_layout)
    dtype: gl.constexpr = q_tiles.dtype
    nothing = gl.zeros([HALF, ROWS], gl.float32, scores_layout)
    stage, phase = ring(step, STAGES)
    x = base_2_scores(scores, stats_tiles, columns, stage, scale, low, high, MASKED, HAS_LEFT)
    # the statistics are out of the registers by now
    mbarrier.wait(do_full.index(stage), phase)
    # [HALF, WIDTH] x [WIDTH, ROWS]
    pending = warpgroup_mma(v_tiles.index(ME), do_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    weights = gl.exp2(x)
    p = gl.convert_layout(weights.to(dtype), weights_layout)
    # [HALF, ROWS] x [ROWS, WIDTH]
    dv_pending = warpgroup_mma(p, do_tiles.index(stage), dv, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=(pending,))
    dscores = (weights * (dweights - row_statistics(stats_tiles, stage, 1, ROWS, column)[None, :])).to(dtype)
    ds_slot, ds_phase = ring(step, 2)
    mbarrier.wait(ds_empty.index(ds_slot), ds_phase ^ 1)
    ds_tiles.index(ds_slot * 2 + ME).store(dscores)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(ds_slot), count=1)
    ds = gl.convert_layout(dscores, weights_layout)
    dk_pending = warpgroup_mma(ds, q_tiles.index(stage), dk, is_async=True)
    if LAST:
        dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv_pending, dk_pending, p, ds))
    else:
        next_stage, next_phase = ring(step + 1, STAGES)
        mbarrier.wait(q_full.index(next_stage), next_phase)
        pending = warpgroup_mma(k_tiles.index(ME), q_tiles.index(next_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        dv, dk, p, ds = warpgroup_mma_wait(1, deps=(dv_pending, dk_pending, p, ds))
    mbarrier.arrive(step_empty.index(stage), count=1)
    if not LAST:
        scores = warpgroup_mma_wait(0, deps=(pending,))
    return scores, dk, dv


@gluon.jit
def _pass_unseen(ds_tiles, bars, step, STAGES: gl.constexpr, ME: gl.constexpr):
    """A step none of whose queries sees this consumer's keys: its dS is zero, the other's may not be."""
    q_full, do_full, step_empty, ds_full, ds_empty = bars[0], bars[1], bars[2], bars[8], bars[9]
    stage, phase = ring(step, STAGES)
    ds_slot, ds_phase = ring(step, 2)
    mbarrier.wait(q_full.index(stage), phase)
    mbarrier.wait(do_full.index(stage), phase)
    mbarrier.wait(ds_empty.index(ds_slot), ds_phase ^ 1)
    empty = gl.zeros([HALF, ROWS], ds_tiles.dtype, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    ds_tiles.index(ds_slot * 2 + ME).store(empty)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(ds_slot), count=1)
    mbarrier.arrive(step_empty.index(stage), count=1)


@gluon.jit
def store_keys(desc, pointer, stride_row, stride_head, tile, x, batch, kv_head, first_k, key, len_k, DIM: gl.constexpr,
               PACKED: gl.constexpr):
    """The rows `key` on of a sequence, of those that it has."""
    if PACKED:
        if key + HALF > len_k:
            rows = key + gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))
            columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
            at = pointer + ((first_k + rows).to(gl.int64) * stride_row + kv_head * stride_head)[:, None] + columns[None, :]
            gl.store(at, x, mask=(rows < len_k)[:, None] & (columns < DIM)[None, :])
        else:
            store_tile(desc, tile, x, 0, kv_head, first_k + key)
    else:
        store_tile(desc, tile, x, batch, kv_head, key)


@gluon.jit
def store_tile(desc, tile, x, batch, kv_head, row, column=0):
    """Through a shared tile that is as wide as x, or half as wide."""
    WIDTH: gl.constexpr = tile.shape[1]
    if x.shape[1] > WIDTH:
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, WIDTH]), (0, 2, 1)))
        store_tile(desc, tile, left, batch, kv_head, row, column)
        store_tile(desc, tile, right, batch, kv_head, row, column + WIDTH)
    else:
        tma.store_wait(0)
        tile.store(x)
        fence_async_shared()
        async_store(desc, [batch, kv_head, row, column], box(tile, desc))


@gluon.jit
def _consume(outs, tiles, ds_tiles, out_tiles, columns, work, bars, scale, dk_scale, group, window_left, window_right,
             HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, ME: gl.constexpr,
             PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """dK and dV of 64 keys of each tile."""
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv = outs
    q_tiles, k_tiles = tiles[0], tiles[3]
    q_full, k_full, v_full, work_full = bars[0], bars[3], bars[4], bars[6]
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    taken = 0
    step = 0
    slot, more = await_work(work, work_full, taken)
    while more != 0:
        key = word(work, slot, 3)
        begin, full_begin, full_end, end = word(work, slot, 4), word(work, slot, 5), word(work, slot, 6), word(work, slot, 7)
        len_q, len_k = word(work, slot, 8), word(work, slot, 9)
        shift = len_k - len_q
        low, high = queries_seeing(key + ME * HALF, len_q, len_k, window_left, window_right, HAS_RIGHT, scores_layout)
        dk = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        dv = gl.zeros([HALF, WIDTH], gl.float32, acc_layout)
        mbarrier.wait(k_full, taken & 1)
        mbarrier.wait(v_full, taken & 1)
        if end > begin:
            for _ in range(group):
                first = begin
                if HAS_RIGHT and ME > 0:
                    if (end > begin + 1) & (key + ME * HALF - shift - window_right >= (begin + 1) * ROWS):
                        _pass_unseen(ds_tiles, bars, step, STAGES, ME)
                        first = begin + 1
                        step += 1
                stage, phase = ring(step, STAGES)
                mbarrier.wait(q_full.index(stage), phase)
                # [HALF, WIDTH] x [WIDTH, ROWS]
                pending = warpgroup_mma(k_tiles.index(ME), q_tiles.index(stage).permute((1, 0)),
                                        gl.zeros([HALF, ROWS], gl.float32, scores_layout), use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(pending,))
                before = step - first
                bounds = (first, gl.maximum(gl.minimum(full_begin, end - 1), first), gl.maximum(gl.minimum(full_end, end - 1), first),
                          end - 1, end)
                for part in gl.static_range(4):
                    if part != 2 or HAS_LEFT:
                        for i in range(bounds[part], bounds[part + 1]):
                            scores, dk, dv = group_step(
                                scores, dk, dv, tiles, ds_tiles, columns, bars, before + i, scale, low - i * ROWS, high - i * ROWS, WIDTH,
                                STAGES, ME, part != 1, part == 3, HAS_LEFT)
                step = before + end
        batch, kv_head, key, first_k, len_k, _ = end_tile(work, slot, bars)
        row = key + ME * HALF
        store_keys(dv_desc, dv_ptr, stride_dv, VALUE_DIM, out_tiles.index(ME), dv.to(dtype), batch, kv_head, first_k, row, len_k,
                   VALUE_DIM, PACKED)
        dk = dk * dk_scale
        store_keys(dk_desc, dk_ptr, stride_dk, HEAD_DIM, out_tiles.index(ME), dk.to(dtype), batch, kv_head, first_k, row, len_k,
                   HEAD_DIM, PACKED)
        taken += 1
        slot, more = await_work(work, work_full, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "turns"])
def flash_bwd_hopper_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                            dv_desc, dk_ptr, dv_ptr, dq_ptr, counter, turns, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale, window_left,
                            window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group, head_group, head_tiles,
                            n_tiles,
                            HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr,
                            HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr,
                            REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
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
    work = gl.allocate_shared_memory(gl.int32, [WORK, 16], flat)
    q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty = walk_barriers(STAGES, 3, 3)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=1)
    descs = (q_desc, do_desc, stats_desc, k_desc, v_desc)
    tail_descs = (q_tail_desc, do_tail_desc, k_tail_desc, v_tail_desc)
    outs = (dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv)
    tiles = (q_tiles, do_tiles, stats_tiles, k_tiles, v_tiles)
    bars = (q_full, do_full, step_empty, k_full, v_full, kv_empty, work_full, work_empty, ds_full, ds_empty)
    shape = (counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles)
    # partitions get constants only where the tuple is written out
    gl.warp_specialize([
        (_make_dq, (dq_ptr, turns, k_tiles, ds_tiles, work, bars, group, head_tiles, window_right, WIDTH, HAS_RIGHT, ORDERED)),
        (_consume, (outs, tiles, ds_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, window_left, window_right,
                    HEAD_DIM, VALUE_DIM, WIDTH, STAGES, 0, PACKED, HAS_LEFT, HAS_RIGHT)),
        (_consume, (outs, tiles, ds_tiles, out_tiles, columns, work, bars, scale, softmax_scale, group, window_left, window_right,
                    HEAD_DIM, VALUE_DIM, WIDTH, STAGES, 1, PACKED, HAS_LEFT, HAS_RIGHT)),
        (load, (descs, tail_descs, tiles, bars, work, shape, n_tiles, window_left, window_right, STAGES, PACKED, HAS_LEFT, HAS_RIGHT,
                ORDERED)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
