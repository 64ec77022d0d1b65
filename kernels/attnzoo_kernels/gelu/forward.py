"""bias_gelu's forward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.tiles import NVIDIA, columns_of_program
from attnzoo_kernels.gelu.tiles import by_erf, forward_tile


@triton.jit
def exp2(x):
    """2 ** x by one instruction on NVIDIA GPUs, without tl.exp2's care for results below 2**-126, which are 0 here."""
    if NVIDIA:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def reciprocal(x):
    """1 / x by one instruction on NVIDIA GPUs, with an error of one bit, for 1 <= x < 2**126."""
    if NVIDIA:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def normal_cdf(z, ERF: tl.constexpr):
    """Φ(z) and exp(-z² / 2). Without ERF, Φ is computed by formula 7.1.26 of Abramowitz and Stegun."""
    if ERF:
        return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), tl.exp(-0.5 * z * z)
    t = reciprocal(1.0 + 0.2316418882 * tl.abs(z))
    density = exp2(-0.7213475204444817 * z * z)
    tail = 0.5 * t * density * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.where(z < 0, tail, 1.0 - tail), density


@triton.jit
def tanh_cdf(z):
    """0.5 (1 + tanh u), which is the logistic function of 2 u, with u = sqrt(2 / pi) (z + 0.044715 z^3), and its derivative."""
    square = z * z
    doubled = z * (2.302208198144325 + 0.10294323958002444 * square)  # in units of log(2)
    falling = exp2(-tl.abs(doubled))
    larger = reciprocal(1.0 + falling)  # of the logistic function's values at 2 u and -2 u; their product needs no difference from 1
    cdf = tl.where(doubled < 0, falling * larger, larger)
    return cdf, falling * larger * larger * (1.5957691216057308 + 0.2140644488178027 * square)


@triton.jit
def load_bias(bias_ptr, column, WIDTH: tl.constexpr):
    """The bias of these columns in float32; 0 if bias_ptr is None."""
    if bias_ptr is None:
        bias = 0.0
    else:
        # [1, BLOCK_COLUMNS]
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return bias


@triton.jit
def load_sum(x_ptr, bias, row, column, rows, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """(x + bias in float32, offsets of the elements, mask of those that exist)."""
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    inside = (row < rows)[:, None]
    if WIDTH % BLOCK_COLUMNS:
        inside = inside & (column < WIDTH)[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias, at, inside


@triton.jit(do_not_specialize=["rows"])
def bias_gelu_fwd_kernel(x_ptr, bias_ptr, out_ptr, rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
                         ERF: tl.constexpr, TANH: tl.constexpr):
    part, column = columns_of_program(WIDTH, BLOCK_COLUMNS)
    row = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    z, at, inside = load_sum(x_ptr, load_bias(bias_ptr, column, WIDTH), row, column, rows, WIDTH, BLOCK_COLUMNS)
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
