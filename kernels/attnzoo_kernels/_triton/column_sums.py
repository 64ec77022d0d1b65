"""The second stage of sums over rows, such as gradients of biases. In the first stage, each program has stored the sums of its rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of

BLOCK_PARTS, BLOCK_COLUMNS, NUM_WARPS = 128, 16, 8


@triton.jit(do_not_specialize=["parts"])
def column_sums_kernel(parts_ptr, sums_ptr, parts, WIDTH: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    which = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # [BLOCK_PARTS, BLOCK_COLUMNS]
    total = tl.zeros([BLOCK_PARTS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        total += tl.load(parts_ptr + (which * parts + part[:, None]) * WIDTH + column[None, :],
                         mask=(part < parts)[:, None] & (column < WIDTH)[None, :], other=0.0)
    tl.store(sums_ptr + which * WIDTH + column, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=column < WIDTH)


def column_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of float32 (n, parts, width) over the parts, (n, width), in one launch and rounded once."""
    n, count, width = parts.shape
    sums = torch.empty(n, width, dtype=dtype, device=parts.device)
    if sums.numel():
        with on_device_of(parts):
            column_sums_kernel[(triton.cdiv(width, BLOCK_COLUMNS), n)](parts, sums, count, WIDTH=width, BLOCK_PARTS=BLOCK_PARTS,
                                                                       BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=NUM_WARPS)
    return sums
