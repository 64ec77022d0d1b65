"""Sigmoid attention's backward in plain Triton, as `_triton.backward` has it: the kernels' entry points and their launches."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import backward_dkdv, backward_dq, dkdv_step, dq_step
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks, tma_kind
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row
from attnzoo_kernels._triton.mainloop import key_loops, query_loops, window_seen, window_seen_transposed
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.scores import load_slope
from attnzoo_kernels._triton.softmax import in_units
from attnzoo_kernels._triton.tiles import Operand, Shape, program_tile
from attnzoo_kernels.flash.tiles import dkdv_tile, dq_tile
from attnzoo_kernels.sigmoid.hooks import (
    Given,
    Loaded,
    biased,
    biased_transposed,
    hardware_sigmoid,
    load_bias,
    no_stats,
    sigmoid,
    sigmoid_gradient,
)
from attnzoo_kernels.sigmoid.options import Options

SCALARS = ["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together"]
POINTERS = ["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes"]


@triton.jit
def _dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dq_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen, biased,
                   WEIGHTS=hardware_sigmoid if own.given.HARDWARE else sigmoid, GRADIENT=sigmoid_gradient)


@triton.jit
def _dq_loops(state, x, given):
    return key_loops(_dq_step, state, x,
                     Loaded(given.window, given, load_bias(given, x.place.other_length, x.shape.PRECISION == "ieee"),
                            load_slope(given, x.place.sequence, x.place.head)), False, False)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=POINTERS)
def sigmoid_bwd_dq_kernel(q_source, k_source, v_source, do_source, dq_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes, q_strides, k_strides,
                          v_strides, do_strides, dq_strides, stride_ab, softmax_scale, sigmoid_bias, window_left, window_right, n_seqs,
                          seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                          BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                          HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
                          HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    backward_dq(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
                             together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides),
                Operand(k_source, *k_strides), Operand(v_source, *v_strides), None, Operand(do_source, *do_strides),
                Operand(dq_ptr, *dq_strides), None, None, None, None, 0, 0, in_units(softmax_scale, PRECISION == "ieee"), softmax_scale,
                Given(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), alibi_slopes, stride_ab, sigmoid_bias, n_seqs, HAS_BIAS,
                      HAS_ALIBI, HARDWARE, False), n_seqs, seqlen_q, heads, group,
                Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dq_loops, False, False, 0,
                STATISTICS=False)


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dkdv_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen_transposed, biased_transposed,
                     WEIGHTS=hardware_sigmoid if own.given.HARDWARE else sigmoid, GRADIENT=sigmoid_gradient, LOAD_STATS=no_stats)


@triton.jit
def _dkdv_loops(state, x, given):
    return query_loops(_dkdv_step, state, x,
                       Loaded(given.window, given, load_bias(given, x.place.length, x.shape.PRECISION == "ieee"),
                              load_slope(given, x.place.sequence, x.head)), given.ONE_LOOP)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=POINTERS)
def sigmoid_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes, q_strides,
                            k_strides, v_strides, do_strides, dk_strides, dv_strides, stride_ab, softmax_scale, sigmoid_bias, window_left,
                            window_right, n_seqs, seqlen_q, seqlen_k, heads, group, together, HEAD_DIM: tl.constexpr,
                            VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr,
                            HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr,
                            HAS_ALIBI: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            TMA: tl.constexpr, ONE_LOOP: tl.constexpr):
    backward_dkdv(program_tile(cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False,
                               together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides),
                  Operand(k_source, *k_strides), Operand(v_source, *v_strides), Operand(do_source, *do_strides),
                  Operand(dk_ptr, *dk_strides), Operand(dv_ptr, *dv_strides), 0, 0, in_units(softmax_scale, PRECISION == "ieee"),
                  softmax_scale, 1.0,
                  Given(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), alibi_slopes, stride_ab, sigmoid_bias, n_seqs, HAS_BIAS,
                        HAS_ALIBI, HARDWARE, ONE_LOOP), n_seqs, seqlen_q, heads, group,
                  Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dkdv_loops, 1)


@functools.lru_cache(maxsize=1024)
def _plans(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout, dq: Layout,
           dk: Layout, dv: Layout, options: Options) -> tuple[Launch, Launch]:
    """Of dQ, and of dK and dV."""
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    widths = architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize
    of_queries, of_keys = dq_tile(*widths), dkdv_tile(*widths, causal=options.causal, packed=options.packed)
    together = options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], of_queries.block_m, device, dtype)
    turns = 1 if options.packed else options.heads_together(k[0], q[0], (q[0][-1] + v[0][-1]) * (q[0][-2] // k[0][-2]), of_keys.block_n,
                                                            device, dtype)

    def plan(kernel, tile, programs, results, together, **own):
        tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.packed)
        own |= constants | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma}
        scalars = (*operand_strides(q, k, v, grad_out, *results), *options.scalars(q[0], k[0]), together)
        return Launch(kernel, programs, scalars, own, tile.num_warps, tile.num_stages, read_blocks(tile, own, 3))

    return (plan(sigmoid_bwd_dq_kernel, of_queries, options.programs(q[0][-2], seqlen_q, sequences, of_queries.block_m), (dq,), together),
            plan(sigmoid_bwd_dkdv_kernel, of_keys, options.programs(k[0][-2], seqlen_k, sequences, of_keys.block_n), (dk, dv), turns,
                 ONE_LOOP=of_keys.one_loop))


def launch_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                    alibi_slopes: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV."""
    grad_out = row_by_row(grad_out)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    tensors, extras = (q, k, v, grad_out), (cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    of_queries, of_keys = _plans(q.device, q.dtype, are_aligned(*tensors), *map(layout, (*tensors, dq, dk, dv)), options)
    with on_device_of(q):
        if dq.numel():
            of_queries(*tensors, dq, *extras)
        if dk.numel():
            of_keys(*tensors, dk, dv, *extras)
    return dq, dk, dv
