"""Differential attention's backward on Hopper above head_dim 64: of FlashAttention's walks one for each path and 128 columns of values.

dK1, dK2 and dV of one tile of keys do not fit the registers together there. Scores' gradients are linear in dO Vᵀ, so that a walk over some
columns of v, dO and the outputs gives its share of dQ, which all walks of a path add to one float32 sum, and of dK. dV goes from the second
path's walks to the first's in float32: with one lambda near 1 for all the paths' parts of it nearly cancel.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._gluon.hopper import descriptor
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of
from attnzoo_kernels.differential.backward import reduce_like
from attnzoo_kernels.differential.hopper_rows import differential_bwd_parts_rows_kernel
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS, ROWS
from attnzoo_kernels.flash.hopper_pair import flash_bwd_pair_kernel
from attnzoo_kernels.flash.hopper_rows import flash_bwd_dq_rows_kernel, flash_bwd_tails_kernel
from attnzoo_kernels.flash.options import Layout, layout, strides

WIDTH = 128  # of heads, and the widest values of one walk


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    rows: Launch
    walks: tuple[tuple[Launch, ...], ...]  # of each path, for each part of the values
    key_tiles: int
    dq_rows: Launch
    packed: bool
    sequences: int


def _rows_of(x: Layout) -> tuple[int, int, int]:
    return strides((x[0], tuple(math.prod(x[0][n + 1:]) for n in range(len(x[0])))))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, packed: int | None, q: Layout, q2: Layout, k: Layout, k2: Layout | None, v: Layout,
          out: Layout, grad_out: Layout, lam: tuple[int, int, int], softmax_scale: float, left: int, right: int) -> Plan:
    heads, head_dim, kv_heads, value_dim = *q[0][-2:], *v[0][-2:]
    sequences, seqlen_q, seqlen_k = (q[0][0], q[0][1], k[0][1]) if packed is None else (packed, q[0][0], k[0][0])
    group = heads // kv_heads

    def tiles_of(heads: int, seqlen: int, block: int) -> int:
        return heads * (sequences * -(-seqlen // block) if packed is None else seqlen // block + sequences + 1)

    query_tiles, key_tiles = tiles_of(heads, seqlen_q, ROWS.value), tiles_of(kv_heads, seqlen_k, KEYS.value)
    head_tiles = query_tiles // heads if packed is not None else query_tiles // (heads * sequences)
    rows = Launch(
        differential_bwd_parts_rows_kernel, query_tiles,
        (*strides(out), *strides(grad_out), *lam, math.prod(q[0][:-1]), sequences, seqlen_q, heads, query_tiles),
        {"VALUE_DIM": value_dim, "WIDTH": WIDTH, "PARTS": -(-value_dim // WIDTH), "PACKED": packed is not None, "BLOCK": ROWS.value}, 8, 1)
    programs = min(key_tiles, multiprocessors(device))
    head_group = heads_together(sequences * kv_heads, seqlen_q * WIDTH * 8 * group, -(-seqlen_k // KEYS.value), programs, False)
    scalars = (softmax_scale, softmax_scale * math.log2(math.e), left, right, sequences, seqlen_q, seqlen_k, kv_heads)
    widths = [min(WIDTH, value_dim - first) for first in range(0, value_dim, WIDTH)]
    walks = tuple(tuple(Launch(
        flash_bwd_pair_kernel, programs,
        (*scalars, kv_heads * head_dim, kv_heads * width, group, head_group, head_tiles, key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": width, "WIDTH": WIDTH, "PACKED": packed is not None, "HAS_LEFT": left >= 0,
         "HAS_RIGHT": right >= 0, "ORDERED": False, "ROWS": ROWS.value, "STAGES": 2, "WRITER": False, "LATE": False,
         "REGISTERS": 240, "LOAD_REGISTERS": 24}, 4, 1) for width in widths) for _ in range(2))
    dq_rows = Launch(flash_bwd_dq_rows_kernel, query_tiles, (*_rows_of(q), softmax_scale, sequences, seqlen_q, heads),
                     {"HEAD_DIM": head_dim, "WIDTH": WIDTH, "PACKED": packed is not None, "BLOCK": ROWS.value}, 4, 1)
    return Plan(rows, walks, key_tiles, dq_rows, packed is not None, sequences)


@functools.lru_cache(maxsize=1024)
def _tails(x: Layout, sequences: int, block: int) -> Launch:
    return Launch(flash_bwd_tails_kernel, (sequences + 1) * x[0][-2], (*strides(x)[1:], sequences, x[0][0], x[0][-2]),
                  {"DIM": x[0][-1], "WIDTH": WIDTH, "BLOCK": block}, 4, 1)


def _read(plan: Plan, x: Tensor, rows: int, block: int, cu_seqlens: Tensor | None) -> tuple:
    """Descriptors of x and of the ends of its packed sequences, in boxes of `rows`."""
    tails = None
    if plan.packed:
        copies = x.new_empty(plan.sequences + 1, block, x.shape[-2], WIDTH)
        _tails(layout(x), plan.sequences, block)(x, copies, cu_seqlens)
        tails = descriptor(copies, rows, WIDTH)
    return descriptor(x, rows, WIDTH), tails


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool,
                    options: Options) -> tuple[Tensor, ...]:
    """What the plain path's launch_backward gives; grad_out as TMA reads it."""
    plan = _plan(q1.device, q1.dtype, options.sequences, layout(q1), layout(q2), layout(k1),
                 None if k2 is None else layout(k2), layout(v), layout(out), layout(grad_out), lambda_strides(lam, options.packed),
                 options.softmax_scale, options.window_left, options.window_right)
    parts, query_tiles, rows = len(plan.walks[0]), plan.rows.programs, ROWS.value
    row_stats = stats.new_empty(2, parts, query_tiles, 1, 2 * rows)
    dq_sum = stats.new_empty(1, query_tiles * rows * WIDTH // 32, 1, 32)
    counters = torch.empty(2, parts, 4, dtype=torch.int32, device=q1.device)
    r, gradient = torch.empty_like(stats[0]), torch.empty_like(out)
    dv, dv_sums = v.new_empty(v.shape), stats.new_empty(parts, plan.key_tiles * KEYS.value * WIDTH)
    null = stats.new_empty(0)

    def walk(path: int, q: Tensor, k: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """dQ and dK of a path; the second path's dV, which comes first, is a float32 sum that the first path's walk adds to its own."""
        queries, keys = _read(plan, q, rows, rows, cu_seqlens_q), _read(plan, k, HALF.value, KEYS.value, cu_seqlens_k)
        dk = None
        for part, (columns, values, to) in enumerate(zip(*(x.split(WIDTH, -1) for x in (dout, v, dv)), strict=True)):
            dk_part = k.new_empty(k.shape)
            # the ends of packed sequences are not written through TMA, and heads must lie side by side
            copied = plan.packed and path == 0
            dv_part = to.new_empty(to.shape) if copied else to
            read = queries, keys, _read(plan, values, HALF.value, KEYS.value, cu_seqlens_k), _read(plan, columns, rows, rows, cu_seqlens_q)
            tensors, tails = zip(*read, strict=True)
            sums = (null, dv_sums[part]) if path == 1 else (dv_sums[part], null)
            plan.walks[path][part](
                *tensors, descriptor(row_stats[path, part], 1, 2 * rows), *tails, descriptor(dk_part, HALF.value, WIDTH),
                descriptor(dv_part, HALF.value, WIDTH), dk_part, dv_part, descriptor(dq_sum, 128, 32), *sums, counters[path, part],
                counters[path, part], cu_seqlens_q, cu_seqlens_k)
            dk = dk_part if dk is None else dk.add_(dk_part)
            if copied:
                to.copy_(dv_part)
        dq = q.new_empty(q.shape)
        plan.dq_rows(dq_sum, dq, cu_seqlens_q)
        return dq, dk

    with on_device_of(q1):
        plan.rows(out, out2, grad_out, lam, stats, gradient, row_stats, dq_sum, r, counters, cu_seqlens_q)
        dq2, dk2 = walk(1, q2, k1 if k2 is None else k2, gradient)
        del gradient  # before the rest is there
        dq_sum.zero_()
        dq1, dk1 = walk(0, q1, k1, grad_out)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return (dq1, dq2, dk1.add_(dk2), k1.new_empty(0), dv, dlam) if k2 is None else (dq1, dq2, dk1, dk2, dv, dlam)
