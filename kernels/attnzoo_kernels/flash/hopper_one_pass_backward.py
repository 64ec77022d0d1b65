"""FlashAttention's backward on Hopper for head dims of 129 to 192, in one pass.

A program takes tiles of 128 keys. Each of two consumers holds dK (two parts, of 128 and 64 columns) and dV of 64 keys, which take 160 of a
thread's 240 registers. Scores, their gradients and dQ follow each other in the rest: the weights are rounded before dO Vᵀ is computed. Each
consumer makes 96 columns of dQ from both consumers' dS.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, pair_mainloop, store_keys
from attnzoo_kernels._gluon.backward_dq import _as_registers, add_to, dq_product
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair
from attnzoo_kernels._gluon.backward_load import Operands, Source
from attnzoo_kernels._gluon.backward_plan import Tile, copy_tails, frame, tails
from attnzoo_kernels._gluon.backward_step import (
    Barriers,
    Shared,
    base_2_scores,
    column_numbers,
    row_statistics,
    scores_in_flight,
    step_barriers,
    tile_words,
)
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, Problem
from attnzoo_kernels._gluon.hopper import (
    async_add,
    await_full,
    barrier,
    barriers,
    box,
    descriptor,
    fence_async_shared,
    mbarrier,
    product_layout,
    release,
    shared_tiles,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
    why_not_tma,
)
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Call, Layout, layout, strides
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.flash.options import Options

FIRST = 128  # columns of the first part of queries and keys
WIDTHS = FIRST, 64  # of the parts
TILE = Tile()
FORM = 16  # bits, see below


RED = gl.constexpr(1)  # bits of FORM: dQ goes from registers to memory, not through shared memory
LATE = gl.constexpr(2)  # the first part of dK is made in the next step
FROM_SHARED = gl.constexpr(4)  # dK reads dS from shared memory
EARLY_DV = gl.constexpr(8)  # dV is awaited before dQ begins
DK_FIRST = gl.constexpr(16)  # the first part of dK comes before dQ, the second one behind it


class DqTiles(NamedTuple):
    """Each consumer's 96 columns of dQ on their way to memory: 64 of them and 32."""

    wide: Any
    narrow: Any


class Own(NamedTuple):
    dk_rest_desc: Any  # of the second part of dK
    dk_rest_ptr: Any
    dq_ptr: Any  # float32 sums of both parts of dQ
    dq_rest_ptr: Any


@gluon.jit
def _tiles(source, c):
    dtype: gl.constexpr = source.tensors.do.dtype
    ROWS: gl.constexpr = c.ROWS
    if c.OPTIONS & RED:
        dq = ()
        out = shared_tiles(dtype, 2, HALF, 128)
        ds = shared_tiles(dtype, 4, HALF, ROWS)
    else:
        OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, 128], dtype)
        dq = DqTiles(shared_tiles(gl.float32, 2, 128, 32), shared_tiles(gl.float32, 2, 64, 32))
        out = dq.wide._reinterpret(dtype, [2, HALF, 128], OUT)
        ds = shared_tiles(dtype, 2, HALF, ROWS)
    return Shared(
        q=(shared_tiles(dtype, c.STAGES, ROWS, 128), shared_tiles(dtype, c.STAGES, ROWS, 64)),
        do=shared_tiles(dtype, c.STAGES, ROWS, 128), k=(shared_tiles(dtype, 2, HALF, 128), shared_tiles(dtype, 2, HALF, 64)),
        v=shared_tiles(dtype, 2, HALF, 128), out=out, ds=ds, dq=dq,
        stats=shared_tiles(gl.float32, c.STAGES, 1, 2 * ROWS), columns=column_numbers(ROWS), work=tile_words())


@gluon.jit
def _barriers(c):
    of_steps = step_barriers(c.STAGES, 2, 2)
    ds_empty = ()
    if not c.OPTIONS & RED:
        ds_empty = (barriers(1, 1), barriers(1, 1))
    return Barriers(*of_steps, (barriers(2, 1), barriers(2, 1)), (), (), ds_empty)


@gluon.jit
def _start(own, smem, slot, c):
    """START: (both parts of dK, dV, the sums of dQ in memory, the tile's first step)."""
    return (gl.zeros([HALF, 128], gl.float32, product_layout(128)), gl.zeros([HALF, 64], gl.float32, product_layout(64)),
            gl.zeros([HALF, 128], gl.float32, product_layout(128)))


