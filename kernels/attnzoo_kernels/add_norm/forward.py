"""add_norm's forward: each program computes one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of
from attnzoo_kernels.add_norm import tiles


@triton.jit
def add_norm_fwd_kernel(high_ptr, low_ptr, branch_ptr, branch_bias_ptr, weight_ptr, bias_ptr, new_high_ptr, new_low_ptr, normed_ptr,
                        means_ptr, scales_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr):
    """The halves of the stream are int16, except that high_ptr without low_ptr is float32 or bfloat16."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    # [BLOCK]
    x = tl.load(high_ptr + at, mask=inside, other=0)
    if low_ptr is not None:
        bits = (x.to(tl.int32) << 16) + tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32)
        x = bits.to(tl.float32, bitcast=True)
    x = x.to(tl.float32)
    if branch_ptr is not None:
        x += tl.load(branch_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if branch_bias_ptr is not None:
        x += tl.load(branch_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.int16)
    tl.store(new_high_ptr + at, high, mask=inside)
    if new_low_ptr is not None:
        tl.store(new_low_ptr + at, (bits - (high.to(tl.int32) << 16)).to(tl.int16), mask=inside)
    if not RMS:
        mean = tl.sum(x, 0) / WIDTH
        x = tl.where(inside, x - mean, 0.0)
        tl.store(means_ptr + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(scales_ptr + row, scale)
    normed = x * scale * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def launch_forward(high: Tensor, low: Tensor | None, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor,
                   bias: Tensor | None, eps: float, rms: bool, last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """high, low and the norm, and, for each row, its mean and the factor of its centred values, both float32. Results that do not exist
    (means of RMSNorm, low under `last`) are empty."""
    high, low, branch, branch_bias, weight, bias = (
        x if x is None else x.contiguous() for x in (high, low, branch, branch_bias, weight, bias))
    width = high.shape[-1]
    rows = high.numel() // width if width else 0
    new_high, normed = (torch.empty(high.shape, dtype=torch.bfloat16, device=high.device) for _ in range(2))
    new_low = torch.empty(0 if last else high.shape, dtype=torch.int16, device=high.device)
    means, scales = (torch.empty(n, dtype=torch.float32, device=high.device) for n in (0 if rms else rows, rows))
    if rows:
        block = next_power_of_2(width)
        with on_device_of(high):
            add_norm_fwd_kernel[(rows,)](
                high if low is None else high.view(torch.int16), low, branch, branch_bias, weight, bias, new_high.view(torch.int16),
                None if last else new_low, normed, means, scales, eps, WIDTH=width, BLOCK=block, RMS=rms,
                num_warps=tiles.warps(tiles.TILES.forward_warps, block))
    return new_high, new_low, normed, means, scales
