"""The kernels that find the largest element of a matrix, round the matrix to 8 bits and transpose it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.fp8.ops import SMALLEST, filled

ROWS, COLUMNS, WARPS = 64, 128, 4  # of a tile
PROGRAMS, BLOCK = 1024, 8192  # programs that find the largest element, and how many elements each holds in registers at once


@triton.jit
def largest_kernel(x_ptr, largest_ptr, n, BLOCK: tl.constexpr):
    """Each program writes the largest magnitude in every num_programs-th block of x, as float32. The bits of magnitudes, as integers, are
    ordered as these are, and NaN is above infinity."""
    INTEGER: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.float32 else tl.int16
    MAGNITUDE: tl.constexpr = 0x7FFFFFFF if x_ptr.dtype.element_ty == tl.float32 else 0x7FFF
    # [BLOCK]
    largest = tl.zeros([BLOCK], INTEGER)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(x_ptr + at, mask=at < n, other=0.0).to(INTEGER, bitcast=True)
        largest = tl.maximum(largest, bits & MAGNITUDE)
    found = tl.max(largest, 0).to(INTEGER).to(x_ptr.dtype.element_ty, bitcast=True)
    tl.store(largest_ptr + tl.program_id(0), found.to(tl.float32))


@triton.jit
def unit_kernel(largest_ptr, unit_ptr, smallest, highest, PROGRAMS: tl.constexpr):
    """Writes the unit: the largest magnitude, at least `smallest`, divided by `highest`, the largest number of the 8-bit dtype."""
    bits = tl.load(largest_ptr + tl.arange(0, PROGRAMS)).to(tl.int32, bitcast=True)
    largest = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(unit_ptr, tl.div_rn(tl.where(largest < smallest, smallest, largest), highest))


@triton.jit
def _in_units(x, unit, dtype: tl.constexpr):
    return (x.to(tl.float32) * tl.div_rn(1.0, unit)).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def rounding_kernel(x_ptr, unit_ptr, values_ptr, by_columns_ptr, rows, columns, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program has a tile of x (rows, columns). It writes the tile transposed to by_columns (columns, length), which has zeros after
    the rows, or NaN if the unit is NaN.

    With a unit, x is multiplied by 1 / unit, rounded, and also written to values. Without one, x has 8 bits already.
    """
    across = tl.cdiv(columns, COLUMNS)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    # [ROWS, COLUMNS]
    tile = tl.load(x_ptr + at, mask=inside, other=0)
    if unit_ptr is not None:
        tl.store(values_ptr + at, _in_units(tile, tl.load(unit_ptr), values_ptr.dtype.element_ty), mask=inside)
        tile = _in_units(tile, tl.load(unit_ptr, volatile=True), values_ptr.dtype.element_ty)  # rounded anew: fault 20
    inside = (column < columns)[:, None] & (row < length)[None, :]
    tl.store(by_columns_ptr + column[:, None] * length + row[None, :], tl.trans(tile), mask=inside)


def _launch(x: Tensor, unit: Tensor | None, values: Tensor | None, by_columns: Tensor) -> None:
    rows, columns = x.shape
    length = by_columns.shape[1]
    rounding_kernel[(triton.cdiv(columns, COLUMNS) * triton.cdiv(length, ROWS),)](
        x, unit, values, by_columns, rows, columns, length, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def launch_rounding(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, columns), contiguous, in 8 bits; the same transposed; and their unit."""
    values, by_columns = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[1], filled(x.shape[0]), dtype=dtype)
    largest, unit = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((PROGRAMS,), ()))
    with on_device_of(x):
        largest_kernel[(PROGRAMS,)](x, largest, x.numel(), BLOCK=BLOCK, num_warps=8)
        unit_kernel[(1,)](largest, unit, SMALLEST, torch.finfo(dtype).max, PROGRAMS=PROGRAMS)
        _launch(x, unit, values, by_columns)
    return values, by_columns, unit


def transposed(x: Tensor) -> Tensor:
    """The transpose of 8-bit x (rows, columns), contiguous: (columns, filled(rows)), padded with zeros."""
    out = x.new_empty(x.shape[1], filled(x.shape[0]))
    with on_device_of(x):
        _launch(x.view(torch.uint8), None, None, out.view(torch.uint8))
    return out
