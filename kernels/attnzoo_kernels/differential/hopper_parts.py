"""Differential attention's backward on Hopper above head_dim 64, of FlashAttention's walks: one for each path and 128 columns of values.

dK1, dK2 and dV of one tile of keys do not fit the registers together there. Scores' gradients are linear in dO Vᵀ, so that a walk over some
columns of v, dO and the outputs gives its share of dQ and dK; the shares, in 16 bits, are added.
"""

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, on_device_of, strides
from attnzoo_kernels.differential.backward import reduce_like
from attnzoo_kernels.differential.hopper_rows import differential_bwd_paths_kernel
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.flash import hopper_backward
from attnzoo_kernels.flash.options import Options as FlashOptions

COLUMNS = 128  # the widest values of one walk
BLOCK = 16


def _paths(grad_out: Tensor, lam: Tensor, out: Tensor, out2: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The first path's output, the gradient of the second path's, and r (..., heads)."""
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    first, gradient = torch.empty_like(out), torch.empty_like(out)
    r = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
    with on_device_of(out):
        differential_bwd_paths_kernel[(-(-r.numel() // BLOCK),)](
            out, out2, grad_out, lam, first, gradient, r, *strides(grad_out), *lambda_strides(lam, packed), r.numel(), out.shape[-3],
            out.shape[-2], VALUE_DIM=out.shape[-1], BLOCK_DV=block_width(out.shape[-1]), BLOCK=BLOCK)
    return first, gradient, r


def launch_backward(grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor,
                    out2: Tensor, stats: Tensor, needs_dlam: bool, options: Options) -> tuple[Tensor, ...]:
    """What the plain path's launch_backward gives."""
    first, gradient, r = _paths(grad_out, lam, out, out2, options.packed)
    flash = FlashOptions.of(options.cu_seqlens_q, None, options.softmax_scale, options.window_left, options.window_right, 0.0, 0.0)
    paths = (q1, k1, first, grad_out, stats[:2]), (q2, k1 if k2 is None else k2, out2, gradient, stats[2:])
    shares = []
    for q, k, result, dout, its_stats in paths:
        columns = zip(*(x.split(COLUMNS, -1) for x in (dout, v, result)), strict=True)
        dq, dk, dv, _ = zip(*(hopper_backward.launch_backward(part, None, q, k, values, of_path, its_stats, *options.tensors, None, None,
                                                              False, flash, False) for part, values, of_path in columns), strict=True)
        shares.append((sum(dq[1:], dq[0]), sum(dk[1:], dk[0]), dv))
    (dq1, dk1, dv1), (dq2, dk2, dv2) = shares
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for to, one, two in zip(dv.split(COLUMNS, -1), dv1, dv2, strict=True):
        torch.add(one, two, out=to)
    dlam = reduce_like(-r.transpose(-1, -2), lam, options.packed) if needs_dlam else lam.new_empty(0)
    return (dq1, dq2, dk1 + dk2, k1.new_empty(0), dv, dlam) if k2 is None else (dq1, dq2, dk1, dk2, dv, dlam)
