"""FlashAttention's backward on Hopper for head dims of 129 to 192, in two passes over the same steps.

The sums of dK and dV of 64 keys do not fit into a consumer's registers together with scores and dQ. The first pass computes dV and the
first 128 columns of dQ and dK; the second pass computes the other columns. Both read all columns and compute scores and dO Vᵀ, so for
widths of 192 and 128 the products have 1152 columns instead of 832.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, pair_start, pair_store, store_dk
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair
from attnzoo_kernels._gluon.backward_load import Operands, Source
from attnzoo_kernels._gluon.backward_plan import Tile, copy_tails, frame, tails
from attnzoo_kernels._gluon.backward_step import Shared, add_weights, column_numbers, pair_barriers, step_weights, tile_words
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, Problem
from attnzoo_kernels._gluon.hopper import descriptor, product_layout, shared_tiles, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Call, Layout, layout, strides
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.flash.options import Options

FIRST = 128  # columns of queries and keys whose gradients the first pass makes
WIDTHS = FIRST, 64  # of tiles
TILES = Tile(), Tile(registers=232, load_registers=40)  # of the two passes, which have the same rows and stages


@gluon.jit
def _tiles(source, c):
    """Shared with q and k in two parts. dK and dV are stored through the shared memory of dQ."""
    dtype: gl.constexpr = source.tensors.do.dtype
    ROWS: gl.constexpr = c.ROWS
    dq = shared_tiles(gl.float32, 2, ROWS * c.WIDTH // 64, 32)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, c.WIDTH], dtype)
    return Shared(
        q=(shared_tiles(dtype, c.STAGES, ROWS, 128), shared_tiles(dtype, c.STAGES, ROWS, 64)),
        do=shared_tiles(dtype, c.STAGES, ROWS, 128), k=(shared_tiles(dtype, 2, HALF, 128), shared_tiles(dtype, 2, HALF, 64)),
        v=shared_tiles(dtype, 2, HALF, 128), out=dq._reinterpret(dtype, [2, HALF, c.WIDTH], OUT), ds=shared_tiles(dtype, 4, HALF, ROWS),
        dq=dq, stats=shared_tiles(gl.float32, c.STAGES, 1, 2 * ROWS), columns=column_numbers(ROWS), work=tile_words())


@gluon.jit
def _one_part(smem, PART: gl.constexpr):
    """Shared with only one part of queries and keys."""
    return Shared(q=smem.q[PART], do=smem.do, stats=smem.stats, k=smem.k[PART], v=smem.v, ds=smem.ds, dq=smem.dq, out=smem.out,
                  columns=smem.columns, work=smem.work)


@gluon.jit
def _first_step(dk, dv, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP of the first pass."""
    stage, weights, dweights_pending = step_weights(smem, bars, step, scale, low, high, c, ME, MASKED)
    return add_weights(dk, dv, weights, dweights_pending, _one_part(smem, 0), bars, dq_desc, dq_tile, step, stage, some, c, ME)


@gluon.jit
def _start_rest(own, smem, slot, c):
    """START of the second pass: there is no dV."""
    return (gl.zeros([HALF, c.WIDTH], gl.float32, product_layout(c.WIDTH)),)


