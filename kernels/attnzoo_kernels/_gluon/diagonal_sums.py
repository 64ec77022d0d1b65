"""Sums of a Hopper backward's dS along its diagonals: for each distance from a query to a key.

They are computed as a product with a matrix of zeros and ones. A consumer's dS of a step, 64 keys by 64 queries, is divided into 8 by 8
blocks of 8 keys and 8 queries. A second copy of dS in shared memory has a row of 64 numbers for each block. A block has 15 distances, and
each column of the matrix picks the numbers of one of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import pair_start
from attnzoo_kernels._gluon.backward_tiles import HALF
from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, product_layout, tma, warpgroup_mma

BLOCK = gl.constexpr(8)  # keys and queries of a block of dS
PICKS = gl.constexpr(16)  # columns of the matrix of zeros and ones; the last one is zero
# in the registers of a quarter (see _quarters), 4 neighbouring lanes hold a block of queries
OF_BEFORE = gl.constexpr("shfl.sync.up.b32 $0, $1, 4, 0, 0xffffffff;")
OF_BEHIND = gl.constexpr("shfl.sync.down.b32 $0, $1, 4, 31, 0xffffffff;")


@gluon.jit
def diagonal_picks(dtype: gl.constexpr):
    """[PICKS, 64] in shared memory: ones where key k and query i of a block, column 8 k + i, have distance row - 7."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    distance = gl.arange(0, PICKS, gl.SliceLayout(1, layout)) - (BLOCK - 1)
    at = gl.arange(0, BLOCK * BLOCK, gl.SliceLayout(0, layout))
    picks = gl.allocate_shared_memory(dtype, [PICKS, BLOCK * BLOCK], gl.NVMMASharedLayout.get_default_for([PICKS, BLOCK * BLOCK], dtype))
    picks.store(gl.where((at % BLOCK - at // BLOCK)[None, :] == distance[:, None], 1.0, 0.0).to(dtype))
    fence_async_shared()
    barrier()
    return picks


@gluon.jit
def _blocks(smem, ME: gl.constexpr):
    """Shared memory for a row for each block of a consumer's dS: the place of dK and dV, which are stored behind the steps."""
    return smem.out.index(ME).slice(0, BLOCK * BLOCK, dim=1)


@gluon.jit
def _start(own, smem, slot, config):
    """INIT_GRADS: waits until dK and dV of the tile before have been stored, because their shared memory is that of _blocks."""
    tma.store_wait(0)
    barrier()
    return pair_start(own, smem, slot, config)


@gluon.jit
def _store_ds(dscores, smem, config, ME: gl.constexpr):
    """STORE_DS: stores a step's dS with a row for each block."""
    by_block = gl.permute(gl.reshape(dscores, [HALF // BLOCK, BLOCK, config.ROWS // BLOCK, BLOCK]), (0, 2, 1, 3))
    _blocks(smem, ME).store(gl.reshape(by_block, [BLOCK * BLOCK, BLOCK * BLOCK]))


@gluon.jit
def no_diagonals():
    """INIT_SUMS: zeros [blocks, PICKS]."""
    return gl.zeros([BLOCK * BLOCK, PICKS], gl.float32, product_layout(PICKS))


@gluon.jit
def _start_sums(sums, ds, head_params, smem, config, ME: gl.constexpr):
    """START_SUMS: the product of the blocks of dS and diagonal_picks, which the variant has in head_params.own.picks."""
    # [blocks, BLOCK * BLOCK] x [BLOCK * BLOCK, PICKS]
    return (warpgroup_mma(_blocks(smem, ME), head_params.own.picks.permute((1, 0)), sums, is_async=True),)


# a variant adds END_SUMS and STORE_SUMS
DIAGONALS = (("INIT_GRADS", _start), ("STORE_DS", _store_ds), ("INIT_SUMS", no_diagonals), ("START_SUMS", _start_sums))


@gluon.jit
def _quarters(x):
    """The parts of x [blocks, PICKS] with even and odd blocks of keys, and, of each, with the first and last half of the columns."""
    x = gl.permute(gl.reshape(x, [BLOCK // 2, 2, BLOCK, 2, PICKS // 2]), (0, 2, 4, 1, 3))
    left, right = gl.split(x)
    return gl.split(left) + gl.split(right)


@gluon.jit
def _of_other(x, INSTRUCTION: gl.constexpr):
    """x of the block of queries before (OF_BEFORE) or behind (OF_BEHIND), from the lanes that hold it."""
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def add_diagonals(sums, pointer):
    """Adds the diagonals to memory, in any order. pointer: to the sum for the distance of the step's first query and first key; sums for
    larger distances lie behind it.

    The entries of the last half of the columns are those of the first half in the next block of queries, and so are those of the even
    blocks of keys beside the odd ones. They are added up before they go to memory.
    """
    row = gl.arange(0, BLOCK * BLOCK, gl.SliceLayout(1, sums.type.layout))
    column = gl.arange(0, PICKS, gl.SliceLayout(0, sums.type.layout))
    at = ((row % BLOCK - row // BLOCK) * BLOCK)[:, None] + (column - (BLOCK - 1))[None, :]
    at, _, _, _ = _quarters(at)
    block, _, _, _ = _quarters((row % BLOCK)[:, None] + (column * 0)[None, :])
    own, before, behind, same = _quarters(sums)
    own += same
    own += gl.where(block > 0, _of_other(behind, OF_BEFORE), 0.0) + gl.where(block < BLOCK - 1, _of_other(before, OF_BEHIND), 0.0)
    gl.atomic_add(pointer + at, own, sem="relaxed")
    last = block == BLOCK - 1
    gl.atomic_add(pointer + at + gl.where(last, BLOCK, -BLOCK), gl.where(last, behind, before), mask=last | (block == 0), sem="relaxed")


@gluon.jit
def add_all_diagonals(sums, pointer):
    """Adds the sum of all diagonals to one place in memory."""
    lane = gl.arange(0, BLOCK * BLOCK, gl.SliceLayout(1, sums.type.layout))
    total = gl.sum(gl.sum(sums, 1), 0)
    gl.atomic_add(pointer + lane, total + lane.to(gl.float32), mask=lane == 0, sem="relaxed")
