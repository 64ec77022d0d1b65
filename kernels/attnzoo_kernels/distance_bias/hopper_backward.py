"""Attention with a bias by distance, backward for Hopper: flash's, with the bias added to scores, and sums of dS by distance.

The sums are a product with a matrix of zeros and ones. A consumer's dS of a step, 64 keys by 64 queries, is 8 by 8 blocks of 8 by 8. A
second copy of it in shared memory has a row for each block. In a block there are 15 distances, and a column of the matrix picks one of
them. The sums stay in registers as long as steps have one and the same entry of the table, and else go to memory.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import pair_start
from attnzoo_kernels._gluon.backward_step import masked_scores, row_statistics
from attnzoo_kernels._gluon.backward_tiles import HALF, word
from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, product_layout, tma, warpgroup_mma
from attnzoo_kernels.distance_bias.hopper import entry, head_table, several
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.flash.options import Options

ROWS = 64  # queries of a step
BLOCK = gl.constexpr(8)  # keys and queries of a block of dS
PICKS = gl.constexpr(16)  # columns of the matrix of zeros and ones; the last one is zero
# in a quarter, 4 lanes have a block of queries
OF_BEFORE = gl.constexpr("shfl.sync.up.b32 $0, $1, 4, 0, 0xffffffff;")
OF_BEHIND = gl.constexpr("shfl.sync.down.b32 $0, $1, 4, 31, 0xffffffff;")


class Own(NamedTuple):
    table: Any  # of DistanceBias, in base 2
    sums: Any  # of dS by distance, laid out as the table, to which they are added; () if they are not wanted
    picks: Any  # the matrix of zeros and ones, transposed, in shared memory; () without sums
    count: Any  # entries of the table
    origin: Any


class Head(NamedTuple):
    scale: Any
    own: Any
    entries: Any  # the head's entry 0
    sums: Any  # where the head's sums go
    first: Any  # the entry of the first query and of a consumer's first key; it may lie outside of the table
    dq_tile: Any


class Early(NamedTuple):
    first: Any  # the entry of a step's first query; it may lie outside of the table
    biased: Any  # the step's scores take several entries
    common: Any  # the entry if they take one


@gluon.jit
def _picks(dtype: gl.constexpr):
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
def _own(tensors, numbers, problem, dtype: gl.constexpr, c):
    """OWN."""
    sums = ()  # Triton 3.6 returns no struct with None in it
    picks = ()
    if tensors[1] is not None:
        sums = tensors[1]
        picks = _picks(dtype)
    return Own(tensors[0], sums, picks, numbers[0], numbers[1])


@gluon.jit
def _blocks(smem, ME: gl.constexpr):
    """Shared memory for a row for each block of a consumer's dS: the place of dK and dV, which are stored behind the steps."""
    return smem.out.index(ME).slice(0, BLOCK * BLOCK, dim=1)


