"""Sums of a Hopper backward's dS over queries or over keys. They are products with ones, of the same rounded dS that dQ and dK are made
from."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_step import column_numbers
from attnzoo_kernels._gluon.backward_tiles import HALF
from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, product_layout, warpgroup_mma


@gluon.jit
def ones_and_columns(dtype: gl.constexpr, config):
    """(the ones, the `columns` of pair_tiles), both in shared memory. The ones are [8, HALF], with ones in the first row and any values in
    the others. At width 128 no shared memory is left, so the columns lie in the unused rows of the ones."""
    ones = gl.allocate_shared_memory(dtype, [8, HALF], gl.NVMMASharedLayout.get_default_for([8, HALF], dtype))
    ones.store(gl.full([8, HALF], 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    if config.WIDTH > 64:
        barrier()
        columns = ones._reinterpret(gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0])).slice(128, config.ROWS)
        columns.store(gl.arange(0, config.ROWS, gl.BlockedLayout([1], [32], [4], [0])))
    else:
        columns = column_numbers(config.ROWS)
    fence_async_shared()
    barrier()
    return ones, columns


@gluon.jit
def sum_in_flight(ds, BY_ROW: gl.constexpr, acc, ones):
    """Starts to add up dS [HALF, 64]: over queries for each key, or, under BY_ROW, over keys for each query. `first_column` of the product
    is the sum."""
    if BY_ROW:
        ds = ds.permute((1, 0))
    # [64, 64] x [64, 8]
    return warpgroup_mma(ds, ones.permute((1, 0)), acc, is_async=True)


@gluon.jit
def no_sums():
    """INIT_SUMS for sum_in_flight: zeros."""
    return gl.zeros([64, 8], gl.float32, product_layout(8))


@gluon.jit
def first_column(x):
    """The first column of x [M, N], as [M]."""
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.sum(gl.where(column[None, :] == 0, x, 0.0), 1)


@gluon.jit
def add_rows(sums, sums_ptr, tile, config):
    """Adds the sums of the queries of a tile of dQ to those in memory, in any order."""
    lanes = gl.arange(0, config.ROWS, gl.SliceLayout(1, sums.type.layout))
    gl.atomic_add(sums_ptr + tile.to(gl.int64) * config.ROWS + lanes, first_column(sums), sem="relaxed")


def by_row(x: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None, block: int) -> Tensor:
    """Numbers that lie in tiles of `block` queries, (..., block), in the order of an LSE of this shape."""
    if cu_seqlens is None:
        return x.reshape(*shape[:-1], -1)[..., : shape[-1]]
    total = shape[-1]
    token = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token.int(), right=True)
    first = cu_seqlens.long()[sequence]
    return x.reshape(shape[0], -1)[:, (first // block + sequence) * block + token - first]
