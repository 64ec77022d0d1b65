"""Products that end with GELU or its derivative: persistent programs, tiles read and written by TMA."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnzoo_kernels._triton.launch import architecture, multiprocessors, on_device_of
from attnzoo_kernels._triton.softmax import tanh
from attnzoo_kernels.gelu.forward import normal_cdf, tanh_cdf


@dataclass(frozen=True)
class Tile:
    rows: int = 128
    columns: int = 256
    depth: int = 64
    num_warps: int = 8
    stages: int = 3
    programs: int = 1  # of a multiprocessor
    parts: int = 2  # of a tile's columns, which are written one after the other
    hardware: bool = False  # tanh by its instruction, whose error is 2**-11


FORWARD = Tile()
BACKWARD = Tile()


@triton.jit
def _cdf(z, TANH: tl.constexpr, HARDWARE: tl.constexpr):
    """Φ(z) or its approximation, and z times its derivative."""
    if TANH:
        if HARDWARE:
            square = z * z
            t = tanh(z * (0.7978845608028654 + 0.03567740813630045 * square), False, True)
            cdf = 0.5 + 0.5 * t
            slope = z * (0.5 - 0.5 * t * t) * (0.7978845608028654 + 0.10703222440890135 * square)
        else:
            cdf, slope = tanh_cdf(z)
            slope *= z
    else:
        cdf, density = normal_cdf(z, False)
        slope = z * density * 0.3989422804014327
    return cdf, slope


@triton.jit
def _finish(part, between_desc, out_desc, row, column, TANH: tl.constexpr, HARDWARE: tl.constexpr, BACKWARD: tl.constexpr):
    """part (rows, columns) of a product in float32. Forward it goes to between_desc and GELU of it to out_desc; backward it is GELU's
    gradient, and that of the sums in between_desc goes to out_desc."""
    if BACKWARD:
        z = between_desc.load([row, column]).to(tl.float32)
        cdf, slope = _cdf(z, TANH, HARDWARE)
        part *= cdf + slope
    else:
        between = part.to(between_desc.dtype)
        between_desc.store([row, column], between)
        z = between.to(tl.float32)
        cdf, _ = _cdf(z, TANH, HARDWARE)
        part = z * cdf
    out_desc.store([row, column], part.to(out_desc.dtype))


@triton.jit
def _halves(x):
    """Left and right half of x's columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit(do_not_specialize=["rows"])
def gelu_product_kernel(a_desc, b_desc, between_desc, out_desc, rows, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
                        BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PARTS: tl.constexpr,
                        TANH: tl.constexpr, HARDWARE: tl.constexpr, BACKWARD: tl.constexpr):
    """a (rows, DEPTH) times b: (COLUMNS, DEPTH) transposed forward, (DEPTH, COLUMNS) backward."""
    across: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    WIDTH: tl.constexpr = BLOCK_COLUMNS // PARTS
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS) * across, PROGRAMS, flatten=True):
        row, column = tile // across * BLOCK_ROWS, tile % across * BLOCK_COLUMNS
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for at in range(0, DEPTH, BLOCK_DEPTH):
            a = a_desc.load([row, at])
            if BACKWARD:
                product = tl.dot(a, b_desc.load([at, column]), product)
            else:
                product = tl.dot(a, b_desc.load([column, at]).T, product)
        if PARTS == 1:
            _finish(product, between_desc, out_desc, row, column, TANH, HARDWARE, BACKWARD)
        else:
            left, right = _halves(product)
            if PARTS == 2:
                _finish(left, between_desc, out_desc, row, column, TANH, HARDWARE, BACKWARD)
                _finish(right, between_desc, out_desc, row, column + WIDTH, TANH, HARDWARE, BACKWARD)
            else:
                first, second = _halves(left)
                _finish(first, between_desc, out_desc, row, column, TANH, HARDWARE, BACKWARD)
                _finish(second, between_desc, out_desc, row, column + WIDTH, TANH, HARDWARE, BACKWARD)
                third, fourth = _halves(right)
                _finish(third, between_desc, out_desc, row, column + 2 * WIDTH, TANH, HARDWARE, BACKWARD)
                _finish(fourth, between_desc, out_desc, row, column + 3 * WIDTH, TANH, HARDWARE, BACKWARD)


def _launch(a: Tensor, b: Tensor, between: Tensor, out: Tensor, tile: Tile, tanh: bool, backward: bool) -> None:
    (rows, depth), columns = a.shape, out.shape[1]
    if 0 < (capability := architecture(a)) < 90:
        raise NotImplementedError(f'x: impl="triton" of gelu_mlp needs compute capability 9.0 or later, got {capability / 10}')
    if 0 in (rows, depth, columns):
        between.zero_(), out.zero_()
        return

    def descriptor(x: Tensor, *block: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))

    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    programs = multiprocessors(a.device) * tile.programs
    b_block = (tile.depth, tile.columns) if backward else (tile.columns, tile.depth)
    width = tile.columns // tile.parts
    with on_device_of(a):
        gelu_product_kernel[(min(programs, tiles),)](
            descriptor(a, tile.rows, tile.depth), descriptor(b, *b_block), descriptor(between, tile.rows, width),
            descriptor(out, tile.rows, width), rows, COLUMNS=columns, DEPTH=depth, PROGRAMS=min(programs, tiles), BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=tile.depth, PARTS=tile.parts, TANH=tanh, HARDWARE=tile.hardware, BACKWARD=backward,
            num_warps=tile.num_warps, num_stages=tile.stages)


def launch_forward(x: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """x upᵀ and GELU of it, (rows, hidden). x: (rows, width). up: (hidden, width)."""
    between, hidden = (x.new_empty(x.shape[0], up.shape[0]) for _ in range(2))
    _launch(x.contiguous(), up.contiguous(), between, hidden, FORWARD, tanh, False)
    return between, hidden


def launch_backward(dout: Tensor, down: Tensor, between: Tensor, tanh: bool) -> Tensor:
    """The gradient of `between` (rows, hidden). dout: (rows, out). down: (out, hidden)."""
    dbetween = torch.empty_like(between)
    _launch(dout.contiguous(), down.contiguous(), between, dbetween, BACKWARD, tanh, True)
    return dbetween
