"""The backward of attention in two frames, as `_triton.backward` has it: the kernels' entry points and their launches.

One maximum, sum and delta per row serve both frames. Each frame has a gradient of queries and keys of its own.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, add_members, backward_dq, dkdv_step, dq_step
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks, tma_kind
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row
from attnzoo_kernels._triton.mainloop import load_query_rows, query_loops, window_seen_transposed
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.softmax import in_units
from attnzoo_kernels._triton.tiles import Operand, Place, Shape, head_rows, load_own, other_rows, program_tile, store_own, store_rows
from attnzoo_kernels.flash.tiles import dkdv_tile, dq_tile
from attnzoo_kernels.two_frame.hooks import Frames, frame_loops
from attnzoo_kernels.two_frame.options import Options

SCALARS = ["near_keys", "far_keys", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together"]


@triton.jit
def _dq_loops(state, x, own):
    dq, exact_delta = state
    for near in range(2):
        dq, exact_delta = frame_loops(dq_step, (tl.zeros_like(dq), exact_delta), x, own, 1 - near, False)
        rows = head_rows(own.gradient, x.place.batch, 2 * x.place.head + 1 - near, x.place.first, x.place.length, False)
        store_rows(rows, dq * own.softmax_scale, x.place.row, x.shape.HEAD_DIM, x.shape.BLOCK_M, x.shape.BLOCK_D)
    return dq, exact_delta


@triton.jit
def _stored(rows, dq, softmax_scale, place, own, shape):
    """FINISH: the loops have stored dQ, frame by frame."""


@triton.jit(do_not_specialize=[*SCALARS, "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "stats_ptr", "grad_lse_ptr"])
def two_frame_bwd_dq_kernel(q_source, k_source, v_source, do_source, out_ptr, grad_lse_ptr, stats_ptr, row_stats_ptr, dq_ptr, cu_seqlens_q,
                            cu_seqlens_k, q_strides, k_strides, v_strides, do_strides, o_strides, dq_strides, stride_stats, stride_rows,
                            softmax_scale, near_keys, far_keys, n_seqs, seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr,
                            VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
                            LIMITED: tl.constexpr, PRECISION: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, BLOCK_M: tl.constexpr,
                            BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr, TMA: tl.constexpr):
    backward_dq(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, True,
                             None if LIMITED else together), Operand(q_source, *q_strides), Operand(k_source, *k_strides),
                Operand(v_source, *v_strides), Operand(out_ptr, *o_strides), Operand(do_source, *do_strides), Operand(dq_ptr, *dq_strides),
                grad_lse_ptr, stats_ptr, None, row_stats_ptr, stride_stats, stride_rows, in_units(softmax_scale, PRECISION == "ieee"),
                softmax_scale,
                Frames(near_keys, far_keys, Operand(q_source, *q_strides),
                       Operand(k_source, *k_strides), Operand(dq_ptr, *dq_strides),
                       softmax_scale, group, False), n_seqs, seqlen_q, heads, group,
                Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dq_loops, HAS_GRAD_LSE, False,
                STATS_BLOCK, _stored)


class Queries(NamedTuple):
    """What steps over queries need: their Operand, the frame that the keys are of, the window of that frame, and how many keys of the
    sequence are in it."""

    operand: Any
    frame: Any
    window: Any
    seen: Any
    LIMITED: Any
    ONE_LOOP: Any
    FROM_STATS: Any


@triton.jit
def _load_frame(x, own, at, GUARD: tl.constexpr):
    """LOAD_Q: the queries of the frame."""
    return load_query_rows(x, other_rows(own.operand, x.place, 2 * x.head + own.frame, x.shape.TMA), at, GUARD)


@triton.jit
def _of_seen_keys(x, own, products, i, j, at):
    """SCORE: also hides keys past the frame's keys, because tiles without a mask may contain some."""
    scores = products
    if own.LIMITED:
        scores = tl.where(j < own.seen, products, -float("inf"))
    return scores, 0.0, 1.0


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dkdv_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen_transposed, _of_seen_keys,
                     FROM_STATS=own.FROM_STATS, LOAD_Q=_load_frame)


