"""ByteTransformer's last kernel: residual addition, LayerNorm and restoring of the padding in one pass over the rows."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import are_aligned, next_power_of_2, on_device_of
from attnzoo_kernels._triton.tiles import load_rows_at
from attnzoo_kernels.padding.launch import Launch
from attnzoo_kernels.padding.rows import _load_ascending, _search
from attnzoo_kernels.padding.tiles import norm_tile


@triton.jit(do_not_specialize=["slots", "tokens"])
def padding_add_norm_kernel(hidden_ptr, residual_ptr, weight_ptr, bias_ptr, indices_ptr, out_ptr, mean_ptr, rstd_ptr, stride_h, stride_r,
                            slots, tokens, eps, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
                            WINDOW: tl.constexpr):
    slot = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # there are no more tokens than slots, so the order of all tokens is checked
    left_out = (_load_ascending(indices_ptr, slot, slots, tokens) == slots) & (slot < tokens)
    zero = tl.zeros([BLOCK_ROWS], tl.float32)
    tl.store(mean_ptr + slot, zero, mask=left_out)
    tl.store(rstd_ptr + slot, zero, mask=left_out)
    first = _search(indices_ptr, tl.program_id(0) * BLOCK_ROWS, slots, tokens, WINDOW - BLOCK_ROWS)
    near = first + tl.arange(0, WINDOW)
    index = tl.load(indices_ptr + near, mask=near < tokens, other=-1).to(tl.int32)
    # [BLOCK_ROWS, WINDOW]
    here = (slot[:, None] == index[None, :]) & (index < slots)[None, :]
    token = tl.max(tl.where(here, near[None, :], -1), 1)
    column = tl.arange(0, BLOCK_WIDTH)
    real = token >= 0
    inside = (column < WIDTH)[None, :]
    target = slot.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if tl.max(token, 0) < 0:
        tl.store(out_ptr + target, tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], out_ptr.dtype.element_ty), mask=(slot < slots)[:, None] & inside)
    else:
        # [BLOCK_ROWS, BLOCK_WIDTH]
        x = load_rows_at(hidden_ptr + token.to(tl.int64) * stride_h, real, WIDTH, BLOCK_WIDTH)
        residual = load_rows_at(residual_ptr + token.to(tl.int64) * stride_r, real, WIDTH, BLOCK_WIDTH)
        x = x.to(tl.float32) + residual.to(tl.float32)
        mean = tl.sum(x, 1) / WIDTH
        x = tl.where(inside, x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / WIDTH + eps)
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        out = tl.where(real[:, None], x * rstd[:, None] * weight[None, :] + bias[None, :], 0.0)
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=(slot < slots)[:, None] & inside)
        tl.store(mean_ptr + token, mean, mask=real)
        tl.store(rstd_ptr + token, rstd, mask=real)


@functools.lru_cache(maxsize=256)
def _plan(device: int, dtypes: tuple[torch.dtype, ...], width: int, strides: tuple[int, int], aligned: bool) -> tuple[Launch, int]:
    tile = norm_tile(width)
    constants = {"WIDTH": width, "BLOCK_ROWS": tile.rows, "BLOCK_WIDTH": next_power_of_2(width), "WINDOW": tile.window}
    return Launch(padding_add_norm_kernel, constants, tile.num_warps), tile.rows


def launch_add_norm(hidden: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, indices: Tensor, batch: int, seqlen: int,
                    eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (batch, seqlen, width), and the mean and reciprocal standard deviation of each token, float32 (tokens, 1). These are zero for
    tokens that are left out."""
    tokens, width = hidden.shape
    out = hidden.new_empty((batch, seqlen, width))
    new = torch.empty if out.numel() else torch.zeros
    mean, rstd = (new(tokens, 1, dtype=torch.float32, device=hidden.device) for _ in range(2))
    if out.numel() == 0:
        return out, mean, rstd
    indices, weight, bias = indices.contiguous(), weight.contiguous(), bias.contiguous()
    strides = hidden.stride(0), residual.stride(0)
    aligned = are_aligned(hidden, residual, weight, bias, indices)
    launch, rows = _plan(hidden.get_device(), (hidden.dtype, residual.dtype, weight.dtype, bias.dtype), width, strides, aligned)
    with on_device_of(hidden):
        launch(-(-batch * seqlen // rows), hidden, residual, weight, bias, indices, out, mean, rstd, *strides, batch * seqlen, tokens, eps)
    return out, mean, rstd
