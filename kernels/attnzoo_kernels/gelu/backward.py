"""bias_gelu's backward: each program goes over some rows of its columns and keeps the sum of their gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.column_sums import column_sums
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.tiles import columns_of_program
from attnzoo_kernels.gelu.forward import load_bias, load_sum, normal_cdf, tanh_cdf
from attnzoo_kernels.gelu.tiles import backward_steps, backward_tile, by_erf


@triton.jit(do_not_specialize=["rows", "steps"])
def bias_gelu_bwd_kernel(x_ptr, bias_ptr, dout_ptr, dx_ptr, sums_ptr, rows, steps, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                         BLOCK_COLUMNS: tl.constexpr, ERF: tl.constexpr, TANH: tl.constexpr):
    part, column = columns_of_program(WIDTH, BLOCK_COLUMNS)
    bias, dbias = load_bias(bias_ptr, column, WIDTH), tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for step in range(steps):
        row = (part * steps + step) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        z, at, inside = load_sum(x_ptr, bias, row, column, rows, WIDTH, BLOCK_COLUMNS)
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if TANH:
            cdf, slope = tanh_cdf(z)
            dx = dout * (cdf + z * slope)
        else:
            cdf, density = normal_cdf(z, ERF)
            dx = dout * (cdf + z * density * 0.3989422804014327)
        dbias += dx
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + part.to(tl.int64) * WIDTH + column, tl.sum(dbias, 0), mask=column < WIDTH)


def launch_backward(x: Tensor, bias: Tensor | None, dout: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """dx, and the gradient of the bias, which is empty without a bias."""
    dx, dout = torch.empty_like(x), dout.contiguous()
    width = x.shape[-1]
    if x.numel() == 0:
        return dx, x.new_empty(0) if bias is None else torch.zeros_like(bias)
    tile, rows = backward_tile(width), x.numel() // width
    steps = backward_steps(rows, width, tile)
    parts = triton.cdiv(rows, tile.rows * steps)
    sums = None if bias is None else torch.empty(1, parts, width, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        bias_gelu_bwd_kernel[(parts * triton.cdiv(width, tile.columns),)](
            x, bias, dout, dx, sums, rows, steps, WIDTH=width, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, ERF=by_erf(x.dtype),
            TANH=tanh, num_warps=tile.num_warps)
    return dx, x.new_empty(0) if bias is None else column_sums(sums, bias.dtype)[0]
