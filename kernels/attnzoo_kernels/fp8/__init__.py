"""Products of 8-bit floats for training (Micikevicius et al. 2022, arXiv:2209.05433): factors are rounded to e4m3, gradients to e5m2.

Each tensor has one scale, which is computed from its largest element in each use. So no state is kept from step to step, and the host does
not wait.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import autograd
from attnzoo_kernels.fp8 import ops
from attnzoo_kernels.fp8.ops import MULTIPLE, SMALLEST, rounded

__all__ = ["BACKWARD", "FORWARD", "MULTIPLE", "SMALLEST", "linear", "rounded", "rounded_both_ways", "why_not"]

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def why_not(device: torch.device) -> str | None:
    """Why a device does not support these products; None if it does."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU of compute capability 8.9 or later, got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"needs an NVIDIA GPU of compute capability 8.9 or later, {name} has {capability[0]}.{capability[1]}"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear by products of 8-bit floats, forward and backward, with sums in float32.

    x: (..., in_features), weight: (out_features, in_features), bias: (out_features,), of float32 or 16 bits. in_features and out_features
    are multiples of 16.

    Returns (..., out_features) in autocast's dtype, to which x is rounded first, or in x's without autocast. The derivative can be taken
    once. An infinity or NaN in x or weight makes all of the result NaN, and one in the result's gradient makes all gradients NaN.

    Raises TypeError or ValueError naming the argument, what it was and what it must be.
    """
    for name, value in (("x", x), ("weight", weight)):
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name}: must be float32, bfloat16 or float16, got {value.dtype}")
    if any(size % MULTIPLE for size in weight.shape):
        raise ValueError(f"weight: both sizes must be multiples of {MULTIPLE}, got shape {tuple(weight.shape)}")
    if x.numel() == 0:  # no largest element
        return F.linear(x, weight, bias)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    with torch.autocast(device, enabled=False):  # PyTorch may use another product on a CPU, which autocast would round
        out = _Product.apply(flat, weight).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(dtype)


def rounded_both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x (rows, columns) in 8 bits, its transpose in 8 bits, their unit). The transpose's rows are padded with zeros to a multiple of
    16."""
    return ops.round_both_ways(x.contiguous(), dtype)


class _Product(torch.autograd.Function):
    """x weightᵀ of two matrices, in x's dtype. The product of 8-bit floats needs both factors contiguous along the summed dimension."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_by_columns, x_unit = rounded_both_ways(x, FORWARD)
        w8, w_by_columns, w_unit = rounded_both_ways(weight, FORWARD)
        ctx.save_for_backward(x_by_columns, x_unit, w_by_columns, w_unit)
        ctx.weight_dtype = weight.dtype
        return torch._scaled_mm(x8, w8.t(), x_unit, w_unit, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not autograd.compiling():
            autograd.refuse_second_derivative("precision=fp8")
        x_by_columns, x_unit, w_by_columns, w_unit = ctx.saved_tensors
        g8, g_by_columns, g_unit = rounded_both_ways(grad, BACKWARD)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch._scaled_mm(g8, w_by_columns.t(), g_unit, w_unit, out_dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch._scaled_mm(g_by_columns, x_by_columns.t(), g_unit, x_unit, out_dtype=ctx.weight_dtype)
        return dx, dw
