"""dQ of a Hopper backward: it is made from both consumers' dS and added up in global memory in float32, in any order or in a fixed order of
key tiles.

The float32 dQ lies in tiles of one step's queries. Each 64 rows of a tile lie in register order: the order in which the threads of a warp
group hold them after a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, await_tile, seen_by, word
from attnzoo_kernels._gluon.hopper import (
    async_add,
    async_store,
    barrier,
    box,
    fence_async_shared,
    mbarrier,
    release,
    ring,
    tma,
    warpgroup_mma,
)


@gluon.jit
def dq_product(k_tiles, ds_tiles, slot, ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts the product of 64 rows and some columns of dQ = dS K, over both consumers' keys."""
    dq = gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    for consumer in gl.static_range(2):
        # [64, HALF] x [HALF, COLUMNS]
        dq = warpgroup_mma(ds_tiles.index(slot * 2 + consumer).slice(ROW, 64, dim=1).permute((1, 0)),
                           k_tiles.index(consumer).slice(COLUMN, COLUMNS, dim=1), dq, use_acc=consumer > 0, is_async=True)
    return dq


@gluon.jit
def dq_half(smem, slot, config, ME: gl.constexpr):
    """Starts a consumer's half of dQ: half of the columns if a step makes 64 rows of dQ, half of the rows if it makes 128."""
    if config.DQ_ROWS == 64:
        dq = dq_product(smem.k, smem.ds, slot, 0, ME * (config.WIDTH // 2), config.WIDTH // 2)
    else:
        dq = dq_product(smem.k, smem.ds, slot, ME * 64, 0, config.WIDTH)
    return dq


@gluon.jit
def dq_before(smem, bars, step, some, config, ME: gl.constexpr):
    """dq_half of the step before `step`, once the other consumer's dS is there. The result means nothing unless `some`."""
    slot, phase = ring(step + 1, 2)
    mbarrier.wait(bars.ds_full[1 - ME].index(slot), phase ^ 1, pred=some)
    return dq_half(smem, slot, config, ME)


@gluon.constexpr_function
def as_registers(columns):
    """The shared layout by which a product [64, columns] is stored in register order, into a tile [2 * columns, 32] that TMA reads with a
    swizzle of 128 bytes."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 2], [4, 4], [17, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout(bases[: 11 if columns == 32 else 12], [], 1024)


@gluon.jit
def hand_on_dq(dq, dq_desc, smem, dq_tile, bars, step, config, ME: gl.constexpr):
    """Hands a consumer's half of dQ on to global memory, through shared memory. Under DQ_LAGS it is dQ of the step before `step`, and the
    other consumer's dS of that step is released."""
    if config.DQ_WARP and config.DQ_LAGS:
        mbarrier.wait(bars.dq_empty.index(ME), step & 1)
    elif config.DQ_WARP:
        mbarrier.wait(bars.dq_empty.index(ME), (step & 1) ^ 1)
    else:
        tma.store_wait(0)
    COLUMNS: gl.constexpr = dq.shape[1]
    smem.dq.index(ME)._reinterpret(gl.float32, [64, COLUMNS], as_registers(COLUMNS)).store(dq)
    fence_async_shared()
    if config.DQ_WARP or config.DQ_LAGS:
        barrier()
    if config.DQ_LAGS:
        release(bars.ds_empty[1 - ME].index((step + 1) % 2))
    if config.DQ_WARP:
        release(bars.dq_full.index(ME))
    else:
        add_half(dq_desc, smem.dq, dq_tile, ME, 128 * COLUMNS)


@gluon.jit
def add_half(dq_desc, dq_tiles, dq_tile, ME: gl.constexpr, SIZE: gl.constexpr):
    """Adds one consumer's half of a tile of dQ to global memory. SIZE: how many numbers a tile has."""
    async_add(dq_desc, [0, 0, dq_tile * (SIZE // 32) + ME * (SIZE // 64), 0], box(dq_tiles.index(ME), dq_desc))


@gluon.jit
def _write_half(dq_desc, dq_tiles, dq_tile, ME: gl.constexpr, SIZE: gl.constexpr):
    """Like add_half, but overwrites what is in memory."""
    async_store(dq_desc, [0, 0, dq_tile * (SIZE // 32) + ME * (SIZE // 64), 0], box(dq_tiles.index(ME), dq_desc))


@gluon.jit
def turn_of(query_tile, key, len_q, len_k, window_right, config):
    """The value that a query tile's semaphore must have when a key tile adds its part. The key tiles that the query tile sees take turns,
    from the last one down."""
    last = (len_k - 1) // KEYS
    if config.HAS_RIGHT:
        last = gl.minimum(last, ((query_tile + 1) * config.ROWS - 1 + len_k - len_q + window_right) // KEYS)
    return last - key // KEYS


@gluon.jit
def await_turn(semaphore, now, query_tile, key, len_q, len_k, window_right, config):
    """Waits until it is this key tile's turn. now: an earlier read of the semaphore."""
    mine = turn_of(query_tile, key, len_q, len_k, window_right, config)
    while now != mine:
        now = gl.load(semaphore, volatile=True)


@gluon.jit
def _pass_turn(semaphore):
    """Passes the turn on to the next key tile, once all that this warp added by TMA has arrived in global memory. Waits for the bulk group
    (the read of shared memory alone is not enough), then releases the semaphore at GPU scope."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, one) + semaphore.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise("{ .reg .pred one; cp.async.bulk.wait_group 0; bar.warp.sync -1; setp.eq.s32 one, $1, 0; "
                              "@one red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, 0; }",
                              "=r,r,l", [gl.arange(0, 32, one), address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_buffer(tile_params, j, config):
    """DQ_BUFFER: the offset, in tiles, from a tile's place in the first buffer of dQ to its place in the buffer of the j-th query tile."""
    return 0


@gluon.jit
def add_tile(dq_desc, dq_semaphore, smem, bars, tile, j, step, seen, tile_params, window_right, config):
    """Adds both halves of the j-th query tile's dQ to tile number `tile` in global memory, by TMA.

    ORDERED: key tiles add one after the other, as dq_semaphore says. The first one overwrites what is there, unless DQ_CLEARED.
    """
    SIZE: gl.constexpr = config.DQ_ROWS * config.WIDTH
    now = 0
    mine = 1
    if config.ORDERED:
        now = gl.load(dq_semaphore + tile, volatile=True)
        if not config.DQ_CLEARED:
            mine = turn_of(j, seen.key, seen.len_q, seen.len_k, window_right, config)
    dq_tile = tile + config.DQ_BUFFER(tile_params, j, config)
    for half in gl.static_range(2):
        mbarrier.wait(bars.dq_full.index(half), step & 1)
        if config.ORDERED and half == 0:
            await_turn(dq_semaphore + tile, now, j, seen.key, seen.len_q, seen.len_k, window_right, config)
        if mine == 0:
            _write_half(dq_desc, smem.dq, dq_tile, half, SIZE)
        else:
            add_half(dq_desc, smem.dq, dq_tile, half, SIZE)
    # release the halves once TMA has read them
    for half in gl.static_range(2):
        tma.store_wait(1 - half)
        mbarrier.arrive(bars.dq_empty.index(half), count=1)
    if config.ORDERED:
        _pass_turn(dq_semaphore + tile)


@gluon.jit
def add_heads(dq_desc, dq_semaphore, smem, bars, first, step, seen, tile_params, problem, config):
    """DQ_STEPS: adds dQ of those query tiles of all heads that see the keys. first: the first tile of dQ of the group's first head. Returns
    the next step."""
    tile = first + seen.begin
    for _ in range(problem.group):
        for j in range(seen.tiles):
            add_tile(dq_desc, dq_semaphore, smem, bars, tile, seen.begin + j, step, seen, tile_params, problem.window_right, config)
            tile += 1
            step += 1
        tile += problem.head_tiles - seen.tiles
    return step


@gluon.jit
def add_dq(dq_desc, dq_semaphore, smem, bars, problem, own, config):
    """The warp that adds dQ to memory, by DQ_STEPS. The consumers may be up to one step ahead of it."""
    taken = 0
    step = 0
    slot, more = await_tile(smem.work, bars.work_full, taken)
    while more != 0:
        seen = seen_by(smem.work, slot)
        first = word(smem.work, slot, "dq_tile")
        mbarrier.arrive(bars.work_empty.index(slot), count=1)
        tile_params = own
        if config.TILE_PARAMS is not None:
            tile_params = config.TILE_PARAMS(own, seen.key, seen.len_q, seen.len_k, config)
        step = config.DQ_STEPS(dq_desc, dq_semaphore, smem, bars, first, step, seen, tile_params, problem, config)
        taken += 1
        slot, more = await_tile(smem.work, bars.work_full, taken)
    tma.store_wait(0)


@gluon.jit
def _places(pointer, x):
    """Addresses of x [64, N], a product, in register order: each thread has four floats in a row, and threads lie 16 bytes apart."""
    product: gl.constexpr = x.type.layout
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, product))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, product))
    place = ((c // 8) * 128 + (c % 8) // 2)[None, :] + ((r // 16) * 32 + (r % 8) * 4)[:, None]
    return pointer.to(gl.int64, bitcast=True) + (place * 16).to(gl.int64)


@gluon.jit
def add_to(pointer, x):
    """Adds x [64, N], in a product's layout, to memory in register order."""
    gl.inline_asm_elementwise("{ red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0; }", "=r,f,f,f,f,l,l,l,l",
                              [x, _places(pointer, x)], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def write_to(pointer, x):
    """Like add_to, but overwrites what is in memory."""
    gl.inline_asm_elementwise("{ st.relaxed.gpu.global.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0; }", "=r,f,f,f,f,l,l,l,l",
                              [x, _places(pointer, x)], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def announce(flag):
    """Adds one to a flag in global memory. Whoever sees that also sees all that the warp group has written before. For a group of four
    warps."""
    barrier()
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    address = gl.full([128], 0, gl.int64, lanes) + flag.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise("{ .reg .pred one; setp.eq.s32 one, $1, 0; @one red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, 0; }",
                              "=r,r,l", [gl.arange(0, 128, lanes), address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_flag(flag, wanted):
    """Waits, if it is `wanted`, until a flag is not zero. What was written before `announce` can be read then. For a group of four
    warps."""
    now = gl.where(wanted, 0, 1)
    while now == 0:
        now = gl.load(flag, volatile=True)
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_so_far(pointer, tile, ME: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """A consumer's [HALF, WIDTH] of a tile, as an earlier launch stored it by write_to; zeros if the pointer is null."""
    x = gl.zeros([HALF, WIDTH], gl.float32, layout)
    some = gl.full([HALF, WIDTH], 0, gl.int32, layout) + (pointer.to(gl.int64, bitcast=True) != 0).to(gl.int32)
    place = _places(pointer + (tile * 2 + ME).to(gl.int64) * (HALF * WIDTH), x)
    return gl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.s32 some, $8, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@some ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=f,=f,=f,=f,l,l,l,l,r,r,r,r", [place, some], dtype=gl.float32, is_pure=False, pack=4)
