"""The kernels that quantise queries, keys and values to e4m3: scales, rotation, and values whose tokens follow each other in memory."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import Launch, are_aligned, block_width, on_device_of
from attnzoo_kernels.flash_fp8.layout import BLOCK, ROOM, SMALLEST, quantized_like

LEAST = tl.constexpr(SMALLEST)


@triton.jit
def signed_hadamard(WIDTH: tl.constexpr, dtype: tl.constexpr):
    """[WIDTH, WIDTH] of 1 and -1, with the same signs as `reference.rotation`."""
    i = tl.arange(0, WIDTH)
    common = i[:, None] & i[None, :]
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    mixed = i.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B
    negative = (common & 1) ^ (mixed >> 31).to(tl.int32)[:, None]
    return (1 - 2 * negative).to(dtype)


@triton.jit
def load_part(x_ptr, first, left, stride_row, hadamard, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
              ROTATE: tl.constexpr):
    """Rows first to first + ROWS, [ROWS, BLOCK_D] in float32, rotated under ROTATE; zeros from row `left` and column WIDTH on."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = (row < left)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_row + column[None, :], mask=inside, other=0.0)
    if ROTATE:
        return tl.dot(x, hadamard, input_precision="ieee") * WIDTH**-0.5
    return x.to(tl.float32)


@triton.jit
def place_of(stride_batch, stride_row, stride_head, kv_heads, group, blocks, BLOCK_T: tl.constexpr, ALIGNED: tl.constexpr):
    """(offset of this program's tokens of its first head, index of the key head over the batch, block)."""
    owner = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = (owner % kv_heads).to(tl.int64) * group
    at = (owner // kv_heads).to(tl.int64) * stride_batch + block.to(tl.int64) * BLOCK_T * stride_row + head * stride_head
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at, owner, block


@triton.jit
def largest_of(x_ptr, left, stride_row, stride_head, group, hadamard, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
               ROWS: tl.constexpr, ROTATE: tl.constexpr):
    """The largest magnitude in BLOCK_T tokens of a key head's group."""
    largest = tl.zeros([ROWS], tl.float32)
    for member in range(group):
        for first in range(0, BLOCK_T, ROWS):
            x = load_part(x_ptr + member * stride_head, first, left, stride_row, hadamard, WIDTH, BLOCK_D, ROWS, ROTATE)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    return tl.max(largest)


@triton.jit(do_not_specialize=["stride_batch", "seqlen", "kv_heads", "group", "blocks"])
def largest_kernel(x_ptr, largest_ptr, stride_batch, stride_row, stride_head, seqlen, kv_heads, group, blocks, WIDTH: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr, ALIGNED: tl.constexpr):
    hadamard = signed_hadamard(BLOCK_D, x_ptr.dtype.element_ty)
    at, owner, block = place_of(stride_batch, stride_row, stride_head, kv_heads, group, blocks, BLOCK_T, ALIGNED)
    left = seqlen - block * BLOCK_T
    largest = largest_of(x_ptr + at, left, stride_row, stride_head, group, hadamard, WIDTH, BLOCK_D, BLOCK_T, ROWS, ROTATE)
    tl.store(largest_ptr + owner * blocks + block, largest)


@triton.jit(do_not_specialize=["stride_batch", "stride_out_batch", "seqlen", "room", "kv_heads", "group", "blocks"])
def quantize_kernel(x_ptr, largest_ptr, out_ptr, descale_ptr, stride_batch, stride_row, stride_head, stride_out_batch, stride_out_row,
                    stride_out_head, stride_out_column, seqlen, room, kv_heads, group, blocks, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
                    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr, ALIGNED: tl.constexpr, BY_BLOCK: tl.constexpr,
                    BY_COLUMN: tl.constexpr):
    """BY_BLOCK: the scale is this block's; otherwise it is that of the largest magnitude in all blocks. BY_COLUMN: tokens follow each other
    in memory."""
    hadamard = signed_hadamard(BLOCK_D, x_ptr.dtype.element_ty)
    at, owner, block = place_of(stride_batch, stride_row, stride_head, kv_heads, group, blocks, BLOCK_T, ALIGNED)
    out_at, _, _ = place_of(stride_out_batch, stride_out_row, stride_out_head, kv_heads, group, blocks, BLOCK_T, ALIGNED)
    x_ptr += at
    out_ptr += out_at
    left = seqlen - block * BLOCK_T
    out_left = tl.multiple_of(room - block * BLOCK_T, 16)
    if BY_BLOCK:
        largest = largest_of(x_ptr, left, stride_row, stride_head, group, hadamard, WIDTH, BLOCK_D, BLOCK_T, ROWS, ROTATE)
    else:
        lanes = tl.arange(0, BLOCK_T)
        of_blocks = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, blocks, BLOCK_T):
            of_blocks = tl.maximum(of_blocks, tl.load(largest_ptr + owner * blocks + start + lanes, mask=start + lanes < blocks, other=0.0))
        largest = tl.max(of_blocks)
    descale = tl.div_rn(tl.where(largest >= LEAST, largest, 448.0), 448.0)
    if BY_BLOCK:
        tl.store(descale_ptr + owner * blocks + block, descale)
    elif block == 0:
        tl.store(descale_ptr + owner, descale)
    inverse = tl.div_rn(1.0, descale)
    column = tl.arange(0, BLOCK_D)
    for member in range(group):
        for first in range(0, BLOCK_T, ROWS):
            x = load_part(x_ptr + member * stride_head, first, left, stride_row, hadamard, WIDTH, BLOCK_D, ROWS, ROTATE)
            x = (x * inverse).to(tl.float8e4nv)
            row = first + tl.arange(0, ROWS)
            place = out_ptr + member * stride_out_head
            if BY_COLUMN:
                place += column[:, None].to(tl.int64) * stride_out_column + row[None, :]
                tl.store(place, tl.trans(x), mask=(column < WIDTH)[:, None] & (row < out_left)[None, :])
            else:
                place += row[:, None] * stride_out_row + column[None, :]
                tl.store(place, x, mask=(row < out_left)[:, None] & (column < WIDTH)[None, :])