@gluon.jit
def _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, c, ME: gl.constexpr):
    """Adds a consumer's columns of dQ to memory."""
    if c.OPTIONS & RED:
        own = dq_desc
        if ME == 0:
            add_to(own.dq_ptr + dq_tile.to(gl.int64) * (64 * 128), wide)
        else:
            add_to(own.dq_rest_ptr + dq_tile.to(gl.int64) * (64 * 64), wide)
        add_to(own.dq_ptr + dq_tile.to(gl.int64) * (64 * 128) + 64 * (64 + ME * 32), narrow)
    else:
        tma.store_wait(0)
        smem.dq.wide.index(ME)._reinterpret(gl.float32, [64, 64], _as_registers(64)).store(wide)
        smem.dq.narrow.index(ME)._reinterpret(gl.float32, [64, 32], _as_registers(32)).store(narrow)
        fence_async_shared()
        barrier()
        release(bars.ds_empty[1 - ME].index(0))
        wide_desc, rest_desc, narrow_desc = dq_desc
        if ME == 0:
            async_add(wide_desc, [0, 0, dq_tile * 256, 0], box(smem.dq.wide.index(ME), wide_desc))
        else:
            async_add(rest_desc, [0, 0, dq_tile * 128, 0], box(smem.dq.wide.index(ME), rest_desc))
        async_add(narrow_desc, [0, 0, dq_tile * 256 + 128 + ME * 64, 0], box(smem.dq.narrow.index(ME), narrow_desc))


@gluon.jit
def _ds_slot(step, c):
    """(slot of a step's dS, phase)."""
    slot = 0
    phase = step & 1
    if c.OPTIONS & RED:
        slot = step & 1
        phase = (step >> 1) & 1
    return slot, phase


@gluon.jit
def _packed(x, dtype: gl.constexpr):
    """x [M, N] rounded, two numbers in each register (fault 5)."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _unpacked(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers of _packed in float32."""
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        asm: gl.constexpr = "{ .reg .b16 even, odd; mov.b32 {even, odd}, $2; cvt.f32.f16 $0, even; cvt.f32.f16 $1, odd; }"
    even, odd = gl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [x.shape[0], x.shape[1] * 2]), layout)