@gluon.jit
def _quarters(x):
    """The parts of x [blocks, PICKS] with even and odd blocks of keys, and, of each, with the first and last half of the columns."""
    x = gl.permute(gl.reshape(x, [BLOCK // 2, 2, BLOCK, 2, PICKS // 2]), (0, 2, 4, 1, 3))
    left, right = gl.split(x)
    return gl.split(left) + gl.split(right)


@gluon.jit
def _of_other(x, INSTRUCTION: gl.constexpr):
    """What the lanes of another block of queries hold: OF_BEFORE or OF_BEHIND."""
    return gl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _add_diagonals(sums, head, first):
    """Adds sums [blocks, PICKS] to those in memory, in any order. first: the entry of the step's first query.

    The entries of the last half of the columns are those of the first half in the next block of queries, and so are those of the even
    blocks of keys beside the odd ones. They are added up before they go to memory.
    """
    row = gl.arange(0, BLOCK * BLOCK, gl.SliceLayout(1, sums.type.layout))
    column = gl.arange(0, PICKS, gl.SliceLayout(0, sums.type.layout))
    at = (first + (row % BLOCK - row // BLOCK) * BLOCK)[:, None] + (column - (BLOCK - 1))[None, :]
    at, _, _, _ = _quarters(at)
    block, _, _, _ = _quarters((row % BLOCK)[:, None] + (column * 0)[None, :])
    own, before, behind, same = _quarters(sums)
    own += same
    own += gl.where(block > 0, _of_other(behind, OF_BEFORE), 0.0) + gl.where(block < BLOCK - 1, _of_other(before, OF_BEHIND), 0.0)
    gl.atomic_add(head.sums + at, own, sem="relaxed")
    last = block == BLOCK - 1
    gl.atomic_add(head.sums + at + gl.where(last, BLOCK, -BLOCK), gl.where(last, behind, before), mask=last | (block == 0), sem="relaxed")


@gluon.jit
def _add_total(sums, head, first):
    """Adds sums that all have the entry of the step's first query."""
    lane = gl.arange(0, BLOCK * BLOCK, gl.SliceLayout(1, sums.type.layout))
    total = gl.sum(gl.sum(sums, 1), 0)
    gl.atomic_add(head.sums + entry(first, head.own.count) + lane, total + lane.to(gl.float32), mask=lane == 0, sem="relaxed")


@gluon.jit
def _no_sums():
    return gl.zeros([BLOCK * BLOCK, PICKS], gl.float32, product_layout(PICKS))


@gluon.jit
def _keep(dscores, smem, c, ME: gl.constexpr):
    """KEEP: a step's dS by blocks."""
    by_block = gl.permute(gl.reshape(dscores, [HALF // BLOCK, BLOCK, c.ROWS // BLOCK, BLOCK]), (0, 2, 1, 3))
    _blocks(smem, ME).store(gl.reshape(by_block, [BLOCK * BLOCK, BLOCK * BLOCK]))


@gluon.jit
def _start_sums(sums, ds, head, smem, c, ME: gl.constexpr):
    """START_SUMS: of the blocks of a step's dS."""
    # [blocks, BLOCK * BLOCK] x [BLOCK * BLOCK, PICKS]
    return (warpgroup_mma(_blocks(smem, ME), head.own.picks.permute((1, 0)), sums, is_async=True),)


@gluon.jit
def _end_sums(products, early, head, dq_tile, c):
    """END_SUMS: the sums go to memory if the entries of this step and the next one are not all the same."""
    sums = products[0]
    first = early.first
    if several(first, HALF, head.own.count):
        _add_diagonals(sums, head, first)
        sums = _no_sums()
    elif entry(first, head.own.count) != entry(first + (2 * c.ROWS - 1), head.own.count):
        _add_total(sums, head, first)
        sums = _no_sums()
    return sums


@gluon.jit
def _store_sums(sums, head, bounds, c, ME: gl.constexpr):
    """STORE_SUMS: those since the last step that took several entries."""
    _add_total(sums, head, head.first + (bounds[3] - 1) * c.ROWS)


@gluon.jit
def _start(own, smem, slot, c):
    """START for _blocks, which may still be on their way to memory as dK and dV."""
    tma.store_wait(0)
    barrier()
    return pair_start(own, smem, slot, c)


@gluon.jit
def _head(scale, own, smem, slot, member, dq_tile, problem, c, ME: gl.constexpr):
    """HEAD, with the query head's part of the table."""
    number = word(smem.work, slot, "kv_head") * problem.group + member
    first = word(smem.work, slot, "len_k") - word(smem.work, slot, "len_q") + own.origin - word(smem.work, slot, "key") - ME * HALF
    sums = ()
    if c.NO_SUMS is not None:
        sums = head_table(own.sums, number, own.count)
    return Head(scale, own, head_table(own.table, number, own.count), sums, first, dq_tile)


@gluon.jit
def _early(dq_tile, head, c):
    """EARLY."""
    first = head.first + (dq_tile - head.dq_tile) * c.ROWS
    return Early(first, several(first, HALF, head.own.count), gl.load(head.entries + entry(first, head.own.count)))


@gluon.jit
def _weights(scores, early, smem, stage, head, low, high, c, MASKED: gl.constexpr):
    """WEIGHTS, with the bias."""
    x = scores * head.scale
    if early.biased:
        key = gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout)) ^ (HALF - 1)  # from the last one: XOR becomes constant offsets
        query = gl.arange(0, c.ROWS, gl.SliceLayout(0, x.type.layout))
        x += gl.load((head.entries + (early.first - (HALF - 1)) + key)[:, None] + query[None, :])
    apart = gl.where(early.biased, 0.0, early.common)
    x = x - (row_statistics(smem.stats, stage, 0, c.ROWS, gl.SliceLayout(0, x.type.layout)) - apart)[None, :]
    if MASKED:
        x = masked_scores(x, smem.columns, low, high, c)
    return gl.exp2(x)


HOOKS = (("OWN", _own), ("HEAD", _head), ("EARLY", _early), ("WEIGHTS", _weights))
SUMS = (("START", _start), ("KEEP", _keep), ("NO_SUMS", _no_sums), ("START_SUMS", _start_sums), ("END_SUMS", _end_sums),
        ("STORE_SUMS", _store_sums))


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, needs_dbias: bool, deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if needs_dbias and deterministic:
        return "its sums by distance have no order"
    if needs_dbias and max(q.shape[-1], v.shape[-1]) > 64:
        return f"the gradient of bias needs head_dim and value_dim of up to 64, got {q.shape[-1]} and {v.shape[-1]}"
    return flash.backward_reason(q, k, v, options)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options, table: Tensor, sums: Tensor | None,
                    deterministic: bool, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, for calls that backward_reason accepts. sums: float32, laid out as the table, to which dS is added by distance, or None.
    residual: as flash takes it."""
    wide = max(q.shape[-1], v.shape[-1]) > 64
    tile = flash.Tile(ROWS, dq_warp=deterministic or not wide)
    rule = flash.Rule(HOOKS if sums is None else HOOKS + SUMS, (options.distances, options.origin))
    dq, dk, dv, _ = flash.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options, deterministic, tile,
                                          rule=rule, own=(table, sums), residual=residual)
    return dq, dk, dv
