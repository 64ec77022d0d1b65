"""FlashAttention-2's forward: the kernel's entry point and its launch."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, outputs, read_blocks, tma_kind
from attnzoo_kernels._triton.forward import forward, forward_step, softmax_state
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.mainloop import key_loops, window_seen
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.ranges import range_seen
from attnzoo_kernels._triton.scores import load_slope, score_unit
from attnzoo_kernels._triton.softmax import in_units
from attnzoo_kernels._triton.tiles import Operand, Shape, program_tile
from attnzoo_kernels.dropout import drop_threshold
from attnzoo_kernels.flash.hooks import (
    Loaded,
    Modifiers,
    dropped,
    first_key,
    keys_bias,
    load_key_bias,
    load_seed,
    modified,
    queries_distance,
    rows_lse_bias,
)
from attnzoo_kernels.flash.options import NO_DISTANCE_BIAS, NO_KEY_BIAS, DistanceBias, KeyBias, Options
from attnzoo_kernels.flash.ranges import walk_keys
from attnzoo_kernels.flash.tiles import Tile, forward_tile


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(
        state, x,
        Loaded(own.window, own.modifiers, own.slope, own.seed, own.offset, own.head,
               keys_bias(own.modifiers, own.key_bias, at, x), own.mask_row, queries_distance(own.modifiers, x.place, at)),
        at, position, edge, MASKED, GUARD, range_seen if own.modifiers.RANGES else window_seen, modified, dropped,
        # with a bias and a lagging maximum, ptxas 12.8 serialises the products (fault 3)
        LAGS=not own.modifiers.HAS_ALIBI and not own.modifiers.HAS_KEY_BIAS and not own.modifiers.HAS_DISTANCES,
        ROW_BIAS=own.modifiers.HAS_ALIBI and own.modifiers.ONE_SIDED or own.modifiers.HAS_KEY_BIAS, BY_WARP=own.modifiers.BY_WARP,
        SUMS_LAST=own.modifiers.HAS_DROPOUT and x.shape.BLOCK_DV > 64)


@triton.jit
def _loops(x, modifiers):
    # a sink is treated as a first key that has no value; relative to itself, its weight is one
    sink = -float("inf")
    if modifiers.HAS_SINKS:
        sink = in_units(tl.load(modifiers.sinks + x.place.head).to(tl.float32), x.shape.PRECISION == "ieee")
        if x.shape.PACKED:
            sink = tl.where(x.place.sequence == modifiers.n_seqs, -float("inf"), sink)
    state = softmax_state(sink, x.shape)
    if modifiers.RANGES:
        state = walk_keys(_step, state, x, modifiers, modifiers.ONE_LOOP, True)
    else:
        slope = load_slope(modifiers, x.place.sequence, x.place.head)
        seed, offset, mask_row = load_seed(modifiers, x.place.sequence)
        bias = load_key_bias(modifiers, x.place, x.place.head, x.i, x.shape.PRECISION == "ieee", True)
        first = first_key(modifiers, x.place, x.place.head)
        state = key_loops(_step, state, x, Loaded(modifiers.window, modifiers, slope, seed, offset,
                                                 x.place.sequence * modifiers.heads + x.place.head, bias, mask_row), modifiers.ONE_LOOP,
                          True, first if modifiers.PRUNED else None)
    return state


@triton.jit(do_not_specialize=["window_left", "window_right", "drop_below", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together",
                                "n_distances", "origin", "stride_stats"],
            do_not_specialize_on_alignment=["sinks", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "rng_state", "key_bias",
                                            "block_starts", "block_ends", "distance_bias"])
def flash_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, sinks, residual, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
                     rng_state, key_bias, block_starts, block_ends, distance_bias, q_strides, k_strides, v_strides, o_strides,
                     stride_stats, stride_ab, softmax_scale, scale, softcap, keep_prob, window_left, window_right, drop_below, n_seqs,
                     seqlen_q, seqlen_k, heads, group, n_distances, origin, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                     BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                     PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, ONE_SIDED: tl.constexpr,
                     HARDWARE_TANH: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, DROP_PAIRS: tl.constexpr,
                     BY_WARP: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
                     Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr, ONE_LOOP: tl.constexpr, HAS_KEY_BIAS: tl.constexpr,
                     PRUNED: tl.constexpr, RANGES: tl.constexpr, HAS_DISTANCES: tl.constexpr, RESIDUAL: tl.constexpr):
    """Under RANGES the queries are one dense sequence, n_seqs is the number of ranges, and cu_seqlens_q is their table by queries."""
    if PRECISION == "ieee":
        scale = softmax_scale
    forward(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
                         together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides), Operand(k_source, *k_strides),
            Operand(v_source, *v_strides), Operand(out_ptr, *o_strides), lse_ptr, stats_ptr, stride_stats,
            score_unit(scale, softcap, PRESCALE, HAS_SOFTCAP, PRECISION == "ieee"), keep_prob,
            Modifiers(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), scale, softcap, alibi_slopes, stride_ab, rng_state,
                      drop_below, keep_prob, n_seqs, heads, sinks, PRESCALE, HAS_SOFTCAP, HAS_ALIBI, ONE_SIDED, HARDWARE_TANH,
                      HAS_DROPOUT,
                      HAS_SINKS=HAS_SINKS, DROP_PAIRS=DROP_PAIRS, BY_WARP=BY_WARP, ONE_LOOP=ONE_LOOP, FROM_STATS=False,
                      key_bias=key_bias, block_starts=block_starts, block_ends=block_ends, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
                      PACKED=PACKED, HAS_KEY_BIAS=HAS_KEY_BIAS, PRUNED=PRUNED,
                      table=cu_seqlens_q if RANGES else None, RANGES=RANGES, distance_bias=distance_bias, n_distances=n_distances,
                      origin=origin, HAS_DISTANCES=HAS_DISTANCES), seqlen_q, heads, group,
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _loops, Q_REGISTERS, Q_SELECT,
            LSE_BIAS=rows_lse_bias if HAS_KEY_BIAS and PRECISION != "ieee" else None, CHECKED=PACKED, RESIDUAL=RESIDUAL,
            residual_ptr=residual)


def drop_pairs_hold(dropout_p: float, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether drop_pairs can be used: it needs sm_90, 16 bits, and a threshold that is a normal bfloat16 number."""
    return (dtype != torch.float32 and architecture(device) >= 90 and torch.version.cuda is not None
            and 0x80 <= drop_threshold(dropout_p) <= 0x7F80)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, has_sinks: bool, residual: bool, q: Layout, k: Layout, v: Layout,
          options: Options) -> Launch:
    constants = options.constants(q[0], v[0], dtype, device)
    arch, width, value_width = architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"]
    short, long = (forward_tile(arch, width, value_width, dtype.itemsize, causal=options.causal, window=options.window_left >= 0,
                                packed=options.sequences is not None, heavy=options.softcap > 0 or options.dropout_p > 0, long=long)
                   for long in (False, options.sequences is None))
    tile, other = (long, short) if options.sequences is None and k[0][1] > 4096 else (short, long)
    launch = _launch(device, dtype, aligned, has_sinks, residual, q, k, v, options, tile)
    if other != tile:
        launch.others = lambda: [_launch(device, dtype, aligned, has_sinks, residual, q, k, v, options, other)]
    return launch


