"""Block-sparse backward on Hopper: flash's, whose mainloop goes over lists of query tiles.

dQ is a sum without a fixed order, so its rounding differs from run to run. Deterministic calls take the plain kernels.
"""

import functools

from torch import Tensor

from attnzoo_kernels._gluon.backward_plan import Tile
from attnzoo_kernels._gluon.backward_tiles import KEYS, ROWS
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels._triton.call import Layout, layout
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.block_sparse.hopper_backward_kernel import hooks
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import HopperTile
from attnzoo_kernels.flash import hopper_backward as flash


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.sequences is not None:
        return "it has no packed sequences"
    if deterministic:
        return "its sums of dQ have no order"
    if options.block_q % ROWS.value or options.block_k % KEYS.value:
        return f"blocks must be multiples of 64 queries and 128 keys, got {options.block_q} x {options.block_k}"
    return why_not_tma(q, k, v)


@functools.lru_cache(maxsize=1024)
def _rule(q: Layout, k: Layout, options: Options, stages: int) -> tuple[Grid, flash.Rule]:
    grid = options.grid(q[0], k[0], HopperTile(ROWS.value, KEYS.value, stages))
    return grid, flash.Rule(hooks(q[0][-2] > k[0][-2]), options.scalars(grid, q[0], k[0], by_keys=True)[:4])


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
                    options: Options, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV as the plain path's launch_backward gives them, for calls that backward_reason accepts."""
    tile = tile or Tile()
    grid, rule = _rule(layout(q), layout(k), options, tile.stages)
    with on_device_of(q):
        lists = options.lists(mask, grid, q.shape, k.shape, by_keys=True)
    return flash.launch_backward(grad_out, grad_lse, q, k, v, out, stats, None, None, options, False, tile, rule=rule,
                                 own=(lists.order, lists.index, lists.count))[:3]
