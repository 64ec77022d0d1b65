"""FlashAttention-2's backward, as `_triton.backward` has it: the kernels' entry points and their launches."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.backward import STATS_BLOCK, backward_dkdv, backward_dq, dkdv_step, dq_step, load_stats
from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks, tma_kind
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, row_by_row
from attnzoo_kernels._triton.mainloop import key_loops, query_loops, window_seen, window_seen_transposed
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import load_range_stats, range_seen, range_seen_transposed
from attnzoo_kernels._triton.scores import load_slope, score_unit
from attnzoo_kernels._triton.tiles import Operand, Shape, program_tile, row_places
from attnzoo_kernels.flash.hooks import (
    Loaded,
    Modifiers,
    add_distances,
    dropped_gradient,
    first_key,
    keys_bias,
    keys_distance,
    last_query,
    load_key_bias,
    load_seed,
    modified,
    modified_transposed,
    queries_bias,
    queries_distance,
)
from attnzoo_kernels.flash.options import NO_DISTANCE_BIAS, NO_KEY_BIAS, DistanceBias, KeyBias, Options
from attnzoo_kernels.flash.ranges import walk_keys, walk_queries
from attnzoo_kernels.flash.tiles import dkdv_tile, dq_tile


@triton.jit
def _dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dq_step(state, x,
                   Loaded(own.window, own.modifiers, own.slope, own.seed, own.offset, own.head,
                          keys_bias(own.modifiers, own.key_bias, at, x), own.mask_row, queries_distance(own.modifiers, x.place, at)),
                   at, position, edge, MASKED, GUARD, range_seen if own.modifiers.RANGES else window_seen, modified, dropped_gradient,
                   ROW_BIAS=own.modifiers.HAS_ALIBI and own.modifiers.ONE_SIDED or own.modifiers.HAS_KEY_BIAS, SUMS=add_distances)


@triton.jit
def _dq_loops(state, x, modifiers):
    if modifiers.RANGES:
        state = walk_keys(_dq_step, state, x, modifiers, False, False)
    else:
        slope = load_slope(modifiers, x.place.sequence, x.place.head)
        seed, offset, mask_row = load_seed(modifiers, x.place.sequence)
        bias = load_key_bias(modifiers, x.place, x.place.head, x.i, x.shape.PRECISION == "ieee", True)
        first = first_key(modifiers, x.place, x.place.head)
        state = key_loops(_dq_step, state, x, Loaded(modifiers.window, modifiers, slope, seed, offset,
                                                    x.place.sequence * modifiers.heads + x.place.head, bias, mask_row), False, False,
                          first if modifiers.PRUNED else None)
    return state


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together",
                                "n_distances", "origin", "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state", "stats_ptr", "grad_lse_ptr",
                                            "key_bias", "block_starts", "block_ends", "distance_bias", "distance_sums",
                                            "distance_unit"])
def flash_bwd_dq_kernel(q_source, k_source, v_source, out_ptr, do_source, grad_lse_ptr, stats_ptr, delta_ptr, row_stats_ptr, dq_ptr,
                        cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, key_bias, block_starts, block_ends, distance_bias,
                        distance_sums, distance_unit, q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, stride_stats,
                        stride_rows, stride_ab, softmax_scale, scale, softcap, keep_prob, window_left, window_right, drop_below, n_seqs,
                        seqlen_q, seqlen_k, heads, group, n_distances, origin, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                        BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
                        HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
                        ONE_SIDED: tl.constexpr, HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                        HAS_GRAD_LSE: tl.constexpr, EXACT_DELTA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        STATS_BLOCK: tl.constexpr, TMA: tl.constexpr, HAS_KEY_BIAS: tl.constexpr, PRUNED: tl.constexpr,
                        RANGES: tl.constexpr, HAS_DISTANCES: tl.constexpr):
    if PRECISION == "ieee":
        scale = softmax_scale
    backward_dq(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
                             together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides),
                Operand(k_source, *k_strides), Operand(v_source, *v_strides), Operand(out_ptr, *o_strides), Operand(do_source, *do_strides),
                Operand(dq_ptr, *dq_strides), grad_lse_ptr, stats_ptr, delta_ptr, row_stats_ptr, stride_stats, stride_rows,
                score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee"), softmax_scale,
                Modifiers(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), scale, softcap, alibi_slopes, stride_ab, rng_state,
                          drop_below, keep_prob, n_seqs, heads, None, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH,
                          HAS_DROPOUT,
                          HAS_SINKS=False, DROP_PAIRS=False, BY_WARP=False, ONE_LOOP=False, FROM_STATS=False,
                          key_bias=key_bias, block_starts=block_starts, block_ends=block_ends, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
                          PACKED=PACKED, HAS_KEY_BIAS=HAS_KEY_BIAS, PRUNED=PRUNED,
                          table=cu_seqlens_q if RANGES else None, RANGES=RANGES, distance_bias=distance_bias, distance_sums=distance_sums,
                          distance_unit=distance_unit, n_distances=n_distances, origin=origin, HAS_DISTANCES=HAS_DISTANCES), n_seqs,
                seqlen_q, heads, group, Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dq_loops,
                HAS_GRAD_LSE, EXACT_DELTA, STATS_BLOCK, REFINED=EXACT_DELTA == "residual",
                TWICE=EXACT_DELTA == "residual")


@triton.jit
def _dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return dkdv_step(state, x,
                     Loaded(own.window, own.modifiers, own.slope, own.seed, own.offset, own.head,
                            queries_bias(own.modifiers, own.key_bias, at, x), own.mask_row, keys_distance(own.modifiers, x.place, at)),
                     at, position, edge, MASKED, GUARD, range_seen_transposed if own.modifiers.RANGES else window_seen_transposed,
                     modified_transposed, dropped_gradient,
                     ROW_BIAS=own.modifiers.HAS_ALIBI and own.modifiers.ONE_SIDED or own.modifiers.HAS_KEY_BIAS,
                     FROM_STATS=own.modifiers.FROM_STATS, COLUMN_SUMS=own.modifiers.HAS_KEY_BIAS,
                     LOAD_STATS=load_range_stats if own.modifiers.RANGES else load_stats)


@triton.jit
def _dkdv_loops(state, x, modifiers):
    if modifiers.RANGES:
        state = walk_queries(_dkdv_step, state, x, modifiers, modifiers.ONE_LOOP)
    else:
        state = _sequence_loops(state, x, modifiers)
    return state


@triton.jit
def _sequence_loops(state, x, modifiers):
    slope = load_slope(modifiers, x.place.sequence, x.head)
    seed, offset, mask_row = load_seed(modifiers, x.place.sequence)
    bias = load_key_bias(modifiers, x.place, x.head, x.j, x.shape.PRECISION == "ieee", False)
    last = last_query(modifiers, x.place, x.head)
    if modifiers.HAS_KEY_BIAS:
        state = (state[0], state[1], tl.zeros([x.shape.BLOCK_N], tl.float64 if x.shape.PRECISION == "ieee" else tl.float32))
    state = query_loops(_dkdv_step, state, x, Loaded(modifiers.window, modifiers, slope, seed, offset,
                                            x.place.sequence * modifiers.heads + x.head, bias, mask_row), modifiers.ONE_LOOP,
                        last if modifiers.PRUNED else None)
    if modifiers.HAS_KEY_BIAS:
        _, at, inside = row_places(x.place, x.head, modifiers.seqlen_k, modifiers.heads, x.shape.BLOCK_N, x.shape.PACKED)
        tl.store(modifiers.column_sums + at, state[2], mask=inside)
    return state[0], state[1]


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together",
                                "n_distances", "origin"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state", "key_bias", "block_starts",
                                            "block_ends", "column_sums", "distance_bias"])
def flash_bwd_dkdv_kernel(q_source, k_source, v_source, do_source, row_stats_ptr, dk_ptr, dv_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                          rng_state, key_bias, block_starts, block_ends, column_sums, distance_bias, q_strides, k_strides, v_strides,
                          do_strides, dk_strides, dv_strides, stride_rows, stride_ab, softmax_scale, scale, softcap, keep_prob, window_left,
                          window_right, drop_below, n_seqs, seqlen_q, seqlen_k, heads, group, n_distances, origin, together,
                          HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                          PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr,
                          HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr, HARDWARE_TANH: tl.constexpr,
                          HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          STATS_BLOCK: tl.constexpr, TMA: tl.constexpr, ONE_LOOP: tl.constexpr, FROM_STATS: tl.constexpr,
                          HAS_KEY_BIAS: tl.constexpr, PRUNED: tl.constexpr, RANGES: tl.constexpr, HAS_DISTANCES: tl.constexpr):
    if PRECISION == "ieee":
        scale = softmax_scale
    backward_dkdv(program_tile(cu_seqlens_k, cu_seqlens_q, n_seqs, seqlen_k, seqlen_q, heads // group, BLOCK_N, PACKED, False,
                               together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides),
                  Operand(k_source, *k_strides), Operand(v_source, *v_strides), Operand(do_source, *do_strides),
                  Operand(dk_ptr, *dk_strides), Operand(dv_ptr, *dv_strides), row_stats_ptr, stride_rows,
                  score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee"), softmax_scale, keep_prob if HAS_DROPOUT else 1.0,
                  Modifiers(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), scale, softcap, alibi_slopes, stride_ab, rng_state,
                            drop_below, keep_prob, n_seqs, heads, None, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH,
                            HAS_DROPOUT,
                            HAS_SINKS=False, DROP_PAIRS=False, BY_WARP=False, ONE_LOOP=ONE_LOOP, FROM_STATS=FROM_STATS,
                            key_bias=key_bias, block_starts=block_starts, block_ends=block_ends, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
                            column_sums=column_sums, PACKED=PACKED, HAS_KEY_BIAS=HAS_KEY_BIAS, PRUNED=PRUNED,
                            table=cu_seqlens_k if RANGES else None, RANGES=RANGES, distance_bias=distance_bias,
                            n_distances=n_distances, origin=origin, HAS_DISTANCES=HAS_DISTANCES), n_seqs, seqlen_q, heads, group,
                  Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _dkdv_loops, STATS_BLOCK)


@functools.lru_cache(maxsize=1024)
def _dq_plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_grad_lse: bool, exact_delta: bool | str, q: Layout, k: Layout,
             v: Layout, out: Layout, grad_out: Layout, dq: Layout, stats_stride: int, options: Options) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tile = dq_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.sequences is not None)
    constants |= {"HAS_GRAD_LSE": has_grad_lse, "EXACT_DELTA": exact_delta, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
                  "STATS_BLOCK": STATS_BLOCK, "TMA": tma}
    scalars = (*operand_strides(q, k, v, out, grad_out, dq), math.prod(q[0][:-1]), stats_stride, *options.scalars(q[0], k[0]),
               options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], tile.block_m, device, dtype))
    programs = options.programs(q[0][-2], seqlen_q, sequences, tile.block_m)
    return Launch(flash_bwd_dq_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, read_blocks(tile, constants, 4))


# with any of these, scores are not the plain products that FROM_STATS needs
_BETWEEN = ("PRESCALE", "HAS_SOFTCAP", "HAS_ALIBI", "HAS_DROPOUT", "HAS_KEY_BIAS", "HAS_DISTANCES")


@functools.lru_cache(maxsize=1024)
def _dkdv_plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout, dk: Layout,
               dv: Layout, stats_stride: int, options: Options) -> Launch:
    sequences, _, seqlen_k = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tile = dkdv_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize, causal=options.causal,
                     packed=options.packed and not options.ranges, heavy=options.softcap > 0 or options.dropout_p > 0)
    tma = tma_kind(tile.tma and aligned, (q, k, v, grad_out), dtype.itemsize, options.sequences is not None)
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STATS_BLOCK": STATS_BLOCK, "TMA": tma, "ONE_LOOP": tile.one_loop,
                  "FROM_STATS": tile.from_stats and dtype != torch.float32 and not any(constants[name] for name in _BETWEEN)}
    scalars = (*operand_strides(q, k, v, grad_out, dk, dv), stats_stride, *options.scalars(q[0], k[0]),
               1 if options.packed and not options.ranges  # packed sequences are slower with interleaved heads
               else options.heads_together(k[0], q[0], (q[0][-1] + v[0][-1]) * (q[0][-2] // k[0][-2]), tile.block_n, device, dtype))
    programs = options.programs(k[0][-2], seqlen_k, sequences, tile.block_n)
    return Launch(flash_bwd_dkdv_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, read_blocks(tile, constants, 3))


def launch_dq(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
              cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
              exact_delta: bool | str, options: Options, dq: Tensor | None = None,
              key_bias: KeyBias = NO_KEY_BIAS, distance_bias: DistanceBias = NO_DISTANCE_BIAS) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, the row statistics that launch_dkdv reads, a third result by row, shaped like the LSE, for gradients of biases).

    The third result is delta free of O's rounding error if exact_delta is True, the row sums of dS minus the gradient of the LSE if it is
    "residual", and empty if it is False.
    """
    sequences, seqlen_q, _ = options.sizes(q.shape, k.shape)
    dq = q.new_empty(q.shape) if dq is None else dq
    delta = torch.empty_like(stats[0]) if exact_delta else stats.new_empty(0)
    row_stats = stats.new_empty(3 if q.dtype == torch.float32 else 2, options.programs(q.shape[-2], seqlen_q, sequences,
                                                                                       STATS_BLOCK) * STATS_BLOCK)
    if stats.numel() == 0:
        return dq, row_stats, delta
    launch = _dq_plan(q.device, q.dtype, are_aligned(q, k, v, out, grad_out), grad_lse is not None, exact_delta, layout(q), layout(k),
                      layout(v), layout(out), layout(grad_out), layout(dq), row_stats.shape[1], options)
    launch(q, k, v, out, grad_out, grad_lse, stats, delta, row_stats, dq, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *key_bias,
           *distance_bias)
    return dq, row_stats, delta


