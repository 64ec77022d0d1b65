"""FlashAttention's forward on Hopper with Triton's own warp specialisation (`_triton.specialised`): each of two groups keeps 64 queries.

For dense attention over whole tiles of keys, full or causal. Causal programs walk their tiles in pairs of equal work.
"""

import math

import torch
import triton
import triton.language as tl

from attnzoo_kernels._triton.launch import block_width, multiprocessors, tma_takes_layout
from attnzoo_kernels._triton.softmax import in_units, log_sum_exp, rescaled, softmax_stats, softmax_weights
from attnzoo_kernels._triton.specialised import COMPILES, HalvedLaunch, invalidated, lies_side_by_side, passed, side_by_side
from attnzoo_kernels._triton.tiles import first_lse, in_registers, load_rows, store_rows
from attnzoo_kernels.flash.options import Layout, Options, strides
from attnzoo_kernels.flash.scores import score_unit, scores_in_unit
from attnzoo_kernels.flash.tiles import SpecialisedTile


def takes(tile: SpecialisedTile | None, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, options: Options) -> bool:
    """Whether this kernel computes such calls, of some lengths."""
    if tile is None or options.sequences is not None or not COMPILES:
        return False
    return (dtype.itemsize == 2 and aligned and options.softmax_scale > 0 and options.slopes_stride is None
            and (options.softcap == 0 or tile.softcap) and options.dropout_p == 0 and options.window_left < 0 and options.window_right <= 0
            and q[0][-1] == block_width(q[0][-1]) == block_width(v[0][-1])
            and all(tma_takes_layout(*x, 2) for x in (k, v)) and lies_side_by_side(*q))


def takes_lengths(tile: SpecialisedTile, q: Layout, k: Layout, options: Options) -> bool:
    """Whether lengths and heads suit it, too: causal ones come in pairs, and every query sees the first key."""
    (batch, seqlen_q, heads, _), seqlen_k = q[0], k[0][1]
    if options.window_right < 0:
        return seqlen_k % tile.block_n == 0
    steps = tile.block_n if tile.diagonal_first else 1
    return (seqlen_k % tile.block_n == 0 and seqlen_k <= tile.longest_causal and seqlen_q <= seqlen_k
            and (seqlen_k - seqlen_q) % steps == 0 and batch * heads % 2 == 0)


