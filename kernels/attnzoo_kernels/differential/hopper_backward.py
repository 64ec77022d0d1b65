"""Differential attention's backward on Hopper: a launch for row statistics, one mainloop for all gradients, and a launch that converts dQ1
and dQ2.

All key tiles add to float32 buffers of dQ1 and dQ2 in any order, so their rounding differs from run to run.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._gluon import backward_plan
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, ROWS
from attnzoo_kernels._gluon.bwd_postprocess import bwd_postprocess_kernel
from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Layout, layout, strides
from attnzoo_kernels._triton.launch import Launch, block_width, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.differential import hopper_backward_by_branch
from attnzoo_kernels.differential.backward import reduce_like
from attnzoo_kernels.differential.hopper_backward_kernel import differential_bwd_hopper_kernel
from attnzoo_kernels.differential.hopper_backward_shared_kernel import differential_bwd_shared_kernel
from attnzoo_kernels.differential.hopper_bwd_preprocess import differential_bwd_preprocess_kernel
from attnzoo_kernels.differential.hopper_loads import STATS
from attnzoo_kernels.differential.options import Options, lambda_strides


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
    joint: bool  # a product computes both branches, because they share their keys
    preprocess: Launch
    tails: tuple[Launch, ...]  # of q1, q2, dO, k1, k2 (where there is one) and v; none for dense input
    mainloop: Launch
    postprocess: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, q1: Layout, q2: Layout, k1: Layout, k2: Layout | None, v: Layout, out: Layout,
          grad_out: Layout, lam: tuple[int, int, int], options: Options) -> Plan:
    heads, head_dim, kv_heads, value_dim = *q1[0][-2:], *v[0][-2:]
    sequences, seqlen_q, seqlen_k = options.sizes(q1[0], k1[0])
    left, right, packed = options.window_left, options.window_right, options.packed
    block_d, block_dv, group = max(64, block_width(head_dim)), max(64, block_width(value_dim)), heads // kv_heads
    query_tiles = options.programs(heads, seqlen_q, sequences, ROWS.value)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    joint = k2 is None and block_dv == 64  # with wider values, shared memory is too small for that mainloop
    preprocess = Launch(
        differential_bwd_preprocess_kernel, query_tiles,
        (*strides(out), *strides(grad_out), *lam, math.prod(q1[0][:-1]), sequences, seqlen_q, heads),
        {"VALUE_DIM": value_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "PACKED": packed, "STATS": STATS.value,
         "BLOCK": ROWS.value, "DQ_TILE": (2 if joint else 1) * ROWS.value * block_d}, 4, 1)
    tails = ()
    if packed:
        keys = (k1,) if k2 is None else (k1, k2)
        tails = tuple(backward_plan.tails(x, sequences, block, width)
                      for x, width, block in ((q1, block_d, ROWS.value), (q2, block_d, ROWS.value), (grad_out, block_dv, ROWS.value),
                                              *((x, block_d, KEYS.value) for x in keys), (v, block_dv, KEYS.value)))
    programs = min(key_tiles, multiprocessors(device))
    head_bytes = seqlen_q * (12 * block_d + 2 * block_dv) * group
    head_group = heads_together(sequences * kv_heads, head_bytes, -(-seqlen_k // KEYS.value), programs, False)
    mainloop = Launch(
        differential_bwd_shared_kernel if joint else differential_bwd_hopper_kernel, programs,
        (options.softmax_scale, options.softmax_scale * math.log2(math.e), left, right, sequences, seqlen_q, seqlen_k, kv_heads, group,
         head_group, head_tiles, key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
         "PACKED": packed, "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "STAGES": 2, "REGISTERS": 240}, 4, 1)
    contiguous = tuple(math.prod(q1[0][n + 1:]) for n in range(len(q1[0])))
    postprocess = Launch(
        bwd_postprocess_kernel, query_tiles, (*strides((q1[0], contiguous)), options.softmax_scale, sequences, seqlen_q, heads),
        {"HEAD_DIM": head_dim, "WIDTH": block_d, "PACKED": packed, "BLOCK": ROWS.value, "ORDERED": False,
         "SPACING": 2 if joint else 1}, 4, 1)
    return Plan(block_d, block_dv, joint, preprocess, tails, mainloop, postprocess)


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool,
                    options: Options) -> tuple[Tensor, ...]:
    """What the plain path's launch_backward gives, for calls that backward_reason accepts."""
    grad_out = tma_gradient(grad_out)
    if q1.shape[-1] > 64:
        return hopper_backward_by_branch.launch_backward(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k,
                                                         needs_dlam, options)
    dq1, dq2, dk1, dv = (x.new_empty(x.shape) for x in (q1, q2, k1, v))
    dk2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    plan = _plan(q1.device, q1.dtype, layout(q1), layout(q2), layout(k1), None if k2 is None else layout(k2), layout(v), layout(out),
                 layout(grad_out), lambda_strides(lam, options.packed), options)
    query_tiles, width, value_width = plan.preprocess.programs, plan.block_d, plan.block_dv
    row_stats = stats.new_empty(2 * query_tiles, 1, STATS.value)
    tile = ROWS.value * width
    if plan.joint:  # a tile of the first branch, and one of the second
        dq_sums = stats.new_empty(1, 2 * query_tiles * tile // 32, 1, 32)
        of_branch = dq_sums, dq_sums.view(-1)[tile:]
    else:
        of_branch = stats.new_empty(query_tiles * tile), stats.new_empty(query_tiles * tile)
    counter = torch.empty(1, dtype=torch.int32, device=q1.device)
    r = torch.empty_like(stats[0])
    # keys that the branches share are read once
    keys, grads = ((k1,), (dk1, dv)) if k2 is None else ((k1, k2), (dk1, dk2, dv))
    tensors = (q1, q2, grad_out, *keys, v)
    boxes = (*((ROWS.value, width),) * 2, (ROWS.value, value_width), *((HALF.value, width),) * len(keys), (HALF.value, value_width))
    with on_device_of(q1):
        plan.preprocess(out, out2, grad_out, lam, stats, row_stats, *of_branch, r, counter, cu_seqlens_q)
        read, ends = [descriptor(x, *box) for x, box in zip(tensors, boxes, strict=True)], [None] * len(tensors)
        if plan.tails:
            bounds = (cu_seqlens_q,) * 3 + (cu_seqlens_k,) * (len(keys) + 1)
            ends = [descriptor(backward_plan.copy_tails(*of_tail), *box)
                    for *of_tail, box in zip(plan.tails, tensors, bounds, boxes, strict=True)]
        written, sums = [descriptor(x, HALF.value, 64) for x in grads], of_branch
        if plan.joint:
            sums = (descriptor(dq_sums, 128, 32),)
        elif k2 is None:  # the kernel takes two of them
            for tensors_of in (read, ends):
                tensors_of.insert(4, None)
            written.insert(1, None)
            grads = (dk1, None, dv)
        plan.mainloop(*read, descriptor(row_stats, 1, STATS.value), *ends, *written, *grads, *sums, counter, cu_seqlens_q, cu_seqlens_k)
        for dq_sum, dq in zip(of_branch, (dq1, dq2), strict=True):
            plan.postprocess(dq_sum, counter, dq, cu_seqlens_q)
    dlam = reduce_like(-r, lam, options.packed) if needs_dlam else lam.new_empty(0)
    return dq1, dq2, dk1, dk2, dv, dlam
