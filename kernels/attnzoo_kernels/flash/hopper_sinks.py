"""The Hopper backward of calls whose sinks have a gradient: flash's, with the sums of dS by query beside dQ, dK and dV.

A sink's gradient is a sum of its weight times delta over all queries, in which delta as rowsum(dO * O) would add up the rounding of O. The
sums of dS tell what is missing: they are the true delta less the one in use, times the weight of all keys. They are added up in any order.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import mainloop_with_own
from attnzoo_kernels._gluon.backward_plan import mainloop_width
from attnzoo_kernels._gluon.backward_step import pair_step
from attnzoo_kernels._gluon.backward_sums import add_rows, by_row, dscores_of, no_sums, ones_and_columns, sum_in_flight
from attnzoo_kernels._gluon.hopper import warpgroup_mma_wait
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.flash.options import Options


class Own(NamedTuple):
    rows: Any  # where sums of dS by query are added to, in tiles like those of dQ
    ones: Any
    columns: Any  # of pair_tiles


@gluon.jit
def _own(tensors, numbers, problem, dtype: gl.constexpr, c):
    """OWN."""
    ones, columns = ones_and_columns(dtype, c)
    return Own(tensors[0], ones, columns)


@gluon.jit
def _columns(own):
    """COLUMNS."""
    return own.columns


@gluon.jit
def _step(dk, dv, smem, bars, dq_desc, made, step, some, head, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP: pair_step with the sums. made: the step's own tile, as no DQ_LAGS is ever taken."""
    scale, own = head
    dk, dv = pair_step(dk, dv, smem, bars, dq_desc, made, step, some, scale, low, high, c, ME, MASKED)
    ds = dscores_of(smem, step, ME)
    for n in gl.static_range(c.ROWS // 64):
        rows = warpgroup_mma_wait(0, deps=(sum_in_flight(ds, n * 64, True, no_sums(), own.ones),))
        add_rows(rows, own.rows, made, n * 64, c)
    return dk, dv


RULE = flash.Rule((("OWN", _own), ("COLUMNS", _columns), ("MAINLOOP", mainloop_with_own), ("STEP", _step)))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                    into: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and delta less dLSE, which lies as the LSE does, in two parts: less the second times the weight of the sink."""
    sequences, seqlen, seqlen_k = options.sizes(q.shape, k.shape)
    width = mainloop_width(q.shape[-1], v.shape[-1])
    tile = replace(flash.backward_tile(width, False, False, options.window_left >= 0, 0), dq_lags=False)
    rows = torch.zeros(options.programs(q.shape[-2], seqlen, sequences, tile.rows), tile.rows, dtype=torch.float32, device=q.device)
    dq, dk, dv, row_stats = flash.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options, False, tile,
                                                  into, RULE, own=(rows,))
    sums, in_use = (by_row(x, stats.shape[1:], cu_seqlens_q, tile.rows) for x in (rows, row_stats[:, 0, tile.rows :]))
    delta = sums + in_use
    return dq, dk, dv, torch.stack((delta if grad_lse is None else delta - grad_lse, in_use))
