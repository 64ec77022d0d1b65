"""FlashAttention's backward on Hopper for head dims of 129 to 192.

A program takes tiles of 128 keys. Each of two consumers holds dK (two parts, of 128 and 64 columns) and dV of 64 keys, which take 160 of a
thread's 240 registers. Scores, their gradients and dQ use the others one after the other; to make room, the weights are rounded to 16 bits
before dO Vᵀ is awaited. Each consumer makes 96 columns of dQ from both consumers' dS. The first part of dK is made one step late, while the
exponentials are computed.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, pair_mainloop, store_keys
from attnzoo_kernels._gluon.backward_dq import as_registers, dq_product
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
from attnzoo_kernels._gluon.softmax import packed, unpacked_floats, unpacked_rounded
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Call, Layout, layout, strides
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.flash.options import Options

FIRST = 128  # columns of the first part of queries and keys
WIDTHS = FIRST, 64  # columns of both parts
TILE = Tile()  # it must have two stages: the late product of a step reads the queries of the step before


class DqTiles(NamedTuple):
    """Shared memory for each consumer's 96 columns of dQ: 64 of them and 32. In global memory, columns 0 to 63 come first, then 64 to 95
    and 96 to 127, and the second part of dQ comes last. A tile has 384 rows of 32 floats."""

    wide: Any
    narrow: Any


class Own(NamedTuple):
    """Where the second part of dK is stored."""

    desc: Any
    ptr: Any


@gluon.jit
def _tiles(source, config):
    """The Shared of a program. dK and dV are stored through the shared memory of dQ."""
    dtype: gl.constexpr = source.tensors.do.dtype
    ROWS: gl.constexpr = config.ROWS
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, 128], dtype)
    dq = DqTiles(shared_tiles(gl.float32, 2, 128, 32), shared_tiles(gl.float32, 2, 64, 32))
    return Shared(
        q=(shared_tiles(dtype, config.STAGES, ROWS, 128), shared_tiles(dtype, config.STAGES, ROWS, 64)),
        do=shared_tiles(dtype, config.STAGES, ROWS, 128), k=(shared_tiles(dtype, 2, HALF, 128), shared_tiles(dtype, 2, HALF, 64)),
        v=shared_tiles(dtype, 2, HALF, 128), out=dq.wide._reinterpret(dtype, [2, HALF, 128], OUT), ds=shared_tiles(dtype, 2, HALF, ROWS),
        dq=dq, stats=shared_tiles(gl.float32, config.STAGES, 1, 2 * ROWS), columns=column_numbers(ROWS), work=tile_words())


@gluon.jit
def _start(own, smem, slot, config):
    """INIT_GRADS: zeros for both parts of dK, and for dV."""
    return (gl.zeros([HALF, 128], gl.float32, product_layout(128)), gl.zeros([HALF, 64], gl.float32, product_layout(64)),
            gl.zeros([HALF, 128], gl.float32, product_layout(128)))


@gluon.jit
def _late_dk(dk, smem, step, at, ME: gl.constexpr):
    """Starts the product for the first part of dK of the step before `step`. at: the tile's first step. In that step there is no step
    before, so the result means nothing; the next step's product overwrites it."""
    # [HALF, ROWS] x [ROWS, 128]
    return warpgroup_mma(smem.ds.index(ME), smem.q[0].index((step + 1) & 1), dk, use_acc=step > at + 1, is_async=True)


@gluon.jit
def _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, ME: gl.constexpr):
    """Adds a consumer's columns of dQ to global memory, and releases the other consumer's dS."""
    tma.store_wait(0)
    smem.dq.wide.index(ME)._reinterpret(gl.float32, [64, 64], as_registers(64)).store(wide)
    smem.dq.narrow.index(ME)._reinterpret(gl.float32, [64, 32], as_registers(32)).store(narrow)
    fence_async_shared()
    barrier()
    release(bars.ds_empty.index(1 - ME))
    wide_desc, narrow_desc = dq_desc
    async_add(wide_desc, [0, 0, dq_tile * 384 + ME * 256, 0], box(smem.dq.wide.index(ME), wide_desc))
    async_add(narrow_desc, [0, 0, dq_tile * 384 + 128 + ME * 64, 0], box(smem.dq.narrow.index(ME), narrow_desc))


