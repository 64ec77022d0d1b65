"""FlashAttention's dK and dV on Hopper with Triton's own warp specialisation (`_triton.specialised`), for dense attention, full or causal.

The row statistics are those of backward.py's dQ; a program's loading warps bring them, too, 64 rows at a time.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attnzoo_kernels._triton.backward import STATS_BLOCK, first_stats_row
from attnzoo_kernels._triton.launch import multiprocessors, tma_takes_layout
from attnzoo_kernels._triton.specialised import COMPILES, HalvedLaunch, invalidated, lies_side_by_side, passed, side_by_side
from attnzoo_kernels._triton.tiles import load_rows, store_rows, tile_source
from attnzoo_kernels.flash.options import Layout, Options, strides
from attnzoo_kernels.flash.tiles import SpecialisedTile


def takes(tile: SpecialisedTile | None, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, grad_out: Layout,
          options: Options) -> bool:
    """Whether this kernel computes such calls, of some lengths."""
    return (COMPILES and tile is not None and dtype.itemsize == 2 and aligned and options.sequences is None and options.softmax_scale > 0
            and options.slopes_stride is None and options.softcap == options.dropout_p == 0 and options.window_left < 0
            and (options.window_right < 0 or options.window_right == 0 and q[0][-2] == k[0][-2])
            and q[0][-1] == v[0][-1] == 128 and all(lies_side_by_side(*x) for x in (k, v))
            and all(tma_takes_layout(*x, 2) for x in (q, grad_out)))


def takes_causal_lengths(tile: SpecialisedTile, q: Layout, k: Layout) -> bool:
    """Whether lengths of causal calls suit it, too: those that it takes are whole tiles."""
    seqlen_q, seqlen_k = q[0][1], k[0][1]
    return tile.shortest_causal <= seqlen_q <= seqlen_k and seqlen_q % tile.block_n == seqlen_k % tile.block_n == 0


@triton.jit
def _step(dk, dv, k, v, q_source, do_source, row_stats_source, batch, head, row, column, seqlen_q, seqlen_k, heads, scale,
          HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STATS_BLOCK: tl.constexpr, MASKED: tl.constexpr):
    # [BLOCK_M, HEAD_DIM]
    q = load_rows(q_source, batch, head, 0, row, seqlen_q, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, False, 1)
    do = load_rows(do_source, batch, head, 0, row, seqlen_q, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, False, 1)
    at = (first_stats_row(head, batch, 0, 0, seqlen_q, heads, False, STATS_BLOCK) + row).to(tl.int32)
    top = row_stats_source.load([0, at]).reshape(BLOCK_M)  # to [1, BLOCK_M] it would be read behind the products
    delta = row_stats_source.load([1, at]).reshape(BLOCK_M)
    # [BLOCK_N, BLOCK_M]
    weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - top[None, :])
    if MASKED:
        # a thread's columns lie 8 apart: in this form each is compared as a constant
        first, i = column + tl.arange(0, BLOCK_N) + (seqlen_q - seqlen_k - row), tl.arange(0, BLOCK_M)
        weights = tl.where((i // 8 * 8)[None, :] >= first[:, None] - (i % 8)[None, :], weights, 0.0)
    dscores = weights * (tl.dot(v, tl.trans(do)) - delta[None, :])
    # [BLOCK_N, HEAD_DIM]
    dv = tl.dot(weights.to(do.dtype), do, dv)
    dk = tl.dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "items", "together"])
def flash_bwd_dkdv_specialised_kernel(q_source, k_source, v_source, do_source, row_stats_source, dk_ptr, dv_ptr, stride_kh, stride_vh,
                                      stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh, softmax_scale, scale,
                                      seqlen_q, seqlen_k, heads, group, together, items, GROUPED: tl.constexpr, CAUSAL: tl.constexpr,
                                      HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
                                      STATS_BLOCK: tl.constexpr):
    kv_heads = heads // group
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    padded_q = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
    zero = invalidated(items - items)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), warp_specialize=True, num_stages=1):
        # so many heads take turns, heavy tiles first
        column = item // together % tiles * BLOCK_N
        member = item // (together * tiles) * together + item % together
        batch = member // kv_heads
        kv_head = member % kv_heads
        # [BLOCK_N, HEAD_DIM]
        k = k_source.load([batch * seqlen_k + column, zero + kv_head * stride_kh])
        v = v_source.load([batch * seqlen_k + column, kv_head * stride_vh])
        dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        begin = 0
        if CAUSAL:
            # steps before the loop, so that none in it has a mask
            diagonal = tl.maximum(column + seqlen_q - seqlen_k, 0)
            for part in tl.static_range(BLOCK_N // BLOCK_M):
                dk, dv = _step(dk, dv, k, v, q_source, do_source, row_stats_source, batch, kv_head, diagonal + part * BLOCK_M, column,
                               seqlen_q, seqlen_k, heads, scale, HEAD_DIM, BLOCK_M, BLOCK_N, STATS_BLOCK, True)
                dk = passed(dk)
                dv = passed(dv)
            begin = diagonal + BLOCK_N
        for step in tl.range(begin, group * padded_q, BLOCK_M, num_stages=STAGES):
            head = kv_head
            row = step
            if GROUPED:
                head = kv_head * group + step // padded_q
                row = step % padded_q
            dk, dv = _step(dk, dv, k, v, q_source, do_source, row_stats_source, batch, head, row, column, seqlen_q, seqlen_k, heads, scale,
                           HEAD_DIM, BLOCK_M, BLOCK_N, STATS_BLOCK, False)
        dk_rows = tile_source(dk_ptr, batch, kv_head, 0, stride_dkb, stride_dks, stride_dkh, False)
        dv_rows = tile_source(dv_ptr, batch, kv_head, 0, stride_dvb, stride_dvs, stride_dvh, False)
        store_rows(dk_rows, dk * softmax_scale, column, seqlen_k, stride_dks, HEAD_DIM, BLOCK_N, HEAD_DIM)
        store_rows(dv_rows, dv, column, seqlen_k, stride_dvs, HEAD_DIM, BLOCK_N, HEAD_DIM)


def dkdv_plan(device: torch.device, dtype: torch.dtype, q: Layout, k: Layout, v: Layout, grad_out: Layout, dk: Layout, dv: Layout,
              stats_stride: int, tile: SpecialisedTile, options: Options) -> HalvedLaunch:
    (_, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, _) = q[0], k[0]
    items, causal = options.programs(kv_heads, seqlen_k, batch, tile.block_n), options.window_right == 0
    together = options.heads_together(k[0], q[0], (q[0][-1] + v[0][-1]) * (heads // kv_heads), tile.block_n, device, dtype) if causal else 1
    scalars = (strides(k)[2], strides(v)[2], *strides(dk), *strides(dv), options.softmax_scale, options.softmax_scale * math.log2(math.e),
               seqlen_q, seqlen_k, heads, heads // kv_heads, together, items)
    constants = {"GROUPED": heads > kv_heads, "CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
                 "STAGES": tile.stages, "STATS_BLOCK": STATS_BLOCK}
    blocks = dict.fromkeys((0, 3), (tile.block_m, head_dim))
    row_stats = TensorDescriptor(torch.empty(0), [2, stats_stride], [stats_stride, 1], [1, tile.block_m])
    templates = {1: side_by_side(*k, tile.block_n), 2: side_by_side(*v, tile.block_n), 4: row_stats}
    programs = items if causal else min(items, multiprocessors(device))
    return HalvedLaunch(flash_bwd_dkdv_specialised_kernel, programs, scalars, constants, 4, tile.stages, blocks, takes=tuple(range(7)),
                        templates=templates, halved=(1, 2))
