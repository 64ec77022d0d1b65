"""Differential attention's backward on Hopper above head_dim 64: the mainloop of a softmax, for each branch and each 128 columns of the
values.

There, dK1, dK2 and dV of one tile of keys do not fit into registers together. Gradients of scores are linear in dO Vᵀ. So a launch takes
some columns of v, dO and the outputs only, and gives the share of these columns in dK and in dQ. dQ is added to the branch's float32 sum.
The second branch's dV is passed on to the first branch's launches in float32, because with lambda near 1 the branches' shares of dV nearly
cancel.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._gluon.backward_kernel import pair_bwd_kernel
from attnzoo_kernels._gluon.backward_plan import OWN_NUMBERS, OWN_TENSORS, Tile, copy_tails, tails
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, ROWS
from attnzoo_kernels._gluon.bwd_postprocess import bwd_postprocess_kernel
from attnzoo_kernels._gluon.hopper import descriptor
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Layout, filled, layout, strides
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of
from attnzoo_kernels.differential.backward import reduce_like
from attnzoo_kernels.differential.hopper_bwd_preprocess import differential_bwd_preprocess_by_branch_kernel
from attnzoo_kernels.differential.options import Options, lambda_strides

WIDTH = 128  # width of heads, and largest width of values in one launch


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    preprocess: Launch
    mainloops: tuple[tuple[Launch, ...], ...]  # by branch, and by 128 columns of the values
    key_tiles: int
    postprocess: Launch


def _rows_of(x: Layout) -> tuple[int, int, int]:
    return strides((x[0], tuple(math.prod(x[0][n + 1:]) for n in range(len(x[0])))))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, q: Layout, q2: Layout, k: Layout, k2: Layout | None, v: Layout, out: Layout,
          grad_out: Layout, lam: tuple[int, int, int], options: Options) -> Plan:
    heads, head_dim, kv_heads, value_dim = *q[0][-2:], *v[0][-2:]
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    left, right, packed, group = options.window_left, options.window_right, options.packed, heads // kv_heads
    query_tiles = options.programs(heads, seqlen_q, sequences, ROWS.value)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    of_rows = {"WIDTH": WIDTH, "PACKED": packed, "BLOCK": ROWS.value}
    preprocess = Launch(
        differential_bwd_preprocess_by_branch_kernel, query_tiles,
        (*strides(out), *strides(grad_out), *lam, math.prod(q[0][:-1]), sequences, seqlen_q, heads, query_tiles),
        of_rows | {"VALUE_DIM": value_dim, "VALUE_TILES": -(-value_dim // WIDTH)}, 8, 1)
    programs = min(key_tiles, multiprocessors(device))
    head_group = heads_together(sequences * kv_heads, seqlen_q * WIDTH * 8 * group, -(-seqlen_k // KEYS.value), programs, False)
    scalars = (*filled((), OWN_NUMBERS), options.softmax_scale, options.softmax_scale * math.log2(math.e), left, right, sequences, seqlen_q,
               seqlen_k, kv_heads)
    widths = [min(WIDTH, value_dim - first) for first in range(0, value_dim, WIDTH)]
    mainloops = tuple(tuple(Launch(
        pair_bwd_kernel, programs,
        (*scalars, kv_heads * head_dim, kv_heads * width, group, head_group, head_tiles, key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": width, "WIDTH": WIDTH, "PACKED": packed, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0,
         "ORDERED": False, **Tile(ROWS.value).constants()}, 4, 1) for width in widths) for _ in range(2))
    postprocess = Launch(bwd_postprocess_kernel, query_tiles, (*_rows_of(q), options.softmax_scale, sequences, seqlen_q, heads),
                         of_rows | {"HEAD_DIM": head_dim, "ORDERED": False, "SPACING": 1}, 4, 1)
    return Plan(preprocess, mainloops, key_tiles, postprocess)


_tails = functools.lru_cache(maxsize=1024)(tails)


def _read(x: Tensor, rows: int, block: int, sequences: int | None, cu_seqlens: Tensor | None) -> tuple:
    """Descriptors of x and of its tails (None if it is not packed), in boxes of `rows`."""
    ends = None
    if sequences is not None:
        ends = descriptor(copy_tails(_tails(layout(x), sequences, block, WIDTH), x, cu_seqlens), rows, WIDTH)
    return descriptor(x, rows, WIDTH), ends


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool,
                    options: Options) -> tuple[Tensor, ...]:
    """What the plain path's launch_backward gives; grad_out as TMA reads it."""
    plan = _plan(q1.device, q1.dtype, layout(q1), layout(q2), layout(k1), None if k2 is None else layout(k2), layout(v), layout(out),
                 layout(grad_out), lambda_strides(lam, options.packed), options)
    n_values, query_tiles, rows, sequences = len(plan.mainloops[0]), plan.preprocess.programs, ROWS.value, options.sequences
    row_stats = stats.new_empty(2, n_values, query_tiles, 1, 2 * rows)
    dq_sum = stats.new_empty(1, query_tiles * rows * WIDTH // 32, 1, 32)
    counters = torch.empty(2, n_values, 4, dtype=torch.int32, device=q1.device)
    r, gradient = torch.empty_like(stats[0]), torch.empty_like(out)
    dv, dv_sums = v.new_empty(v.shape), stats.new_empty(n_values, plan.key_tiles * KEYS.value * WIDTH)
    null = stats.new_empty(0)

    def of_branch(branch: int, q: Tensor, k: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """dQ and dK of a branch. The second branch comes first: it leaves its dV as a float32 sum, which the first branch's launches add to
        their own."""
        queries, keys = _read(q, rows, rows, sequences, cu_seqlens_q), _read(k, HALF.value, KEYS.value, sequences, cu_seqlens_k)
        dk = None
        for n, (columns, values, to) in enumerate(zip(*(x.split(WIDTH, -1) for x in (dout, v, dv)), strict=True)):
            added = k.new_empty(k.shape)
            # the ends of packed sequences are not written through TMA, and heads must lie side by side
            copied = options.packed and branch == 0
            dv_n = to.new_empty(to.shape) if copied else to
            read, ends = zip(queries, keys, _read(values, HALF.value, KEYS.value, sequences, cu_seqlens_k),
                             _read(columns, rows, rows, sequences, cu_seqlens_q), strict=True)
            sums = (null, dv_sums[n]) if branch == 1 else (dv_sums[n], null)
            plan.mainloops[branch][n](
                *filled((), OWN_TENSORS), *read, descriptor(row_stats[branch, n], 1, 2 * rows), *ends, descriptor(added, HALF.value, WIDTH),
                descriptor(dv_n, HALF.value, WIDTH), added, dv_n, descriptor(dq_sum, 128, 32), *sums, counters[branch, n],
                counters[branch, n], cu_seqlens_q, cu_seqlens_k)
            dk = added if dk is None else dk.add_(added)
            if copied:
                to.copy_(dv_n)
        dq = q.new_empty(q.shape)
        plan.postprocess(dq_sum, counters, dq, cu_seqlens_q)
        return dq, dk

    with on_device_of(q1):
        plan.preprocess(out, out2, grad_out, lam, stats, gradient, row_stats, dq_sum, r, counters, cu_seqlens_q)
        dq2, dk2 = of_branch(1, q2, k1 if k2 is None else k2, gradient)
        del gradient  # before the other gradients are allocated
        dq_sum.zero_()
        dq1, dk1 = of_branch(0, q1, k1, grad_out)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return (dq1, dq2, dk1.add_(dk2), k1.new_empty(0), dv, dlam) if k2 is None else (dq1, dq2, dk1, dk2, dv, dlam)