@gluon.jit
def _step(sums, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, config, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP. It adds the first part of dK of the step before, whose product runs beside this step's exponentials."""
    dk, dk_rest, dv, at = sums
    dtype: gl.constexpr = smem.do.dtype
    of_scores: gl.constexpr = product_layout(config.ROWS)
    ds_phase = step & 1
    stage, scores_pending = scores_in_flight(smem.q, smem, bars, step, config, ME)
    dk_pending = _late_dk(dk, smem, step, at, ME)
    await_full(bars.do_full, step, config.STAGES)
    mbarrier.wait(bars.ds_empty.index(ME), ds_phase ^ 1)
    scores = warpgroup_mma_wait(1, deps=(scores_pending,))
    p = packed(gl.exp2(base_2_scores(scores, smem, stage, scale, low, high, config, MASKED)), dtype, MOVABLE=False)
    # [HALF, 128] x [128, ROWS]
    dweights_pending = warpgroup_mma(smem.v.index(ME), smem.do.index(stage).permute((1, 0)),
                                     gl.zeros([HALF, config.ROWS], gl.float32, of_scores), use_acc=False, is_async=True)
    rounded = unpacked_rounded(p, gl.DotOperandLayout(0, dv.type.layout, 2), dtype)
    # [HALF, ROWS] x [ROWS, 128]
    dv_pending = warpgroup_mma(rounded, smem.do.index(stage), dv, is_async=True)
    dk, dweights = warpgroup_mma_wait(1, deps=(dk_pending, dweights_pending))
    mbarrier.expect(bars.step_empty.index((step + 1) & 1), 0, pred=some)  # releases the step before, which the late product has read
    delta = row_statistics(smem.stats, stage, 1, config.ROWS, gl.SliceLayout(0, of_scores))
    dscores = packed(unpacked_floats(p, of_scores, dtype) * (dweights - delta[None, :]), dtype, MOVABLE=False)
    smem.ds.index(ME).store(unpacked_rounded(dscores, of_scores, dtype))
    fence_async_shared()
    barrier()
    release(bars.ds_full.index(ME))
    mbarrier.wait(bars.ds_full.index(1 - ME), ds_phase)
    dv = warpgroup_mma_wait(0, deps=(dv_pending,))
    wide_pending = dq_product(smem.k[ME], smem.ds, 0, 0, 0, 64)
    narrow_pending = dq_product(smem.k[0], smem.ds, 0, 0, 64 + ME * 32, 32)
    # [HALF, ROWS] x [ROWS, 64]
    dk_rest_pending = warpgroup_mma(smem.ds.index(ME), smem.q[1].index(stage), dk_rest, is_async=True)
    wide, narrow = warpgroup_mma_wait(1, deps=(wide_pending, narrow_pending))
    _add_dq(wide, narrow, smem, bars, dq_desc, dq_tile, ME)
    return dk, warpgroup_mma_wait(0, deps=(dk_rest_pending,)), dv, at


@gluon.jit
def _mainloop(state, at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, scale, config, ME: gl.constexpr):
    """MAINLOOP: pair_mainloop, and behind all steps the first part of dK of the last one."""
    state, end = pair_mainloop(state + (at,), at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, scale, config, ME)
    dk, dk_rest, dv, at = state
    dk = warpgroup_mma_wait(0, deps=(_late_dk(dk, smem, end, at, ME),))
    mbarrier.expect(bars.step_empty.index((end + 1) & 1), 0, pred=end > at)
    return (gl.where(end > at, dk, 0.0), dk_rest, dv), end


@gluon.jit
def _store(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME: gl.constexpr):
    """STORE_GRADS: dV and both parts of dK."""
    dk, dk_rest, dv = state
    dtype: gl.constexpr = buffer.dtype
    REST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, 64], dtype)
    store_keys(grads.dv_desc, grads.dv_ptr, grads.stride_dv, grads.stride_dv_head, buffer, dv.to(dtype), batch, kv_head, first_k, row,
               len_k, config.VALUE_DIM, config.PACKED)
    store_keys(grads.dk_desc, grads.dk_ptr, grads.stride_dk, grads.stride_dk_head, buffer, (dk * dk_scale).to(dtype), batch, kv_head,
               first_k, row, len_k, 128, config.PACKED)
    store_keys(own.desc, own.ptr, grads.stride_dk, grads.stride_dk_head,
               buffer._reinterpret(dtype, [2, HALF, 64], REST).index(0), (dk_rest * dk_scale).to(dtype), batch, kv_head, first_k, row,
               len_k, config.HEAD_DIM - 128, config.PACKED)


