"""FlashAttention-3's forward for Hopper in Gluon: one warp loads through TMA; each consumer, a warp group of 64 queries, overlaps products
and softmax.

While the tensor cores compute P V of one tile of keys, they also compute Q K^T of the next (`_gluon.forward_mainloop`). Functions whose
docstrings begin with a word in capitals are hooks; `_gluon.forward_kernel.Config` says what each of them is for.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels._gluon.forward_consumer import finish_with_residual
from attnzoo_kernels._gluon.forward_entry import hopper_fwd_kernel
from attnzoo_kernels._gluon.forward_launch import OWN_TENSORS, ForwardPlan, compiled_together, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_producer import load_one_segment, produce_segments
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Call, Layout, filled, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.flash.options import Options
from attnzoo_kernels.flash.tiles import FORWARD_LENGTHS, hopper_forward_tile, takes_half_tile

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def own_sinks(tensors, numbers, scale, config):
    """OWN: the sinks."""
    return tensors[0]


@gluon.jit
def load_sink(tile, span, program, config):
    """EPILOGUE_PARAMS: the head's sink in base 2; -inf for rows after the last sequence, which have none."""
    there = tile.sequence < program.problem.n_seqs
    return gl.load(program.own + tile.head, mask=there, other=-float("inf")) * LOG2E


@gluon.jit
def add_sink(row_max, row_sum, sink, program, config):
    """ADD_SINK: adds the sink to the row maxima and sums, as the score of a key without a value. The output must be multiplied by `factor`.
    It is zero in a row whose sink is far larger than its scores; such a row still has statistics."""
    new_max = gl.maximum(row_max, sink)
    base = gl.where(new_max == -float("inf"), 0.0, new_max)
    factor = gl.exp2(row_max - base)
    return new_max, row_sum * factor + gl.exp2(sink - base), factor


class Rule(NamedTuple):
    """What another operator passes to `hopper_fwd_kernel` in place of a softmax's constants and hooks."""

    constants: tuple = ()  # pairs of name and value
    numbers: tuple = ()  # up to two, for the hook OWN
    heavy: bool = False  # its hooks need as many registers in most tiles as a window's mask does
    statistics: bool = True  # rows have an LSE and statistics


SOFTMAX = Rule()
SINKS = Rule((("OWN", own_sinks), ("EPILOGUE_PARAMS", load_sink), ("ADD_SINK", add_sink)))
RESIDUAL = {"FINISH": finish_with_residual, "OUT_SLOTS": 2}
IN_PARTS = {"PRODUCE": produce_segments, "LOAD_TILE": load_one_segment}  # hooks for tiles with `part`


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, has_residual: bool, q: Layout, k: Layout, v: Layout, options: Call,
          tile: ForwardTile | None = None, rule: Rule = SOFTMAX) -> ForwardPlan:
    """The plan for a call's mean length. The kernels for other lengths are compiled together with its kernel."""
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    lengths = (seqlen_q // max(sequences, 1) if options.packed else seqlen_q, *(FORWARD_LENGTHS if tile is None else ()))
    return compiled_together(lambda length: _plan_of_length(length, device, same_lengths, has_residual, q, k, v, options, tile, rule),
                             *lengths)


def _plan_of_length(length: int, device: torch.device, same_lengths: bool, has_residual: bool, q: Layout, k: Layout, v: Layout,
                    options: Call, tile: ForwardTile | None, rule: Rule) -> ForwardPlan:
    _, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    tile = tile or hopper_forward_tile(width, value_width, length, causal=options.causal, window=options.window_left >= 0 or rule.heavy,
                                       packed=options.packed)
    shift = 0 if same_lengths else None if options.packed else seqlen_k - seqlen_q
    mask_in_loop = masks_in_loop(options.window_left, options.window_right, shift, ROWS.value)
    own = dict(rule.constants)
    changed_in_loop = mask_in_loop or "SCORE" in own
    half_tile = options.causal and tile.part is None and takes_half_tile(tile, width, value_width, length, changed_in_loop)
    constants = {"MASK_IN_LOOP": mask_in_loop, "EMPTY_ROWS": mask_in_loop, "HALF_TILE": half_tile,
                 "ROW_MAX_NOT_NEGATIVE": tile.row_max_not_negative and not mask_in_loop}
    constants |= (RESIDUAL if has_residual else {}) | own
    columns = width + value_width
    if tile.part is not None:
        columns = q[0][-1] + value_width
        constants |= IN_PARTS
    head_group = heads_in_l2(seqlen_k, columns) * (q[0][-2] // k[0][-2])
    scalars = {"head_group": head_group} | dict(zip(("own_1", "own_2"), rule.numbers, strict=False))
    return plan_forward(hopper_fwd_kernel, device, options, tile, q, k, v, scalars, constants)


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if q.shape[-1] > 128 and (options.ranges or options.key_bias or options.distances > 0 or options.window_left >= 0):
        return f"head_dim must be 33 to 128 with a window, key ranges, forget gates or a bias by distance, got {q.shape[-1]}"
    if not (32 < q.shape[-1] <= 192 and 32 < v.shape[-1] <= 128):
        return f"head_dim must be 33 to 192 and value_dim 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0:
        return "it has no softcap, alibi_slopes or dropout_p"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, sinks: Tensor | None,
                   options: Call, tile: ForwardTile | None = None, residual: Tensor | None = None, rule: Rule = SOFTMAX,
                   own: tuple = ()) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts. residual: as that
    function has it.

    rule: another operator's Rule, for calls that its own forward_reason accepts; not with sinks. If its rows have no statistics, these and
    the LSE are None. own: up to four tensors or descriptors for the rule's OWN.
    """
    if sinks is not None:
        rule, own = SINKS, (sinks,)
    out, lse, stats = outputs(q, v.shape[-1]) if rule.statistics else (q.new_empty(*q.shape[:-1], v.shape[-1]), None, None)
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    plan = _plan(q.device, q.dtype, same_lengths, residual is not None, layout(q), layout(k), layout(v), options, tile, rule)
    with on_device_of(q):
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), None if residual is None else plan.output(residual),
                    lse, stats, *filled(own, OWN_TENSORS), cu_seqlens_q, cu_seqlens_k, tile_counter(q.device))
    return out, lse, stats
