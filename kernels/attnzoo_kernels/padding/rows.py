"""Kernels that move rows between padded and packed layout: bytes are copied as integers, whatever the dtype."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import are_aligned, on_device_of
from attnzoo_kernels._triton.tiles import columns_of_program
from attnzoo_kernels.padding.launch import Launch
from attnzoo_kernels.padding.tiles import remove_tile, restore_tile

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _load_ascending(indices_ptr, token, slots, tokens):
    """Loads the indices of tokens, int32, and asserts their order. After the last token they are `slots`."""
    index = tl.load(indices_ptr + token, mask=token < tokens, other=slots).to(tl.int32)
    following = tl.load(indices_ptr + token + 1, mask=token + 1 < tokens, other=slots).to(tl.int32)
    ordered = (index >= 0) & (index <= slots) & ((index < following) | (following == slots))
    tl.device_assert(ordered, "indices: must be strictly ascending in 0 .. batch * seqlen")
    return index


@triton.jit(do_not_specialize=["seqlen", "slots", "tokens"])
def padding_remove_kernel(x_ptr, indices_ptr, out_ptr, stride_xb, stride_xs, seqlen, slots, tokens,
                          WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    part, column = columns_of_program(WIDTH, BLOCK_WIDTH)
    token = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    index = _load_ascending(indices_ptr, token, slots, tokens)
    real = index < slots
    batch = index // seqlen
    source = batch.to(tl.int64) * stride_xb + (index - batch * seqlen).to(tl.int64) * stride_xs
    target = token.to(tl.int64) * WIDTH
    # [BLOCK_ROWS, BLOCK_WIDTH]
    if WIDTH % BLOCK_WIDTH == 0:
        rows = tl.load(x_ptr + source[:, None] + column[None, :], mask=real[:, None], other=0)
        tl.store(out_ptr + target[:, None] + column[None, :], rows, mask=(token < tokens)[:, None])
    else:
        inside = (column < WIDTH)[None, :]
        rows = tl.load(x_ptr + source[:, None] + column[None, :], mask=real[:, None] & inside, other=0)
        tl.store(out_ptr + target[:, None] + column[None, :], rows, mask=(token < tokens)[:, None] & inside)


@triton.jit
def _search(indices_ptr, slot, slots, tokens, NEAR: tl.constexpr):
    """A token at most NEAR before the first one whose index is `slot` or more. Each step reads 128 indices."""
    lanes = tl.arange(0, 128)
    first = 0
    # a token's index is never less than the token's number
    end = tl.minimum(tokens, slot)
    while end - first > NEAR:
        step = tl.cdiv(end - first, 128)
        at = first + lanes * step
        below = tl.sum((tl.load(indices_ptr + at, mask=at < end, other=slots) < slot).to(tl.int32), 0)
        end = tl.minimum(first + below * step, end)
        first = tl.where(below > 0, first + (below - 1) * step + 1, first)
    return first


@triton.jit(do_not_specialize=["slots", "tokens"])
def padding_restore_kernel(tokens_ptr, indices_ptr, out_ptr, stride_t, slots, tokens,
                           WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    slot = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # there are no more tokens than slots, so the order of all tokens is checked
    _load_ascending(indices_ptr, slot, slots, tokens)
    first = _search(indices_ptr, tl.program_id(0) * BLOCK_ROWS, slots, tokens, BLOCK_ROWS)
    near = first + tl.arange(0, 2 * BLOCK_ROWS)
    index = tl.load(indices_ptr + near, mask=near < tokens, other=-1).to(tl.int32)
    # [BLOCK_ROWS, 2 * BLOCK_ROWS]
    here = (slot[:, None] == index[None, :]) & (index < slots)[None, :]
    token = tl.max(tl.where(here, near[None, :], -1), 1)
    source = token.to(tl.int64) * stride_t
    target = slot.to(tl.int64) * WIDTH
    for start in range(0, WIDTH, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        # [BLOCK_ROWS, BLOCK_WIDTH]
        if WIDTH % BLOCK_WIDTH == 0:
            rows = tl.load(tokens_ptr + source[:, None] + column[None, :], mask=(token >= 0)[:, None], other=0)
            tl.store(out_ptr + target[:, None] + column[None, :], rows, mask=(slot < slots)[:, None])
        else:
            inside = (column < WIDTH)[None, :]
            rows = tl.load(tokens_ptr + source[:, None] + column[None, :], mask=(token >= 0)[:, None] & inside, other=0)
            tl.store(out_ptr + target[:, None] + column[None, :], rows, mask=(slot < slots)[:, None] & inside)


# the key is all that Triton specialises on: device, dtype, strides and alignment
@functools.lru_cache(maxsize=1024)
def _remove_plan(device: int, dtype: torch.dtype, width: int, strides: tuple[int, ...], aligned: bool) -> tuple[Launch, int, int]:
    tile = remove_tile(width, dtype.itemsize)
    constants = {"WIDTH": width, "BLOCK_ROWS": tile.rows, "BLOCK_WIDTH": tile.columns}
    return Launch(padding_remove_kernel, constants, tile.num_warps), tile.rows, triton.cdiv(width, tile.columns)


@functools.lru_cache(maxsize=1024)
def _restore_plan(device: int, dtype: torch.dtype, width: int, stride: int, aligned: bool) -> tuple[Launch, int]:
    tile = restore_tile(width, dtype.itemsize)
    constants = {"WIDTH": width, "BLOCK_ROWS": tile.rows, "BLOCK_WIDTH": tile.columns}
    return Launch(padding_restore_kernel, constants, tile.num_warps), tile.rows


def launch_remove(x: Tensor, indices: Tensor) -> Tensor:
    shape, tokens, words = x.shape, indices.shape[0], WORDS[x.element_size()]
    out = x.new_empty((tokens, *shape[2:]))
    if out.numel() == 0:
        return out
    indices, strides = indices.contiguous(), x.stride()[:2]
    launch, rows, column_blocks = _remove_plan(x.get_device(), words, math.prod(shape[2:]), strides, are_aligned(x, indices))
    with on_device_of(x):
        launch(-(-tokens // rows) * column_blocks, x.view(words), indices, out.view(words), *strides, max(shape[1], 1), shape[0] * shape[1],
               tokens)
    return out


def launch_restore(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    shape, slots, words = tokens.shape, batch * seqlen, WORDS[tokens.element_size()]
    out = tokens.new_empty((batch, seqlen, *shape[1:]))
    if out.numel() == 0:
        return out
    indices, stride = indices.contiguous(), tokens.stride(0)
    launch, rows = _restore_plan(tokens.get_device(), words, math.prod(shape[1:]), stride, are_aligned(tokens, indices))
    with on_device_of(tokens):
        launch(-(-slots // rows), tokens.view(words), indices, out.view(words), stride, slots, shape[0])
    return out