ROWS = 64  # tokens at once: as many as a matrix instruction of a warp group takes


class _Plan(NamedTuple):
    largest: Launch | None
    quantize: Launch
    blocks: int


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, shape: torch.Size, strides: tuple[int, ...], out: tuple[int, ...],
          kv_heads: int, by_block: bool, rotate: bool) -> _Plan:
    batch, seqlen, heads, width = shape
    blocks, group = -(-seqlen // BLOCK), heads // kv_heads
    constants = {"WIDTH": width, "BLOCK_D": block_width(width), "BLOCK_T": BLOCK, "ROWS": ROWS, "ROTATE": rotate,
                 "ALIGNED": aligned and all(stride % 16 == 0 for stride in (*strides[:3], *(s for s in out if s != 1)))}
    programs = batch * kv_heads * blocks
    sizes = (kv_heads, group, blocks)
    largest = Launch(largest_kernel, programs, (*strides[:3], seqlen, *sizes), constants, 4, 1)
    quantize = Launch(quantize_kernel, programs, (*strides[:3], *out, seqlen, -(-seqlen // ROOM) * ROOM, *sizes),
                      constants | {"BY_BLOCK": by_block, "BY_COLUMN": out[1] == 1}, 4, 1)
    return _Plan(None if by_block else largest, quantize, blocks)


def launch_quantize(x: Tensor, kv_heads: int, by_block: bool, rotate: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    """The values and scales of x (batch, seqlen, heads, width), as `reference.quantize_reference` returns them. by_column: tokens follow
    each other in memory."""
    batch, _, heads, _ = x.shape
    out = quantized_like(x, by_column)
    plan = _plan(x.device, x.dtype, are_aligned(x), x.shape, x.stride(), out.stride(), kv_heads, by_block, rotate)
    descale = torch.empty((batch, kv_heads, plan.blocks) if by_block else (batch, kv_heads), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        largest = descale
        if plan.largest is not None:
            largest = torch.empty(batch, kv_heads, plan.blocks, dtype=torch.float32, device=x.device)
            plan.largest(x, largest)
        plan.quantize(x, largest, out, descale)
    return out, descale