@gluon.jit
def _rest_step(dk, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP of the second pass."""
    stage, weights, dweights_pending = step_weights(smem, bars, step, scale, low, high, c, ME, MASKED)
    return add_weights(dk, None, weights, dweights_pending, _one_part(smem, 1), bars, dq_desc, dq_tile, step, stage, some, c, ME)


@gluon.jit
def _store_rest(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, c, ME: gl.constexpr):
    """STORE of the second pass."""
    store_dk(grads, buffer, state[0] * dk_scale, batch, kv_head, first_k, row, len_k, c)


@gluon.jit(do_not_specialize=["window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles", "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def wide_bwd_kernel(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, do_desc, stats_desc, q_tail_desc, q_rest_tail_desc, k_tail_desc,
                    k_rest_tail_desc, v_tail_desc, do_tail_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, counter, cu_seqlens_q,
                    cu_seqlens_k, softmax_scale, scale, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group,
                    head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
                    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_RIGHT: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
                    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    """DIM: the columns of this pass, in tiles of WIDTH; HEAD_DIM: all columns. WIDTH = 64 is the second pass, which has no dV."""
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles, -1,
                      window_right)
    c = Config(HEAD_DIM=DIM, VALUE_DIM=VALUE_DIM, WIDTH=WIDTH, VALUE_WIDTH=128, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES, PACKED=PACKED,
               HAS_LEFT=False, HAS_RIGHT=HAS_RIGHT, ORDERED=False, DQ_WARP=False, DQ_LAGS=False, LISTED=False,
               START=_start_rest if WIDTH == 64 else pair_start, STEP=_rest_step if WIDTH == 64 else _first_step,
               STORE=_store_rest if WIDTH == 64 else pair_store)
    source = Source(Operands((q_desc, q_rest_desc), (k_desc, k_rest_desc), v_desc, do_desc),
                    Operands((q_tail_desc, q_rest_tail_desc), (k_tail_desc, k_rest_tail_desc), v_tail_desc, do_tail_desc), stats_desc)
    run_pair(source, Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM), _tiles(source, c),
             pair_barriers(c), dq_desc, None, problem, (), scale, softmax_scale, REGISTERS, LOAD_REGISTERS, c)


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
    passes: tuple[Launch, ...]
    postprocesses: tuple[Launch, ...]


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, q: tuple[Layout, Layout], k: tuple[Layout, Layout], v: Layout,
          out: Layout, grad_out: Layout, dq: tuple[Layout, Layout], dk: Layout, dv: Layout, options: Call) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0][0], k[0][0])
    heads, kv_heads, value_dim = q[0][0][-2], *v[0][-2:]
    dims, packed, group, tile = (q[0][0][-1], q[1][0][-1]), options.packed, heads // kv_heads, TILES[0]
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
    passes = tuple(Launch(
        wide_bwd_kernel, min(key_tiles, programs),
        (options.softmax_scale, options.softmax_scale * math.log2(math.e), options.window_right, sequences, seqlen_q, seqlen_k, kv_heads,
         strides(dk)[1], strides(dv)[1], group, head_group, head_tiles, key_tiles),
        {"HEAD_DIM": sum(dims), "DIM": dim, "VALUE_DIM": value_dim, "WIDTH": width, "PACKED": packed,
         "HAS_RIGHT": options.window_right >= 0, "ROWS": own.rows, "STAGES": own.stages, "REGISTERS": own.registers,
         "LOAD_REGISTERS": own.load_registers}, 4, 1) for dim, width, own in zip(dims, WIDTHS, TILES, strict=True))
    return Plan(frames[0][0], copies, passes, tuple(after for _, after in frames))


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
                 layout(grad_out), tuple(map(layout, dqs)), layout(dk), layout(dv), options)
    query_tiles, rows = plan.preprocess.programs, plan.passes[0].constants["ROWS"]
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    row_stats, first_sum = floats(query_tiles, 1, 2 * rows), floats(1, query_tiles * rows * FIRST // 32, 1, 32)
    sums = first_sum, torch.zeros(1, query_tiles * rows * WIDTHS[1] // 32, 1, 32, dtype=torch.float32, device=q.device)
    counters = torch.zeros(2, 4, dtype=torch.int32, device=q.device)  # each at 16 bytes
    tensors = *qs, *ks, v, grad_out
    widths = *WIDTHS, *WIDTHS, 128, 128
    boxes = rows, rows, HALF.value, HALF.value, HALF.value, rows
    ends: tuple[Tensor | None, ...] = (None,) * 6
    with on_device_of(q):
        plan.preprocess(out, None, grad_out, stats, grad_lse, row_stats, None, None, first_sum, counters[0], None, cu_seqlens_q)
        if plan.tails is not None:
            ends = tuple(copy_tails(launch, x, bounds) for launch, x, bounds in zip(
                plan.tails, tensors, (cu_seqlens_q,) * 2 + (cu_seqlens_k,) * 3 + (cu_seqlens_q,), strict=True))
        sources = [descriptor(x, box_rows, width) for x, box_rows, width in zip(tensors, boxes, widths, strict=True)]
        ends = tuple(x if x is None else descriptor(x, box_rows, width) for x, box_rows, width in zip(ends, boxes, widths, strict=True))
        for n, launch in enumerate(plan.passes):
            width = WIDTHS[n]
            launch(*sources, descriptor(row_stats, 1, 2 * rows), *ends, descriptor(dks[n], HALF.value, width),
                   descriptor(dv, HALF.value, 128) if n == 0 else None, dks[n], dv if n == 0 else None,
                   descriptor(sums[n], rows * width // 64, 32), counters[n], cu_seqlens_q, cu_seqlens_k)
            plan.postprocesses[n](sums[n], None, dqs[n], cu_seqlens_q)
    return dq, dk, dv