@gluon.jit
def _rounded(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers of _packed in 16 bits."""
    asm: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(asm, "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    else:
        even, odd = gl.inline_asm_elementwise(asm, "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [x.shape[0], x.shape[1] * 2]), layout)


@gluon.jit
def _weights(stage, scores, smem, scale, low, high, c, MASKED: gl.constexpr):
    """The weights of a step, rounded and packed."""
    dtype: gl.constexpr = smem.do.dtype
    return _packed(gl.exp2(base_2_scores(scores, smem, stage, scale, low, high, c, MASKED)), dtype)


@gluon.jit
def _scores_gradient(p, dweights, smem, stage, c):
    delta = row_statistics(smem.stats, stage, 1, c.ROWS, gl.SliceLayout(0, product_layout(c.ROWS)))
    of_scores: gl.constexpr = dweights.type.layout
    dtype: gl.constexpr = smem.do.dtype
    return _packed(_unpacked(p, dtype, of_scores) * (dweights - delta[None, :]), dtype)


@gluon.jit
def _dv_and_gradients(p, dv, smem, stage, c, ME: gl.constexpr):
    """Starts dO Vᵀ and then the product for dV."""
    # [HALF, 128] x [128, ROWS]
    dweights_pending = warpgroup_mma(smem.v.index(ME), smem.do.index(stage).permute((1, 0)),
                                     gl.zeros([HALF, c.ROWS], gl.float32, product_layout(c.ROWS)), use_acc=False, is_async=True)
    of_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    dtype: gl.constexpr = smem.do.dtype
    operand = _rounded(p, dtype, of_operand)
    # [HALF, ROWS] x [ROWS, 128]
    return dweights_pending, warpgroup_mma(operand, smem.do.index(stage), dv, is_async=True), operand


@gluon.jit
def _await_room(bars, step, c, ME: gl.constexpr):
    """Waits until the other consumer has read this one's dS of the step before."""
    if not c.OPTIONS & RED:
        mbarrier.wait(bars.ds_empty[ME].index(0), (step & 1) ^ 1)


@gluon.jit
def _dq_columns(smem, slot, ME: gl.constexpr):
    """Starts the products for 64 and 32 columns of dQ."""
    wide = dq_product(smem.k[ME], smem.ds, slot, 0, 0, 64)
    return wide, dq_product(smem.k[0], smem.ds, slot, 0, 64 + ME * 32, 32)


@gluon.jit
def _step(dk, dk_rest, dv, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP: all five products in turn; dQ travels to memory while the tensor cores compute dK."""
    if c.OPTIONS & RED:
        scale, dq_desc = scale
    slot, phase = _ds_slot(step, c)
    stage, pending = scores_in_flight(smem.q, smem, bars, step, c, ME)
    await_full(bars.do_full, step, c.STAGES)
    _await_room(bars, step, c, ME)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    p = _weights(stage, scores, smem, scale, low, high, c, MASKED)
    dweights_pending, dv_pending, operand = _dv_and_gradients(p, dv, smem, stage, c, ME)
    dweights = warpgroup_mma_wait(1, deps=(dweights_pending,))
    dscores = _scores_gradient(p, dweights, smem, stage, c)
    dtype: gl.constexpr = smem.do.dtype
    of_scores: gl.constexpr = dweights.type.layout
    smem.ds.index(slot * 2 + ME).store(_rounded(dscores, dtype, of_scores))
    fence_async_shared()
    barrier()
    release(bars.ds_full[ME].index(slot))
    if c.OPTIONS & FROM_SHARED:
        ds = smem.ds.index(slot * 2 + ME)
    else:
        of_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
        ds = _rounded(dscores, dtype, of_operand)
    mbarrier.wait(bars.ds_full[1 - ME].index(slot), phase)
    if c.OPTIONS & EARLY_DV:
        dv = warpgroup_mma_wait(0, deps=(dv_pending,))
    wide_pending, narrow_pending = _dq_columns(smem, slot, ME)
    # [HALF, ROWS] x [ROWS, 128], and 64 columns
    dk_pending = warpgroup_mma(ds, smem.q[0].index(stage), dk, is_async=True)
    dk_rest_pending = warpgroup_mma(ds, smem.q[1].index(stage), dk_rest, is_async=True)
    if c.OPTIONS & EARLY_DV:
        wide, narrow = warpgroup_mma_wait(2, deps=(wide_pending, narrow_pending))
    else:
        dv, wide, narrow, operand = warpgroup_mma_wait(2, deps=(dv_pending, wide_pending, narrow_pending, operand))
    _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, c, ME)
    if c.OPTIONS & FROM_SHARED:
        dk, dk_rest = warpgroup_mma_wait(0, deps=(dk_pending, dk_rest_pending))
    else:
        dk, dk_rest, ds = warpgroup_mma_wait(0, deps=(dk_pending, dk_rest_pending, ds))
    release(bars.step_empty.index(stage))
    return dk, dk_rest, dv


@gluon.jit
def _dk_first_step(dk, dk_rest, dv, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP: the first part of dK comes before dQ, the second one behind it."""
    if c.OPTIONS & RED:
        scale, dq_desc = scale
    slot, phase = _ds_slot(step, c)
    stage, pending = scores_in_flight(smem.q, smem, bars, step, c, ME)
    await_full(bars.do_full, step, c.STAGES)
    _await_room(bars, step, c, ME)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    p = _weights(stage, scores, smem, scale, low, high, c, MASKED)
    dweights_pending, dv_pending, operand = _dv_and_gradients(p, dv, smem, stage, c, ME)
    dweights = warpgroup_mma_wait(1, deps=(dweights_pending,))
    dscores = _scores_gradient(p, dweights, smem, stage, c)
    dtype: gl.constexpr = smem.do.dtype
    of_scores: gl.constexpr = dweights.type.layout
    of_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    ds = _rounded(dscores, dtype, of_operand)
    # [HALF, ROWS] x [ROWS, 128]
    dk_pending = warpgroup_mma(ds, smem.q[0].index(stage), dk, is_async=True)
    smem.ds.index(slot * 2 + ME).store(_rounded(dscores, dtype, of_scores))
    fence_async_shared()
    barrier()
    release(bars.ds_full[ME].index(slot))
    mbarrier.wait(bars.ds_full[1 - ME].index(slot), phase)
    dv, dk, operand, ds = warpgroup_mma_wait(0, deps=(dv_pending, dk_pending, operand, ds))
    wide_pending, narrow_pending = _dq_columns(smem, slot, ME)
    # [HALF, ROWS] x [ROWS, 64]
    dk_rest_pending = warpgroup_mma(smem.ds.index(slot * 2 + ME), smem.q[1].index(stage), dk_rest, is_async=True)
    wide, narrow = warpgroup_mma_wait(1, deps=(wide_pending, narrow_pending))
    _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, c, ME)
    dk_rest = warpgroup_mma_wait(0, deps=(dk_rest_pending,))
    release(bars.step_empty.index(stage))
    return dk, dk_rest, dv


@gluon.jit
def _late_step(dk, dk_rest, dv, at, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP whose first part of dK is that of the step before; it is computed while exponentials are."""
    if c.OPTIONS & RED:
        scale, dq_desc = scale
    slot, phase = _ds_slot(step, c)
    before, _ = _ds_slot(step + 1, c)
    stage, pending = scores_in_flight(smem.q, smem, bars, step, c, ME)
    # in a tile's first step a product that means nothing, which the second one overwrites
    dk_pending = warpgroup_mma(smem.ds.index(before * 2 + ME), smem.q[0].index((step + 1) & 1), dk, use_acc=step > at + 1, is_async=True)
    await_full(bars.do_full, step, c.STAGES)
    _await_room(bars, step, c, ME)
    scores = warpgroup_mma_wait(1, deps=(pending,))
    p = _weights(stage, scores, smem, scale, low, high, c, MASKED)
    dweights_pending, dv_pending, operand = _dv_and_gradients(p, dv, smem, stage, c, ME)
    dk, dweights = warpgroup_mma_wait(1, deps=(dk_pending, dweights_pending))
    mbarrier.expect(bars.step_empty.index((step + 1) & 1), 0, pred=some)
    dscores = _scores_gradient(p, dweights, smem, stage, c)
    dtype: gl.constexpr = smem.do.dtype
    of_scores: gl.constexpr = dweights.type.layout
    smem.ds.index(slot * 2 + ME).store(_rounded(dscores, dtype, of_scores))
    fence_async_shared()
    barrier()
    release(bars.ds_full[ME].index(slot))
    if c.OPTIONS & FROM_SHARED:
        ds = smem.ds.index(slot * 2 + ME)
    else:
        of_operand: gl.constexpr = gl.DotOperandLayout(0, dk_rest.type.layout, 2)
        ds = _rounded(dscores, dtype, of_operand)
    mbarrier.wait(bars.ds_full[1 - ME].index(slot), phase)
    if c.OPTIONS & EARLY_DV:
        dv = warpgroup_mma_wait(0, deps=(dv_pending,))
    wide_pending, narrow_pending = _dq_columns(smem, slot, ME)
    # [HALF, ROWS] x [ROWS, 64]
    dk_rest_pending = warpgroup_mma(ds, smem.q[1].index(stage), dk_rest, is_async=True)
    if c.OPTIONS & EARLY_DV:
        wide, narrow = warpgroup_mma_wait(1, deps=(wide_pending, narrow_pending))
    else:
        dv, wide, narrow, operand = warpgroup_mma_wait(1, deps=(dv_pending, wide_pending, narrow_pending, operand))
    _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, c, ME)
    if c.OPTIONS & FROM_SHARED:
        dk_rest = warpgroup_mma_wait(0, deps=(dk_rest_pending,))
    else:
        dk_rest, ds = warpgroup_mma_wait(0, deps=(dk_rest_pending, ds))
    return dk, dk_rest, dv, at


@gluon.jit
def _mainloop(state, at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, scale, c, ME: gl.constexpr):
    """MAINLOOP: the first part of dK of the last step comes behind all steps."""
    with_own = scale
    if c.OPTIONS & RED:
        with_own = (scale, own)
    if c.OPTIONS & LATE:
        state, end = pair_mainloop(state + (at,), at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, with_own, c, ME)
        dk, dk_rest, dv, at = state
        last, _ = _ds_slot(end + 1, c)
        stage = (end + 1) & 1
        dk = warpgroup_mma(smem.ds.index(last * 2 + ME), smem.q[0].index(stage), dk, use_acc=end > at + 1, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.expect(bars.step_empty.index(stage), 0, pred=end > at)
        dk = gl.where(end > at, dk, 0.0)
        result = (dk, dk_rest, dv)
    else:
        result, end = pair_mainloop(state, at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, with_own, c, ME)
    return result, end


@gluon.jit
def _store(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, c, ME: gl.constexpr):
    """STORE."""
    dk, dk_rest, dv = state
    dtype: gl.constexpr = buffer.dtype
    REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, 64], dtype)
    store_keys(grads.dv_desc, grads.dv_ptr, grads.stride_dv, grads.stride_dv_head, buffer, dv.to(dtype), batch, kv_head, first_k, row,
               len_k, c.VALUE_DIM, c.PACKED)
    store_keys(grads.dk_desc, grads.dk_ptr, grads.stride_dk, grads.stride_dk_head, buffer, (dk * dk_scale).to(dtype), batch, kv_head,
               first_k, row, len_k, 128, c.PACKED)
    store_keys(own.dk_rest_desc, own.dk_rest_ptr, grads.stride_dk, grads.stride_dk_head,
               buffer._reinterpret(dtype, [2, HALF, 64], REST).index(0), (dk_rest * dk_scale).to(dtype), batch, kv_head, first_k, row,
               len_k, c.HEAD_DIM - 128, c.PACKED)


@gluon.jit(do_not_specialize=["window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles", "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def one_pass_bwd_kernel(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, do_desc, stats_desc, q_tail_desc, q_rest_tail_desc, k_tail_desc,
                        k_rest_tail_desc, v_tail_desc, do_tail_desc, dk_desc, dk_rest_desc, dv_desc, dk_ptr, dk_rest_ptr, dv_ptr, dq_desc,
                        dq_rest_desc, dq_narrow_desc, dq_ptr, dq_rest_ptr, counter, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale,
                        window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group, head_group, head_tiles, n_tiles,
                        HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PACKED: gl.constexpr, HAS_RIGHT: gl.constexpr,
                        ROWS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
                        FORM: gl.constexpr):
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles, -1,
                      window_right)
    c = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=128, VALUE_WIDTH=128, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES, PACKED=PACKED,
               HAS_LEFT=False, HAS_RIGHT=HAS_RIGHT, ORDERED=False, DQ_WARP=False, DQ_LAGS=False, LISTED=False, OPTIONS=FORM,
               START=_start, STEP=_late_step if FORM & LATE else _dk_first_step if FORM & DK_FIRST else _step, MAINLOOP=_mainloop,
               STORE=_store)
    source = Source(Operands((q_desc, q_rest_desc), (k_desc, k_rest_desc), v_desc, do_desc),
                    Operands((q_tail_desc, q_rest_tail_desc), (k_tail_desc, k_rest_tail_desc), v_tail_desc, do_tail_desc), stats_desc)
    run_pair(source, Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM), _tiles(source, c),
             _barriers(c), (dq_desc, dq_rest_desc, dq_narrow_desc), None, problem,
             Own(dk_rest_desc, dk_rest_ptr, dq_ptr, dq_rest_ptr), scale, softmax_scale, REGISTERS, LOAD_REGISTERS, c)


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, exact_delta: bool, deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (FIRST < q.shape[-1] <= sum(WIDTHS) and v.shape[-1] <= 128):
        return f"head_dim must be 33 to 192 and value_dim up to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0 or exact_delta:
        return "it has no softcap, alibi_slopes, dropout_p or gradient of sinks"
    if deterministic or options.ranges or options.key_bias or options.window_left >= 0:
        return "above head_dim 128 it has no fixed order, window, key ranges or forget gates"
    return why_not_tma(q, k, v)


class Plan(NamedTuple):
    """The launches for one layout of the arguments."""

    preprocess: Launch
    tails: tuple[Launch, ...] | None  # of q's parts, k's parts, v and dO; none for dense input
    mainloop: Launch
    postprocesses: tuple[Launch, ...]  # of both parts of dQ


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, q: tuple[Layout, Layout], k: tuple[Layout, Layout], v: Layout,
          out: Layout, grad_out: Layout, dq: tuple[Layout, Layout], dk: Layout, dv: Layout, options: Call, form: int) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0][0], k[0][0])
    heads, kv_heads, value_dim = q[0][0][-2], *v[0][-2:]
    dims, packed, group, tile = (q[0][0][-1], q[1][0][-1]), options.packed, heads // kv_heads, TILE
    query_tiles = options.programs(heads, seqlen_q, sequences, tile.rows)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    frames = [frame(options, part, out, grad_out, to, tile.rows, width, value_dim=value_dim, has_grad_lse=has_grad_lse, ordered=False)
              for part, to, width in zip(q, dq, WIDTHS, strict=True)]
    copies = None
    if packed:
        copies = tuple(tails(x, sequences, block, width) for x, block, width in (
            (q[0], tile.rows, FIRST), (q[1], tile.rows, WIDTHS[1]), (k[0], KEYS.value, FIRST), (k[1], KEYS.value, WIDTHS[1]),
            (v, KEYS.value, 128), (grad_out, tile.rows, 128)))
    programs = multiprocessors(device)
    head_group = heads_together(sequences * kv_heads, seqlen_q * 2 * (sum(dims) + 256 + 128) * group, -(-seqlen_k // KEYS.value), programs,
                                False)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    mainloop = Launch(
        one_pass_bwd_kernel, min(key_tiles, programs),
        (options.softmax_scale, options.softmax_scale * math.log2(math.e), options.window_right, sequences, seqlen_q, seqlen_k, kv_heads,
         strides(dk)[1], strides(dv)[1], group, head_group, head_tiles, key_tiles),
        {"HEAD_DIM": sum(dims), "VALUE_DIM": value_dim, "PACKED": packed, "HAS_RIGHT": options.window_right >= 0, "ROWS": tile.rows,
         "STAGES": tile.stages, "REGISTERS": tile.registers, "LOAD_REGISTERS": tile.load_registers, "FORM": form}, 4, 1)
    return Plan(frames[0][0], copies, mainloop, tuple(after for _, after in frames))


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :FIRST], x[..., FIRST:]


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Call,
                    into: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, as hopper_backward.launch_backward gives them; dQ is added up in any order."""
    grad_out = tma_gradient(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = into or (x.new_empty(x.shape) for x in (q, k, v))
    qs, ks, dqs, dks = map(_parts, (q, k, dq, dk))
    plan = _plan(q.device, q.dtype, grad_lse is not None, tuple(map(layout, qs)), tuple(map(layout, ks)), layout(v), layout(out),
                 layout(grad_out), tuple(map(layout, dqs)), layout(dk), layout(dv), options, FORM)
    query_tiles, rows = plan.preprocess.programs, TILE.rows
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    row_stats, first_sum = floats(query_tiles, 1, 2 * rows), floats(1, query_tiles * rows * FIRST // 32, 1, 32)
    sums = first_sum, torch.zeros(1, query_tiles * rows * WIDTHS[1] // 32, 1, 32, dtype=torch.float32, device=q.device)
    counter = torch.zeros(4, dtype=torch.int32, device=q.device)
    tensors = *qs, *ks, v, grad_out
    widths = *WIDTHS, *WIDTHS, 128, 128
    boxes = rows, rows, HALF.value, HALF.value, HALF.value, rows
    ends: tuple[Tensor | None, ...] = (None,) * 6
    with on_device_of(q):
        plan.preprocess(out, None, grad_out, stats, grad_lse, row_stats, None, None, first_sum, counter, None, cu_seqlens_q)
        if plan.tails is not None:
            ends = tuple(copy_tails(launch, x, bounds) for launch, x, bounds in zip(
                plan.tails, tensors, (cu_seqlens_q,) * 2 + (cu_seqlens_k,) * 3 + (cu_seqlens_q,), strict=True))
        sources = [descriptor(x, box_rows, width) for x, box_rows, width in zip(tensors, boxes, widths, strict=True)]
        ends = tuple(x if x is None else descriptor(x, box_rows, width) for x, box_rows, width in zip(ends, boxes, widths, strict=True))
        plan.mainloop(*sources, descriptor(row_stats, 1, 2 * rows), *ends, descriptor(dks[0], HALF.value, FIRST),
                      descriptor(dks[1], HALF.value, WIDTHS[1]), descriptor(dv, HALF.value, 128), *dks, dv, descriptor(sums[0], 128, 32),
                      descriptor(sums[1], 128, 32), descriptor(sums[0], 64, 32), *sums, counter, cu_seqlens_q, cu_seqlens_k)
        for launch, part, to in zip(plan.postprocesses, sums, dqs, strict=True):
            launch(part, None, to, cu_seqlens_q)
    return dq, dk, dv
