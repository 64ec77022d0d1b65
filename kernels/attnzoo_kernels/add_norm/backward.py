"""add_norm's backward: a program goes over some rows and keeps their sums for the gradients of weight and bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.column_sums import column_sums
from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of
from attnzoo_kernels.add_norm import tiles


@triton.jit
def _add_both(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit(do_not_specialize=["rows", "steps"])
def add_norm_bwd_kernel(high_ptr, dnormed_ptr, dstream_ptr, weight_ptr, means_ptr, scales_ptr, dx_ptr, dweights_ptr, dbiases_ptr,
                        dbranch_biases_ptr, rows, steps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr, STAGES: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    # [BLOCK]
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    dbranch_bias = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(part * steps, tl.minimum((part + 1) * steps, rows), num_stages=STAGES):
        at = row * WIDTH + columns
        x = tl.load(high_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dnormed = tl.load(dnormed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales_ptr + row)
        if not RMS:
            x = tl.where(inside, x - tl.load(means_ptr + row), 0.0)
        x *= scale
        dweight += dnormed * x
        if dbiases_ptr is not None:
            dbias += dnormed
        dnormed *= weight
        if RMS:
            dx = dnormed - x * (tl.sum(x * dnormed, 0) / WIDTH)
        else:
            along, mean = tl.reduce((x * dnormed, dnormed), 0, _add_both)  # one exchange between the warps
            dx = dnormed - x * (along / WIDTH) - mean / WIDTH
        dx *= scale
        if dstream_ptr is not None:
            dx += tl.load(dstream_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if dbranch_biases_ptr is not None:
            dbranch_bias += dx
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweights_ptr + part * WIDTH + columns, dweight, mask=inside)
    if dbiases_ptr is not None:
        tl.store(dbiases_ptr + part * WIDTH + columns, dbias, mask=inside)
    if dbranch_biases_ptr is not None:
        tl.store(dbranch_biases_ptr + part * WIDTH + columns, dbranch_bias, mask=inside)


def launch_backward(high: Tensor, dnormed: Tensor, dstream: Tensor | None, weight: Tensor, means: Tensor, scales: Tensor, bias: bool,
                    branch_bias: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the sum, bfloat16, and in weight's dtype those of weight, bias and the branch's bias as far as they exist, one a row.
    RMSNorm has no means."""
    dnormed, weight = dnormed.contiguous(), weight.contiguous()
    dstream = None if dstream is None else dstream.contiguous()
    dx, width, rows = torch.empty_like(high), high.shape[-1], scales.shape[0]
    if rows == 0:
        return dx, weight.new_zeros(1 + bias + branch_bias, width)
    block, chosen = next_power_of_2(width), tiles.TILES
    steps = triton.cdiv(rows, chosen.programs)
    parts = triton.cdiv(rows, steps)
    sums = torch.empty(1 + bias + branch_bias, parts, width, dtype=torch.float32, device=high.device)
    with on_device_of(high):
        add_norm_bwd_kernel[(parts,)](
            high, dnormed, dstream, weight, means, scales, dx, sums[0], sums[1] if bias else None, sums[-1] if branch_bias else None, rows,
            steps, WIDTH=width, BLOCK=block, RMS=means.numel() == 0, STAGES=chosen.stages,
            num_warps=tiles.warps(chosen.backward_warps, block))
    return dx, column_sums(sums, weight.dtype)