def _launch(device: torch.device, dtype: torch.dtype, aligned: bool, has_sinks: bool, residual: bool, q: Layout, k: Layout, v: Layout,
            options: Options, tile: Tile) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype, device)
    tma = tma_kind(tile.tma and aligned, (q, k, v), dtype.itemsize, options.sequences is not None)
    rows = math.prod(q[0][:-1])
    heads, value_dim = q[0][-2], v[0][-1]
    stride_out = (0 if len(q[0]) == 3 else seqlen_q * heads * value_dim, heads * value_dim, value_dim)
    # rescaling by warp needs Hopper's products, see `rescaled`; with ALiBi and dropout it is slower
    by_warp = (tma > 0 and architecture(device) == 90 and options.slopes_stride is None and options.dropout_p == 0
               and not options.key_bias and not options.distances)
    pairs = not options.dropout_from_row and drop_pairs_hold(options.dropout_p, dtype, device)
    # beside a bias by distance ptxas would give weights the registers of the queries
    constants |= {"DROP_PAIRS": pairs, "BY_WARP": by_warp, "HAS_SINKS": has_sinks, "RESIDUAL": residual, "BLOCK_M": tile.block_m,
                  "BLOCK_N": tile.block_n, "TMA": tma,
                  "Q_REGISTERS": tile.q_registers and not options.distances, "Q_SELECT": tile.q_select, "ONE_LOOP": tile.one_loop}
    scalars = (*operand_strides(q, k, v), stride_out, rows, *options.scalars(q[0], k[0]),
               options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], tile.block_m, device, dtype))
    programs = options.programs(heads, seqlen_q, sequences, tile.block_m)
    return Launch(flash_fwd_kernel, programs, scalars, constants, tile.num_warps, tile.num_stages, read_blocks(tile, constants))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   alibi_slopes: Tensor | None, sinks: Tensor | None, rng_state: Tensor | None,
                   options: Options, key_bias: KeyBias = NO_KEY_BIAS, distance_bias: DistanceBias = NO_DISTANCE_BIAS,
                   residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, LSE, statistics for the backward), of the shapes that `_triton.call.outputs` gives.

    key_bias, distance_bias: used if the options say so. residual: a tensor like the output, where the output's rounding error is stored.
    """
    out, lse, stats = outputs(q, v.shape[-1])
    if lse.numel() == 0:
        return out, lse, stats
    launch = _plan(q.device, q.dtype, are_aligned(q, k, v), sinks is not None, residual is not None, layout(q), layout(k), layout(v),
                   options)
    with on_device_of(out):
        launch(q, k, v, out, lse, stats, sinks, residual, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *key_bias,
               distance_bias.table)
    return out, lse, stats