@gluon.jit(do_not_specialize=["window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles", "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def wide_bwd_kernel(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, do_desc, stats_desc, q_tail_desc, q_rest_tail_desc, k_tail_desc,
                    k_rest_tail_desc, v_tail_desc, do_tail_desc, dk_desc, dk_rest_desc, dv_desc, dk_ptr, dk_rest_ptr, dv_ptr, dq_wide_desc,
                    dq_narrow_desc, counter, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale, window_right, n_seqs, seqlen_q, seqlen_k,
                    kv_heads, stride_dk, stride_dv, group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr,
                    VALUE_DIM: gl.constexpr, PACKED: gl.constexpr, HAS_RIGHT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
                    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    """dq_wide_desc and dq_narrow_desc: of the same sums, by which a consumer's wide and its narrow columns are added."""
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles, -1,
                      window_right)
    config = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=128, VALUE_WIDTH=128, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES,
                    PACKED=PACKED, HAS_LEFT=False, HAS_RIGHT=HAS_RIGHT, ORDERED=False, DQ_WARP=False, DQ_LAGS=False, LISTED=False,
                    INIT_GRADS=_start, STEP=_step, MAINLOOP=_mainloop, STORE_GRADS=_store)
    source = Source(Operands((q_desc, q_rest_desc), (k_desc, k_rest_desc), v_desc, do_desc),
                    Operands((q_tail_desc, q_rest_tail_desc), (k_tail_desc, k_rest_tail_desc), v_tail_desc, do_tail_desc), stats_desc)
    bars = Barriers(*step_barriers(STAGES, 2, 2), barriers(2, 1), (), (), barriers(2, 1))
    run_pair(source, Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM), _tiles(source, config), bars,
             (dq_wide_desc, dq_narrow_desc), None, problem, Own(dk_rest_desc, dk_rest_ptr), scale, softmax_scale, REGISTERS,
             LOAD_REGISTERS, config)


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
    postprocess: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, q: tuple[Layout, Layout], k: tuple[Layout, Layout], v: Layout,
          out: Layout, grad_out: Layout, dq: Layout, dk: Layout, dv: Layout, options: Call) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0][0], k[0][0])
    heads, kv_heads, value_dim, head_dim = q[0][0][-2], *v[0][-2:], dq[0][-1]
    packed, group, rows = options.packed, heads // kv_heads, TILE.rows
    query_tiles = options.programs(heads, seqlen_q, sequences, rows)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    preprocess, postprocess = frame(options, dq, out, grad_out, dq, rows, 128, value_dim=value_dim, has_grad_lse=has_grad_lse,
                                    ordered=False, dq_width=sum(WIDTHS))
    copies = None
    if packed:
        copies = tuple(tails(x, sequences, block, width) for x, block, width in (
            (q[0], rows, FIRST), (q[1], rows, WIDTHS[1]), (k[0], KEYS.value, FIRST), (k[1], KEYS.value, WIDTHS[1]),
            (v, KEYS.value, 128), (grad_out, rows, 128)))
    programs = multiprocessors(device)
    head_group = heads_together(sequences * kv_heads, seqlen_q * 2 * (head_dim + 256 + 128) * group, -(-seqlen_k // KEYS.value), programs,
                                False)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    mainloop = Launch(
        wide_bwd_kernel, min(key_tiles, programs),
        (options.softmax_scale, options.softmax_scale * math.log2(math.e), options.window_right, sequences, seqlen_q, seqlen_k, kv_heads,
         strides(dk)[1], strides(dv)[1], group, head_group, head_tiles, key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "PACKED": packed, "HAS_RIGHT": options.window_right >= 0, "ROWS": rows,
         "STAGES": TILE.stages, "REGISTERS": TILE.registers, "LOAD_REGISTERS": TILE.load_registers}, 4, 1)
    return Plan(preprocess, copies, mainloop, postprocess)


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
    qs, ks, dks = map(_parts, (q, k, dk))
    plan = _plan(q.device, q.dtype, grad_lse is not None, tuple(map(layout, qs)), tuple(map(layout, ks)),
                 *map(layout, (v, out, grad_out, dq, dk, dv)), options)
    query_tiles, rows = plan.preprocess.programs, TILE.rows
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    row_stats, dq_sum = floats(query_tiles, 1, 2 * rows), floats(1, query_tiles * rows * sum(WIDTHS) // 32, 1, 32)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    tensors = *qs, *ks, v, grad_out
    widths = *WIDTHS, *WIDTHS, 128, 128
    boxes = rows, rows, HALF.value, HALF.value, HALF.value, rows
    ends: tuple[Tensor | None, ...] = (None,) * 6
    with on_device_of(q):
        plan.preprocess(out, None, grad_out, stats, grad_lse, row_stats, None, None, dq_sum, counter, None, cu_seqlens_q)
        if plan.tails is not None:
            ends = tuple(copy_tails(launch, x, bounds) for launch, x, bounds in zip(
                plan.tails, tensors, (cu_seqlens_q,) * 2 + (cu_seqlens_k,) * 3 + (cu_seqlens_q,), strict=True))
        sources = [descriptor(x, box_rows, width) for x, box_rows, width in zip(tensors, boxes, widths, strict=True)]
        ends = tuple(x if x is None else descriptor(x, box_rows, width) for x, box_rows, width in zip(ends, boxes, widths, strict=True))
        plan.mainloop(*sources, descriptor(row_stats, 1, 2 * rows), *ends, descriptor(dks[0], HALF.value, FIRST),
                      descriptor(dks[1], HALF.value, WIDTHS[1]), descriptor(dv, HALF.value, 128), *dks, dv, descriptor(dq_sum, 128, 32),
                      descriptor(dq_sum, 64, 32), counter, cu_seqlens_q, cu_seqlens_k)
        plan.postprocess(dq_sum, None, dq, cu_seqlens_q)
    return dq, dk, dv
