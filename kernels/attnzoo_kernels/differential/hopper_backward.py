"""Differential attention's backward on Hopper: row statistics, one walk for all gradients, and dQ1 and dQ2 written out from the float32
buffers that all key tiles add to, in no order: their sums differ from run to run by their rounding."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.launch import Launch, block_width, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.differential import hopper_parts
from attnzoo_kernels.differential.backward import reduce_like
from attnzoo_kernels.differential.hopper_gradients import differential_bwd_hopper_kernel
from attnzoo_kernels.differential.hopper_loads import STATS
from attnzoo_kernels.differential.hopper_rows import differential_bwd_dq_rows_kernel, differential_bwd_rows_kernel
from attnzoo_kernels.differential.hopper_shared import differential_bwd_shared_kernel
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS, ROWS
from attnzoo_kernels.flash.hopper_rows import flash_bwd_dq_rows_kernel, flash_bwd_tails_kernel
from attnzoo_kernels.flash.options import Layout, layout, strides


def backward_reason(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    head_dim, value_dim = q1.shape[-1], v.shape[-1]
    if not (32 < head_dim <= 128 and 32 < value_dim <= (128 if head_dim <= 64 else 256)):
        return f"head_dim must be 33 to 128 and value_dim 33 to 128, above head_dim 64 to 256, got {head_dim} and {value_dim}"
    if deterministic:
        return "it adds to dQ in no fixed order"
    return why_not_tma(q1, q2, k1, k1 if k2 is None else k2, v)


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    block_d: int
    block_dv: int
    shared: bool  # the walk is that of shared keys
    rows: Launch
    tails: tuple[Launch, ...]  # of q1, q2, dO, k1, k2 (not where `shared`) and v; none for dense input
    walk: Launch
    dq_rows: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, packed: int | None, q1: Layout, q2: Layout, k1: Layout, k2: Layout | None, v: Layout,
          out: Layout, grad_out: Layout, lam: tuple[int, int, int], softmax_scale: float, left: int, right: int) -> Plan:
    heads, head_dim, kv_heads, value_dim = *q1[0][-2:], *v[0][-2:]
    sequences, seqlen_q, seqlen_k = (q1[0][0], q1[0][1], k1[0][1]) if packed is None else (packed, q1[0][0], k1[0][0])
    block_d, block_dv, group = max(64, block_width(head_dim)), max(64, block_width(value_dim)), heads // kv_heads

    def tiles_of(heads: int, seqlen: int, block: int) -> int:
        return heads * (sequences * -(-seqlen // block) if packed is None else seqlen // block + sequences + 1)

    query_tiles, key_tiles = tiles_of(heads, seqlen_q, ROWS.value), tiles_of(kv_heads, seqlen_k, KEYS.value)
    head_tiles = query_tiles // heads if packed is not None else query_tiles // (heads * sequences)
    shared = k2 is None and block_dv == 64  # wider values leave no shared memory for that walk
    rows = Launch(
        differential_bwd_rows_kernel, query_tiles,
        (*strides(out), *strides(grad_out), *lam, math.prod(q1[0][:-1]), sequences, seqlen_q, heads),
        {"VALUE_DIM": value_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "PACKED": packed is not None, "STATS": STATS.value,
         "BLOCK": ROWS.value, "DQ_TILE": (2 if shared else 1) * ROWS.value * block_d}, 4, 1)
    tails = ()
    if packed is not None:
        keys = (k1,) if shared else (k1, k2 or k1)
        tails = tuple(Launch(flash_bwd_tails_kernel, (sequences + 1) * x[0][-2], (*strides(x)[1:], sequences, x[0][0], x[0][-2]),
                             {"DIM": x[0][-1], "WIDTH": width, "BLOCK": block}, 4, 1)
                      for x, width, block in ((q1, block_d, ROWS.value), (q2, block_d, ROWS.value), (grad_out, block_dv, ROWS.value),
                                              *((x, block_d, KEYS.value) for x in keys), (v, block_dv, KEYS.value)))
    programs = min(key_tiles, multiprocessors(device))
    head_bytes = seqlen_q * (12 * block_d + 2 * block_dv) * group
    head_group = heads_together(sequences * kv_heads, head_bytes, -(-seqlen_k // KEYS.value), programs, False)
    of_walk = {} if shared else {"SHARED_K": k2 is None}
    walk = Launch(
        differential_bwd_shared_kernel if shared else differential_bwd_hopper_kernel, programs,
        (softmax_scale, softmax_scale * math.log2(math.e), left, right, sequences, seqlen_q, seqlen_k, kv_heads, group, head_group,
         head_tiles, key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv, **of_walk,
         "PACKED": packed is not None, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "STAGES": 2, "REGISTERS": 240}, 4, 1)
    contiguous = tuple(math.prod(q1[0][n + 1:]) for n in range(len(q1[0])))
    scalars = (*strides((q1[0], contiguous)), softmax_scale, sequences, seqlen_q, heads)
    if shared:
        dq_rows = Launch(differential_bwd_dq_rows_kernel, query_tiles, scalars,
                         {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "PACKED": packed is not None, "BLOCK": ROWS.value}, 4, 1)
    else:
        dq_rows = Launch(flash_bwd_dq_rows_kernel, query_tiles, scalars,
                         {"HEAD_DIM": head_dim, "WIDTH": block_d, "PACKED": packed is not None, "BLOCK": ROWS.value}, 4, 1)
    return Plan(block_d, block_dv, shared, rows, tails, walk, dq_rows)


def _tails(plan: Plan, tensors: tuple[Tensor, ...], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Tensor]:
    """The ends of packed sequences, (sequences + 1, block, heads, width)."""
    copies = []
    for n, (launch, x) in enumerate(zip(plan.tails, tensors, strict=True)):
        bounds = cu_seqlens_q if n < 3 else cu_seqlens_k
        copies.append(x.new_empty(bounds.shape[0], launch.constants["BLOCK"], x.shape[-2], launch.constants["WIDTH"]))
        launch(x, copies[-1], bounds)
    return copies


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool,
                    options: Options) -> tuple[Tensor, ...]:
    """What the plain path's launch_backward gives, for what backward_reason lets through."""
    grad_out = tma_gradient(grad_out)
    if q1.shape[-1] > 64:
        return hopper_parts.launch_backward(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam,
                                            options)
    dq1, dq2, dk1, dv = (x.new_empty(x.shape) for x in (q1, q2, k1, v))
    dk2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    plan = _plan(q1.device, q1.dtype, options.sequences, layout(q1), layout(q2), layout(k1),
                 None if k2 is None else layout(k2), layout(v), layout(out), layout(grad_out), lambda_strides(lam, options.packed),
                 options.softmax_scale, options.window_left, options.window_right)
    query_tiles, width, value_width = plan.rows.programs, plan.block_d, plan.block_dv
    row_stats = stats.new_empty(2 * query_tiles, 1, STATS.value)
    tile = ROWS.value * width
    if plan.shared:  # a tile of the first path, and one of the second
        dq_sums = stats.new_empty(1, 2 * query_tiles * tile // 32, 1, 32)
        of_path = dq_sums, dq_sums.view(-1)[tile:]
    else:
        of_path = stats.new_empty(query_tiles * tile), stats.new_empty(query_tiles * tile)
    counter = torch.empty(1, dtype=torch.int32, device=q1.device)
    r = torch.empty_like(stats[0])
    # where one kernel reads the keys for both paths, it takes them once
    keys, outs = ((k1,), (dk1, dv)) if plan.shared else ((k1, k1 if k2 is None else k2), (dk1, dk1 if k2 is None else dk2, dv))
    tensors = (q1, q2, grad_out, *keys, v)
    boxes = (*((ROWS.value, width),) * 2, (ROWS.value, value_width), *((HALF.value, width),) * len(keys), (HALF.value, value_width))
    with on_device_of(q1):
        plan.rows(out, out2, grad_out, lam, stats, row_stats, *of_path, r, counter, cu_seqlens_q)
        tails = (None,) * len(tensors)
        if plan.tails:
            tails = [descriptor(x, *box) for x, box in zip(_tails(plan, tensors, cu_seqlens_q, cu_seqlens_k), boxes, strict=True)]
        sums = (descriptor(dq_sums, 128, 32),) if plan.shared else of_path
        plan.walk(*(descriptor(x, *box) for x, box in zip(tensors, boxes, strict=True)), descriptor(row_stats, 1, STATS.value), *tails,
                  *(descriptor(x, HALF.value, 64) for x in outs), *outs, *sums, counter, cu_seqlens_q, cu_seqlens_k)
        if plan.shared:
            plan.dq_rows(dq_sums, dq1, dq2, cu_seqlens_q)
        else:
            for dq_sum, dq in zip(of_path, (dq1, dq2), strict=True):
                plan.dq_rows(dq_sum, dq, cu_seqlens_q)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return dq1, dq2, dk1, dk2, dv, dlam
