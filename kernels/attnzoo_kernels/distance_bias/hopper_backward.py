"""Attention with a bias by distance, backward for Hopper: flash's, with the bias added to scores, and sums of dS by distance.

The sums stay in registers as long as steps have one and the same entry of the table, and else go to memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_step import masked_scores, row_statistics
from attnzoo_kernels._gluon.backward_tiles import HALF, word
from attnzoo_kernels._gluon.diagonal_sums import DIAGONALS, add_all_diagonals, add_diagonals, diagonal_picks, no_diagonals
from attnzoo_kernels.distance_bias.hopper import entry, head_table, several
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.flash.options import DISTANCE_PAD, Options

ROWS = 64  # queries of a step


class Own(NamedTuple):
    table: Any  # of DistanceBias, in base 2
    sums: Any  # of dS by distance, laid out as the table, to which they are added; () if they are not wanted
    picks: Any  # diagonal_picks; () without sums
    count: Any  # entries of the table
    origin: Any


class HeadParams(NamedTuple):
    scale: Any
    own: Any
    entries: Any  # the head's entry 0
    sums: Any  # where the head's sums go
    first: Any  # the entry of the first query and of a consumer's first key; it may lie outside of the table
    dq_tile: Any


class StepParams(NamedTuple):
    first: Any  # the entry of a step's first query; it may lie outside of the table
    biased: Any  # the step's scores take several entries
    common: Any  # the entry if they take one


@gluon.jit
def _own(tensors, numbers, problem, dtype: gl.constexpr, config):
    """OWN: an Own."""
    sums = ()  # Triton 3.6 returns no struct with None in it
    picks = ()
    if tensors[1] is not None:
        sums = tensors[1]
        picks = diagonal_picks(dtype)
    return Own(tensors[0], sums, picks, numbers[0], numbers[1])


@gluon.jit
def _end_sums(products, step_params, head_params, dq_tile, config):
    """END_SUMS: the sums go to memory if the entries of this step and the next one are not all the same."""
    sums = products[0]
    first, count = step_params.first, head_params.own.count
    if several(first, HALF, count):
        add_diagonals(sums, head_params.sums + first)
        sums = no_diagonals()
    elif entry(first, count) != entry(first + (2 * config.ROWS - 1), count):
        add_all_diagonals(sums, head_params.sums + entry(first, count))
        sums = no_diagonals()
    return sums


@gluon.jit
def _store_sums(sums, head_params, bounds, config, ME: gl.constexpr):
    """STORE_SUMS: stores the sums since the last step that took several entries."""
    add_all_diagonals(sums, head_params.sums + entry(head_params.first + (bounds[3] - 1) * config.ROWS, head_params.own.count))


@gluon.jit
def _head_params(scale, own, smem, slot, member, dq_tile, problem, config, ME: gl.constexpr):
    """HEAD_PARAMS, with the query head's part of the table."""
    number = word(smem.work, slot, "kv_head") * problem.group + member
    first = word(smem.work, slot, "len_k") - word(smem.work, slot, "len_q") + own.origin - word(smem.work, slot, "key") - ME * HALF
    sums = ()
    if config.INIT_SUMS is not None:
        sums = head_table(own.sums, number, own.count)
    return HeadParams(scale, own, head_table(own.table, number, own.count), sums, first, dq_tile)


@gluon.jit
def _step_params(dq_tile, head_params, config):
    """STEP_PARAMS: a StepParams."""
    first = head_params.first + (dq_tile - head_params.dq_tile) * config.ROWS
    return StepParams(first, several(first, HALF, head_params.own.count), gl.load(head_params.entries + entry(first,
                                                                                                              head_params.own.count)))


@gluon.jit
def _weights(scores, step_params, smem, stage, head_params, low, high, config, MASKED: gl.constexpr):
    """WEIGHTS, with the bias."""
    x = scores * head_params.scale
    if step_params.biased:
        key = gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout)) ^ (HALF - 1)  # from the last one: XOR becomes constant offsets
        query = gl.arange(0, config.ROWS, gl.SliceLayout(0, x.type.layout))
        x += gl.load((head_params.entries + (step_params.first - (HALF - 1)) + key)[:, None] + query[None, :])
    common = gl.where(step_params.biased, 0.0, step_params.common)
    x = x - (row_statistics(smem.stats, stage, 0, config.ROWS, gl.SliceLayout(0, x.type.layout)) - common)[None, :]
    if MASKED:
        x = masked_scores(x, smem.columns, low, high, config)
    return gl.exp2(x)


HOOKS = (("OWN", _own), ("HEAD_PARAMS", _head_params), ("STEP_PARAMS", _step_params), ("WEIGHTS", _weights))
SUMS = (*DIAGONALS, ("END_SUMS", _end_sums), ("STORE_SUMS", _store_sums))


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, needs_dbias: bool, deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if needs_dbias and deterministic:
        return "its sums by distance have no order"
    if needs_dbias and max(q.shape[-1], v.shape[-1]) > 64:
        return f"the gradient of bias needs head_dim and value_dim of up to 64, got {q.shape[-1]} and {v.shape[-1]}"
    return flash.backward_reason(q, k, v, options)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options, table: Tensor, needs_dbias: bool,
                    deterministic: bool, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV, for calls that backward_reason accepts, and the sums of dS for each entry of the table, (heads, distances), if they are
    wanted. table: of DistanceBias. residual: as flash takes it."""
    sums = torch.zeros_like(table) if needs_dbias else None
    tile = flash.Tile(ROWS, dq_warp=deterministic or max(q.shape[-1], v.shape[-1]) <= 64)
    rule = flash.Rule(HOOKS + SUMS if needs_dbias else HOOKS, (options.distances, options.origin))
    dq, dk, dv, _ = flash.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options, deterministic, tile,
                                          rule=rule, own=(table, sums), residual=residual)
    return dq, dk, dv, _without_padding(sums) if needs_dbias else None


def _without_padding(sums: Tensor) -> Tensor:
    """The sums for the entries of a table from those for its padded form."""
    inside = sums[:, DISTANCE_PAD:-DISTANCE_PAD].clone()
    inside[:, 0] += sums[:, :DISTANCE_PAD].sum(1)
    inside[:, -1] += sums[:, -DISTANCE_PAD:].sum(1)
    return inside
