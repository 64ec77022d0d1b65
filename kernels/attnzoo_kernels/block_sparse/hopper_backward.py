"""Block-sparse backward on Hopper: row statistics and an empty float32 dQ, one mainloop along the keys' lists, dQ written out.

dQ is a sum without an order, so that its rounding differs from run to run; deterministic calls go to the plain kernels.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._gluon.backward_plan import Tile, frame, mainloop_width, sources
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, ROWS
from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._triton.call import Layout, layout
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.block_sparse.hopper_backward_kernel import block_sparse_bwd_hopper_kernel
from attnzoo_kernels.block_sparse.lists import Grid
from attnzoo_kernels.block_sparse.options import Options
from attnzoo_kernels.block_sparse.tiles import HopperTile


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


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    tile: Tile
    width: int
    grid: Grid
    preprocess: Launch
    mainloop: Launch
    postprocess: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, q: Layout, k: Layout, v: Layout, out: Layout, grad_out: Layout,
          dq: Layout, options: Options, tile: Tile | None = None) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    heads, kv_heads = q[0][-2], k[0][-2]
    width, tile = mainloop_width(q[0][-1], v[0][-1]), tile or Tile()
    grid = options.grid(q[0], k[0], HopperTile(ROWS.value, KEYS.value, tile.stages))
    query_tiles = options.programs(heads, seqlen_q, sequences, ROWS.value)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    preprocess, postprocess = frame(options, q, out, grad_out, dq, ROWS.value, width, value_dim=v[0][-1], has_grad_lse=has_grad_lse,
                                    ordered=False)
    stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, *_ = options.scalars(grid, q[0], k[0], by_keys=True)
    mainloop = Launch(
        block_sparse_bwd_hopper_kernel, min(key_tiles, multiprocessors(device)),
        (stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, options.window_left, options.window_right, seqlen_q, seqlen_k,
         kv_heads, heads // kv_heads, query_tiles // (heads * sequences), key_tiles),
        {"WIDTH": width, "GROUPED": heads > kv_heads, "HAS_LEFT": options.window_left >= 0, "HAS_RIGHT": options.window_right >= 0,
         "STAGES": tile.stages, "REGISTERS": tile.registers, "LOAD_REGISTERS": tile.load_registers}, 4, 1)
    return Plan(tile, width, grid, preprocess, mainloop, postprocess)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor,
                    options: Options, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV as the plain path's launch_backward gives them, for what backward_reason lets through."""
    grad_out = tma_gradient(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    plan = _plan(q.device, q.dtype, grad_lse is not None, *map(layout, (q, k, v, out, grad_out, dq)), options, tile)
    query_tiles, width = plan.preprocess.programs, plan.width
    row_stats = stats.new_empty(query_tiles, 1, 2 * ROWS.value)
    dq_sum = stats.new_empty(1, query_tiles * ROWS.value * width // 32, 1, 32)
    counter, semaphore = (torch.empty(n, dtype=torch.int32, device=q.device) for n in (1, 0))
    with on_device_of(q):
        lists = options.lists(mask, plan.grid, q.shape, k.shape, by_keys=True)
        plan.preprocess(out, grad_out, stats, grad_lse, row_stats, dq_sum, counter, semaphore, None)
        plan.mainloop(*sources((q, k, v, grad_out), ROWS.value, width), descriptor(row_stats, 1, 2 * ROWS.value),
                      descriptor(dk, HALF.value, width), descriptor(dv, HALF.value, width),
                      descriptor(dq_sum, ROWS.value * width // 64, 32), lists.order, lists.index, lists.count, counter)
        plan.postprocess(dq_sum, semaphore, dq, None)
    return dq, dk, dv
