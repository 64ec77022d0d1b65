"""The products of a chunk by 8-bit floats, and the kernel that transposes them: a product reads both factors along what it sums over."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.fp8 import BACKWARD, FORWARD, MULTIPLE, SMALLEST, rounded

LARGEST = 2.0**15  # what a gradient that is its row's scale is rounded as: of e5m2's numbers one that leaves room above it
TILE = 128


@triton.jit(do_not_specialize=["rows"])
def transpose_kernel(x_ptr, out_ptr, rows, columns, out_columns, TILE: tl.constexpr):
    """A program has a tile of bytes. out (columns, out_columns) has zeros behind the rows of x (rows, columns)."""
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0)
    inside = (column < columns)[:, None] & (row < out_columns)[None, :]
    tl.store(out_ptr + column[:, None] * out_columns + row[None, :], tl.trans(tile), mask=inside)


def transposed(x: Tensor) -> Tensor:
    """Of 8-bit x (rows, columns), contiguous; the result's rows are filled up with zeros to a multiple of 16."""
    rows, columns = x.shape
    length = -(-rows // MULTIPLE) * MULTIPLE
    out = x.new_empty(columns, length)
    with on_device_of(x):
        transpose_kernel[(triton.cdiv(columns, TILE), triton.cdiv(length, TILE))](
            x.view(torch.uint8), out.view(torch.uint8), rows, columns, length, TILE=TILE, num_warps=8)
    return out


class EightBits:
    """x, weight and the gradients of logits in 8 bits. The gradients have one unit, which is that of the largest of `scales`."""

    def __init__(self, x: Tensor, weight: Tensor, scales: Tensor | None, gradient: bool):
        self.dtype = x.dtype
        (self.x, self.x_unit), (self.weight, self.w_unit) = rounded(x, FORWARD), rounded(weight.contiguous(), FORWARD)
        largest = x.new_ones((), dtype=torch.float32) if scales is None else scales.float().abs().amax().clamp(min=SMALLEST)
        self.unit = largest / LARGEST
        if gradient:
            self.by_columns = transposed(self.weight)
        self.of_gradients: Tensor | None = None

    def logits(self, chunk: slice, bias: Tensor | None) -> Tensor:
        found = torch._scaled_mm(self.x[chunk], self.weight.t(), self.x_unit, self.w_unit, out_dtype=self.dtype, use_fast_accum=True)
        return found if bias is None else found.add_(bias.to(self.dtype))

    def room(self, logits: Tensor) -> Tensor:
        if self.of_gradients is None:
            self.of_gradients = torch.empty(logits.shape, dtype=BACKWARD, device=logits.device)
        return self.of_gradients[: logits.shape[0]]

    def dx(self, chunk: slice, gradients: Tensor, out: Tensor) -> None:
        torch._scaled_mm(gradients, self.by_columns.t(), self.unit, self.w_unit, out_dtype=self.dtype, out=out)

    def add_dw(self, chunk: slice, gradients: Tensor, total: Tensor, first: bool) -> None:
        self.gradients_by_columns = transposed(gradients)
        part = transposed(self.x[chunk]).t()
        dw = total if first else torch.empty_like(total)
        torch._scaled_mm(self.gradients_by_columns, part, self.unit, self.x_unit, out_dtype=torch.float32, out=dw)
        if not first:
            total += dw

    def db(self, gradients: Tensor) -> Tensor:
        """Of the gradients that add_dw had."""
        ones = torch.ones(MULTIPLE, self.gradients_by_columns.shape[1], device=gradients.device).to(FORWARD)
        one = torch.ones((), device=gradients.device)
        return torch._scaled_mm(self.gradients_by_columns, ones.t(), self.unit, one, out_dtype=torch.float32)[:, 0]
