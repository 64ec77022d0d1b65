"""Matrices rounded to 8 bits, both as they are and transposed. Kernels do it from compute capability 9.0 on, and are imported only then;
PyTorch does it elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import autograd

MULTIPLE = 16  # the sizes of a weight and the padded number of rows are multiples of it
SMALLEST = 2.0**-64  # a tensor whose elements are all smaller is rounded as if this were its largest one, so that the scale is finite


def filled(rows: int) -> int:
    """`rows` rounded up to a multiple of MULTIPLE."""
    return -(-rows // MULTIPLE) * MULTIPLE


def has_kernels(device: torch.device) -> bool:
    """Whether kernels round on a device. Below 9.0 Triton rounds by way of float16, which it truncates, so that not all numbers are rounded
    to nearest."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and its unit, float32 (). x is approximated by their product."""
    largest = x.abs().amax().float().clamp(min=SMALLEST)
    unit = largest / torch.full_like(largest, torch.finfo(dtype).max)  # a GPU would multiply by a Python number's reciprocal
    return (x.float() * (1 / unit)).to(dtype), unit


def _round_both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if has_kernels(x.device):
        from attnzoo_kernels.fp8.rounding import launch_rounding

        return launch_rounding(x, dtype)
    values, unit = rounded(x, dtype)
    missing = filled(x.shape[0]) - x.shape[0]
    return values, F.pad(values.t().view(torch.uint8), (0, missing)).contiguous().view(dtype), unit


def _fake_round_both_ways(x, dtype):
    by_columns = x.new_empty(x.shape[1], filled(x.shape[0]), dtype=dtype)
    return torch.empty_like(x, dtype=dtype), by_columns, x.new_empty((), dtype=torch.float32)


# takes x (rows, columns), contiguous; gives x in 8 bits, its transpose, whose rows are padded with zeros to `filled(rows)`, and their unit
round_both_ways = autograd.forward_only("round_both_ways", _round_both_ways, _fake_round_both_ways)