@triton.jit
def _step(acc, top, norm, q, k_source, v_source, batch, kv_head, zero, column, row, ahead, seqlen_k, scale, softcap,
          HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    # [BLOCK_N, BLOCK_D]
    k = load_rows(k_source, batch, kv_head, zero, column, seqlen_k, 0, HEAD_DIM, BLOCK_N, BLOCK_D, False, 1)
    # [BLOCK_M, BLOCK_N]
    scores = tl.dot(q, tl.trans(k))
    unit = score_unit(scale, softcap, False, HAS_SOFTCAP, False)
    if HAS_SOFTCAP:
        scores, _ = scores_in_unit(scores, 0.0, scale, softcap, False, True, False, True)
    if MASKED:
        # a thread's columns lie 8 apart: in this form each is compared as a constant
        last, j = row + tl.arange(0, BLOCK_M) + (ahead - column), tl.arange(0, BLOCK_N)
        scores = tl.where(last[:, None] - (j % 8)[None, :] >= (j // 8 * 8)[None, :], scores, -float("inf"))
    weights, new_top, rescale = softmax_weights(scores, top, unit, False, False, True)
    # products wait for each other: in this order keys are given back before the values' load, and the sums run during P V
    weights_16 = weights.to(v_source.dtype)
    acc = rescaled(acc, rescale, new_top, top, True)
    # [BLOCK_N, BLOCK_DV]
    v = load_rows(v_source, batch, kv_head, 0, column, seqlen_k, 0, VALUE_DIM, BLOCK_N, BLOCK_DV, False, 1)
    norm = norm * rescale + tl.sum(weights, 1)
    # [BLOCK_M, BLOCK_DV]
    return tl.dot(weights_16, v, acc), new_top, norm


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "items", "stride_stats"], do_not_specialize_on_alignment=["sinks"])
def flash_fwd_specialised_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, sinks, stride_qh, stride_ob, stride_os,
                                 stride_oh, stride_stats, scale, softcap, seqlen_q, seqlen_k, heads, group, items, HEAD_DIM: tl.constexpr,
                                 VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr,
                                 HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                                 STAGES: tl.constexpr, Q_REGISTERS: tl.constexpr, DIAGONAL_FIRST: tl.constexpr):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    first, programs = tl.program_id(0), tl.num_programs(0)
    zero = invalidated(items - items)
    end = items
    if CAUSAL:
        end = first + 2 * programs * tl.cdiv(items // 2 - first, programs)
    for item in tl.range(first, end, programs, warp_specialize=True, num_stages=STAGES):
        tile = item % tiles
        member = item // tiles
        if CAUSAL:
            # two tiles, of two heads, that are as much work as any other two
            turn = item // programs
            pair = turn // 2 * programs + first
            tile = tl.where(turn % 2 == 0, tiles - 1 - pair % tiles, pair % tiles)
            member = pair // tiles * 2 + turn % 2
        row = tile * BLOCK_M
        batch = member // heads
        head = member % heads
        # [BLOCK_M, BLOCK_D]
        q = q_source.load([batch * seqlen_q + row, head * stride_qh])
        if Q_REGISTERS:
            q = in_registers(q)
        sink = -float("inf")
        if HAS_SINKS:
            sink = in_units(tl.load(sinks + head).to(tl.float32), False)
        top = tl.zeros([BLOCK_M], tl.float32) + sink
        norm = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        ahead = seqlen_k - seqlen_q
        keys = seqlen_k
        if CAUSAL:
            keys = tl.minimum(keys, row + BLOCK_M + ahead)
        if CAUSAL and DIAGONAL_FIRST:
            keys = row + ahead
            acc, top, norm = _step(acc, top, norm, q, k_source, v_source, batch, head // group, zero, keys, row, ahead, seqlen_k, scale,
                                   softcap, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, True, HAS_SOFTCAP)
            acc = passed(acc)
        for column in tl.range(0, keys, BLOCK_N, num_stages=STAGES):
            acc, top, norm = _step(acc, top, norm, q, k_source, v_source, batch, head // group, zero, column, row, ahead, seqlen_k, scale,
                                   softcap, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, CAUSAL and not DIAGONAL_FIRST,
                                   HAS_SOFTCAP)
        acc *= (1.0 / norm)[:, None]
        out = out_ptr + tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        store_rows(out, acc, row, seqlen_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
        i = row + tl.arange(0, BLOCK_M)
        lse_index = first_lse(batch, head, 0, seqlen_q, heads, False) + i
        tl.store(lse_ptr + lse_index, log_sum_exp(top, norm, False), mask=i < seqlen_q)
        tl.store(stats_ptr + lse_index, top, mask=i < seqlen_q)
        tl.store(stats_ptr + stride_stats + lse_index, softmax_stats(top, norm, False)[1], mask=i < seqlen_q)


def plan(device: torch.device, dtype: torch.dtype, has_sinks: bool, q: Layout, k: Layout, v: Layout, tile: SpecialisedTile,
         options: Options) -> HalvedLaunch:
    (batch, seqlen_q, heads, head_dim), value_dim = q[0], v[0][-1]
    causal = options.window_right >= 0
    items = options.programs(heads, seqlen_q, batch, tile.block_m)
    scalars = (strides(q)[2], seqlen_q * heads * value_dim, heads * value_dim, value_dim, math.prod(q[0][:-1]),
               options.softmax_scale * math.log2(math.e), options.softcap, seqlen_q, k[0][1], heads, heads // k[0][2], items)
    constants = {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_width(head_dim), "BLOCK_DV": block_width(value_dim),
                 "CAUSAL": causal, "HAS_SINKS": has_sinks, "HAS_SOFTCAP": options.softcap > 0, "BLOCK_M": tile.block_m,
                 "BLOCK_N": tile.block_n, "STAGES": tile.stages, "Q_REGISTERS": tile.q_registers, "DIAGONAL_FIRST": tile.diagonal_first}
    blocks = {1: (tile.block_n, constants["BLOCK_D"]), 2: (tile.block_n, constants["BLOCK_DV"])}
    programs = max(1, min(items // 2 if causal else items, multiprocessors(device)))
    return HalvedLaunch(flash_fwd_specialised_kernel, programs, scalars, constants, 4, tile.stages, blocks,
                        takes=(0, 1, 2, 3, 4, 5, 6), templates={0: side_by_side(*q, tile.block_m)}, halved=(0,))
