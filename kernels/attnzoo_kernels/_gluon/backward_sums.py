"""Sums of a Hopper backward's dS by query or by key: products with ones, of the numbers that dQ and dK are made of."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_step import column_numbers
from attnzoo_kernels._gluon.backward_tiles import HALF
from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, product_layout, ring, warpgroup_mma


@gluon.jit
def ones_and_columns(dtype: gl.constexpr, c):
    """([8, HALF] in shared memory, with ones in the first row and anything in the others; the columns of pair_tiles). At width 128 the
    columns have a place behind the first row of ones: there is none left."""
    ones = gl.allocate_shared_memory(dtype, [8, HALF], gl.NVMMASharedLayout.get_default_for([8, HALF], dtype))
    ones.store(gl.full([8, HALF], 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    if c.WIDTH > 64:
        barrier()
        columns = ones._reinterpret(gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0])).slice(128, c.ROWS)
        columns.store(gl.arange(0, c.ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    else:
        columns = column_numbers(c.ROWS)
    fence_async_shared()
    barrier()
    return ones, columns


@gluon.jit
def dscores_of(smem, step, ME: gl.constexpr):
    """A consumer's dS [HALF, ROWS] of a step."""
    slot, _ = ring(step, 2)
    return smem.ds.index(slot * 2 + ME)


@gluon.jit
def sum_in_flight(ds, FROM: gl.constexpr, BY_ROW: gl.constexpr, acc, ones):
    """64 columns of dS [HALF, ROWS] from FROM on, added up by key, or BY_ROW by query: what `first_column` has of the product."""
    part = ds.slice(FROM, 64, dim=1)
    if BY_ROW:
        part = part.permute((1, 0))
    # [64, 64] x [64, 8]
    return warpgroup_mma(part, ones.permute((1, 0)), acc, is_async=True)


@gluon.jit
def no_sums():
    return gl.zeros([64, 8], gl.float32, product_layout(8))


@gluon.jit
def first_column(x):
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.sum(gl.where(column[None, :] == 0, x, 0.0), 1)


@gluon.jit
def add_rows(sums, sums_ptr, tile, FROM: gl.constexpr, c):
    """Adds sums by query to those of the queries from FROM on of a tile of dQ, in any order."""
    lanes = gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
    gl.atomic_add(sums_ptr + tile.to(gl.int64) * c.ROWS + FROM + lanes, first_column(sums), sem="relaxed")


def by_row(x: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None, block: int) -> Tensor:
    """What lies in tiles of `block` queries, (..., block), as the LSE of that shape does."""
    if cu_seqlens is None:
        return x.reshape(*shape[:-1], -1)[..., : shape[-1]]
    total = shape[-1]
    token = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token.int(), right=True)
    first = cu_seqlens.long()[sequence]
    return x.reshape(shape[0], -1)[:, (first // block + sequence) * block + token - first]
