"""bias_gelu's forward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.tiles import columns_of_program
from attnzoo_kernels.gelu.tiles import by_erf, forward_tile


@triton.jit
def normal_cdf(z, ERF: tl.constexpr):
    """Φ(z) and exp(-z² / 2). Without ERF, Φ is computed by formula 7.1.26 of Abramowitz and Stegun."""
    if ERF:
        return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), tl.exp(-0.5 * z * z)
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(z))
    density = tl.exp(-0.5 * z * z)
    tail = 0.5 * t * density * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.where(z < 0, tail, 1.0 - tail), density


@triton.jit
def tanh_cdf(z):
    """0.5 (1 + tanh u), which is the logistic function of 2 u, with u = sqrt(2 / pi) (z + 0.044715 z^3), and its derivative."""
    square = z * z
    doubled = z * (1.5957691216057308 + 0.0713548162726009 * square)
    falling = tl.exp(-tl.abs(doubled))
    larger = 1.0 / (1.0 + falling)  # of the logistic function's values at 2 u and -2 u; their product needs no difference from 1
    cdf = tl.where(doubled < 0, falling * larger, larger)
    return cdf, falling * larger * larger * (1.5957691216057308 + 0.2140644488178027 * square)


@triton.jit
def load_sum(x_ptr, bias_ptr, row, column, rows, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """(x + bias in float32, offsets of the elements, mask of those that exist). bias_ptr may be None."""
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    inside = (row < rows)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if WIDTH % BLOCK_COLUMNS:
        inside = inside & (column < WIDTH)[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += bias[None, :]
    return z, at, inside


@triton.jit(do_not_specialize=["rows"])
def bias_gelu_fwd_kernel(x_ptr, bias_ptr, out_ptr, rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
                         ERF: tl.constexpr, TANH: tl.constexpr):
    part, column = columns_of_program(WIDTH, BLOCK_COLUMNS)
    row = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    z, at, inside = load_sum(x_ptr, bias_ptr, row, column, rows, WIDTH, BLOCK_COLUMNS)
    if TANH:
        cdf, _ = tanh_cdf(z)
    else:
        cdf, _ = normal_cdf(z, ERF)
    tl.store(out_ptr + at, (z * cdf).to(out_ptr.dtype.element_ty), mask=inside)


def launch_forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        tile, rows = forward_tile(width), x.numel() // width
        with on_device_of(x):
            bias_gelu_fwd_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns),)](
                x, bias, out, rows, WIDTH=width, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, ERF=by_erf(x.dtype), TANH=tanh,
                num_warps=tile.num_warps)
    return out