@triton.jit
def _dkdv_loops(state, x, own):
    return query_loops(_dkdv_step, state, x, own, own.ONE_LOOP)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def two_frame_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, q_strides,
                              k_strides, v_strides, do_strides, dk_strides, dv_strides, stride_rows, softmax_scale, near_keys, far_keys,
                              n_seqs, seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                              BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, LIMITED: tl.constexpr,
                              PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr,
                              TMA: tl.constexpr, ONE_LOOP: tl.constexpr, FROM_STATS: tl.constexpr):
    place = program_tile(cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False,
                         None if LIMITED else together)
    if place.row >= place.length:
        return
    # [BLOCK_N, BLOCK_DV]
    v = load_own(Operand(v_source, *v_strides), place, VALUE_DIM, BLOCK_N, BLOCK_DV, TMA)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for near in range(2):
        frame = 1 - near
        of_frame = Place(place.sequence, place.batch, 2 * place.head + frame, place.row, place.first, place.length, place.other_first,
                         place.other_length)
        # [BLOCK_N, BLOCK_D]
        k = load_own(Operand(k_source, *k_strides), of_frame, HEAD_DIM, BLOCK_N, BLOCK_D, TMA)
        dk, dv = add_members(
            (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), dv), k, v, place, Operand(q_source, *q_strides),
            Operand(do_source, *do_strides), row_stats_ptr, stride_rows,
            in_units(softmax_scale, PRECISION == "ieee"),
            Queries(Operand(q_source, *q_strides), frame,
                    Window(tl.where(near == 1, near_keys - 1, place.length), tl.where(near == 1, 0, -near_keys), True, True),
                    tl.where(near == 1, place.length, far_keys), LIMITED, ONE_LOOP, FROM_STATS),
            n_seqs, seqlen_q, heads, group, tl.where((near == 1) | (place.row < far_keys), group, 0),
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA),
            _dkdv_loops, STATS_BLOCK)
        store_own(Operand(dk_ptr, *dk_strides), dk * softmax_scale, of_frame, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_own(Operand(dv_ptr, *dv_strides), dv, place, VALUE_DIM, BLOCK_N, BLOCK_DV)


@functools.lru_cache(maxsize=1024)
def _plans(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout,
           out: Layout, dq: Layout, dk: Layout, dv: Layout, stats_stride: int, rows_stride: int, options: Options) -> tuple[Launch, Launch]:
    """Of dQ, and of dK and dV."""
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype) | {"STATS_BLOCK": STATS_BLOCK}
    widths = architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize
    of_queries, of_keys = dq_tile(*widths), dkdv_tile(*widths, causal=True, packed=options.packed)
    together = options.heads_together(out[0], v[0], (q[0][-1] + v[0][-1]) * v[0][-2] // out[0][-2], of_queries.block_m, device, dtype)
    turns = 1 if options.packed else options.heads_together(v[0], out[0], (q[0][-1] + v[0][-1]) * (out[0][-2] // v[0][-2]),
                                                            of_keys.block_n, device, dtype)

    def plan(kernel, tile, programs, results, numbers, **own):
        tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.packed)
        own |= constants | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma}
        *rows, together = numbers
        # so that a third program fits on a multiprocessor; what is spilled is used outside of the inner loops only
        fewer = {"maxnreg": 168} if tma and architecture(device) == 90 and max(own["BLOCK_D"], own["BLOCK_DV"]) <= 64 else {}
        scalars = (*operand_strides(q, k, v, grad_out, *results), *rows, *options.scalars(q[0], k[0]), together)
        return Launch(kernel, programs, scalars, own, tile.num_warps, tile.num_stages, read_blocks(tile, own, 3), fewer)

    return (plan(two_frame_bwd_dq_kernel, of_queries, options.programs(out[0][-2], seqlen_q, sequences, of_queries.block_m), (out, dq),
                 (stats_stride, rows_stride, together), HAS_GRAD_LSE=has_grad_lse),
            plan(two_frame_bwd_dkdv_kernel, of_keys, options.programs(v[0][-2], seqlen_k, sequences, of_keys.block_n), (dk, dv),
                 (rows_stride, turns), ONE_LOOP=of_keys.one_loop, FROM_STATS=of_keys.from_stats and dtype != torch.float32))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV for the gradients of output and LSE; the former two like q and k with their frames."""
    grad_out = row_by_row(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    sequences, seqlen_q, _ = options.sizes(q.shape, k.shape)
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2,
                                options.programs(out.shape[-2], seqlen_q, sequences, STATS_BLOCK) * STATS_BLOCK)
    tensors = q, k, v, grad_out
    of_queries, of_keys = _plans(q.device, q.dtype, are_aligned(*tensors, out), grad_lse is not None,
                                 *map(layout, (*tensors, out, dq, dk, dv)), stats.stride(0), row_stats.stride(0), options)
    with on_device_of(q):
        if dq.numel():
            of_queries(*tensors, out, grad_lse, stats, row_stats, dq, cu_seqlens_q, cu_seqlens_k)
        if dk.numel():
            of_keys(*tensors, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k)
    return dq, dk, dv
