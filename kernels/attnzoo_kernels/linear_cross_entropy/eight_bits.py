"""The products of a chunk by 8-bit floats: a product reads both its factors along what it sums over."""

import torch
from torch import Tensor

from attnzoo_kernels.fp8 import BACKWARD, FORWARD, MULTIPLE, SMALLEST, rounded, rounded_both_ways
from attnzoo_kernels.fp8.rounding import transposed

LARGEST = 2.0**15  # what a gradient that is its row's scale is rounded as: of e5m2's numbers one that leaves room above it


class EightBits:
    """x, weight and the gradients of logits in 8 bits. The gradients have one unit, which is that of the largest of `scales`."""

    def __init__(self, x: Tensor, weight: Tensor, scales: Tensor | None, gradient: bool):
        self.dtype = x.dtype
        if gradient:
            self.x, self.x_by_columns, self.x_unit = rounded_both_ways(x, FORWARD)
            self.weight, self.by_columns, self.w_unit = rounded_both_ways(weight, FORWARD)
        else:
            (self.x, self.x_unit), (self.weight, self.w_unit) = rounded(x.contiguous(), FORWARD), rounded(weight.contiguous(), FORWARD)
        largest = x.new_ones((), dtype=torch.float32) if scales is None else scales.float().abs().amax().clamp(min=SMALLEST)
        self.unit = largest / LARGEST
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
        # chunks begin at multiples of 256: behind the last one are zeros, and the others have no columns behind them
        part = self.x_by_columns[:, chunk.start : chunk.start + self.gradients_by_columns.shape[1]].t()
        dw = total if first else torch.empty_like(total)
        torch._scaled_mm(self.gradients_by_columns, part, self.unit, self.x_unit, out_dtype=torch.float32, out=dw)
        if not first:
            total += dw

    def db(self, gradients: Tensor) -> Tensor:
        """Of the gradients that add_dw had."""
        ones = torch.ones(MULTIPLE, self.gradients_by_columns.shape[1], device=gradients.device).to(FORWARD)
        one = torch.ones((), device=gradients.device)
        return torch._scaled_mm(self.gradients_by_columns, ones.t(), self.unit, one, out_dtype=torch.float32)[:, 0]
