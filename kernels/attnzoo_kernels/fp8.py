"""Products of 8-bit floats for training (Micikevicius et al. 2022, arXiv:2209.05433): factors are rounded to e4m3, gradients to e5m2.

Each tensor has one scale, which its largest element sets when it is used: nothing is kept from step to step, and no host waits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import autograd

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of all sizes of a product
SMALLEST = 2.0**-64  # a tensor whose elements are all smaller is rounded as if this were its largest one, so that the scale is a number


def why_not(device: torch.device) -> str | None:
    """Why a device has no such products; None where it has."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU of compute capability 8.9 or later, got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"needs an NVIDIA GPU of compute capability 8.9 or later, {name} has {capability[0]}.{capability[1]}"
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear by products of 8-bit floats, forward and backward, with sums in float32.

    x: (..., in_features), weight: (out_features, in_features), bias: (out_features,), of float32 or 16 bits; both sizes multiples of 16.

    Returns (..., out_features) in autocast's dtype, or in x's without autocast. The derivative can be taken once. An infinity or NaN in x
    or weight makes all of the result NaN, and one in the result's gradient makes all gradients NaN.

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
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if missing := -rows % MULTIPLE:  # the product for the weight's gradient is a sum over rows
        flat = F.pad(flat, (0, 0, 0, missing))
    out = _Product.apply(flat, weight, dtype)[:rows].view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the float32 unit () in which it is counted: x is nearly the one times the other."""
    # row by row first: this maximum then belongs to the kernel of a norm before it
    unit = x.abs().amax(-1).amax().float().clamp(min=SMALLEST) / torch.finfo(dtype).max
    return (x.float() / unit).to(dtype), unit


class _Product(torch.autograd.Function):
    """x weightᵀ of matrices, for torch.compile in operations that it fuses. A product reads both its factors along what it sums over."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x8, x_unit = rounded(x.contiguous(), FORWARD)
        w8, w_unit = rounded(weight.contiguous(), FORWARD)
        ctx.save_for_backward(x8, x_unit, w8, w_unit)
        ctx.dtypes = x.dtype, weight.dtype
        return torch._scaled_mm(x8, w8.t(), x_unit, w_unit, out_dtype=dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if not autograd.compiling():
            autograd.refuse_second_derivative("precision=fp8")
        x8, x_unit, w8, w_unit = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        g8, g_unit = rounded(grad.contiguous(), BACKWARD)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch._scaled_mm(g8, _by_columns(w8), g_unit, w_unit, out_dtype=grad.dtype).to(x_dtype)
        if ctx.needs_input_grad[1]:
            dw = torch._scaled_mm(g8.t().contiguous(), _by_columns(x8), g_unit, x_unit, out_dtype=w_dtype)
        return dx, dw, None


def _by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()