def launch_dkdv(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_stats: Tensor, cu_seqlens_q: Tensor | None,
                cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                options: Options, into: tuple[Tensor, Tensor] | None = None, key_bias: KeyBias = NO_KEY_BIAS,
                column_sums: Tensor | None = None, distance_bias: DistanceBias = NO_DISTANCE_BIAS) -> tuple[Tensor, Tensor]:
    """dK and dV from the row statistics of launch_dq. column_sums, with a key_bias: where the sums of dS by key are stored, (batch, heads,
    seqlen_k) or (heads, total), float32, or float64 for float32 tensors."""
    dk, dv = into or (k.new_empty(k.shape), v.new_empty(v.shape))
    if k.numel() == 0:
        return dk, dv
    launch = _dkdv_plan(q.device, q.dtype, are_aligned(q, k, v, grad_out), layout(q), layout(k), layout(v), layout(grad_out),
                        layout(dk), layout(dv), row_stats.shape[1], options)
    launch(q, k, v, grad_out, row_stats, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *key_bias, column_sums,
           distance_bias.table)
    return dk, dv


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                    exact_delta: bool | str, options: Options, into: tuple[Tensor, Tensor, Tensor] | None = None,
                    key_bias: KeyBias = NO_KEY_BIAS, column_sums: Tensor | None = None,
                    distance_bias: DistanceBias = NO_DISTANCE_BIAS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and delta (as launch_dq gives it) for the gradients of output and LSE.

    into: tensors in which dQ, dK and dV are stored, 16-byte aligned. key_bias, column_sums, distance_bias: as launch_forward and
    launch_dkdv have them.
    """
    grad_out = row_by_row(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    extras = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    with on_device_of(q):
        dq, row_stats, delta = launch_dq(grad_out, grad_lse, q, k, v, out, stats, *extras, exact_delta, options, into and into[0], key_bias,
                                         distance_bias)
        dk, dv = launch_dkdv(grad_out, q, k, v, row_stats, *extras, options, into and into[1:], key_bias, column_sums, distance_bias)
    return dq, dk, dv, delta
