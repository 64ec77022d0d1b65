"""Forgetting attention's forward for Hopper: flash's, with a bias by key.

A consumer's scores and statistics are relative to c at the start of its queries' block, as those of the plain kernels are.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels._gluon.forward_entry import hopper_fwd_kernel
from attnzoo_kernels._gluon.forward_launch import ForwardPlan, compiled_together, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import product_layout
from attnzoo_kernels._gluon.tile_scheduler import Span, span, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Layout, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.flash.hopper import forward_reason
from attnzoo_kernels.flash.options import C_BLOCK, KeyBias, Options
from attnzoo_kernels.flash.tiles import FORWARD_LENGTHS, hopper_forward_tile

__all__ = ["forward_reason", "launch_forward"]
BLOCK = gl.constexpr(C_BLOCK)


class Gates(NamedTuple):
    """KeyBias's tensors, and the factor from base 2 to the unit of the products."""

    c: Any
    starts: Any
    unit: Any


@gluon.jit
def _own(tensors, numbers, scale):
    """OWN."""
    return Gates(*tensors, 1 / scale)


class Near(NamedTuple):
    """For a consumer's span: the number of the first block of its sequence's and head's keys, that of its queries' block, and c at that
    block's start."""

    keys: Any
    queries: Any
    start: Any


@gluon.jit
def blocks_before(sequence, head, first, seqlen, problem, PACKED: gl.constexpr):
    """Blocks of c before those of a sequence and query head."""
    if PACKED:
        before = head * (seqlen // BLOCK + problem.n_seqs + 1) + first // BLOCK + sequence
    else:
        before = (sequence * problem.heads + head) * ((seqlen + BLOCK - 1) // BLOCK)
    return before


@gluon.jit
def _span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN, with a Near in `own`. A tile is one block of queries."""
    s = span(tile, ME, taken, program, config)
    problem = program.problem
    if config.PACKED:
        of_keys = problem.heads * (problem.seqlen_k // BLOCK + problem.n_seqs + 1)
    else:
        of_keys = problem.heads * problem.n_seqs * ((problem.seqlen_k + BLOCK - 1) // BLOCK)
    keys = blocks_before(tile.sequence, tile.head, tile.first_k, problem.seqlen_k, problem, config.PACKED)
    queries = of_keys + blocks_before(tile.sequence, tile.head, tile.first_q, problem.seqlen_q, problem, config.PACKED) + tile.row // BLOCK
    return Span(s.row, s.len_q, s.len_k, s.loaded_begin, s.loaded_end, s.begin, s.full_begin, s.full_end, s.end,
                Near(keys, queries, gl.load(program.own.starts + queries)))


@gluon.jit
def _key_bias(column, COUNT: gl.constexpr, s, program, config):
    """KEY_BIAS. Keys past a packed sequence's end may lie past the last block; they count as zero, and nothing sees them."""
    gates = program.own
    there = column < s.len_k
    block = s.own.keys + column // BLOCK
    j = gl.arange(0, COUNT, gl.SliceLayout(0, product_layout(COUNT)))
    apart = (gl.load(gates.starts + block, mask=there, other=0.0) - s.own.start).to(gl.float32)
    return gl.load(gates.c + block.to(gl.int64) * BLOCK + column % BLOCK + j, mask=(j >= 0) & there, other=0.0) + apart * gates.unit


@gluon.jit
def _more(tile, s, program, config):
    """MORE: c of the queries minus c at the start of their block."""
    rows = s.row % BLOCK + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    return gl.load(program.own.c + s.own.queries.to(gl.int64) * BLOCK + rows)


HOOKS = {"OWN": _own, "SPAN": _span, "KEY_BIAS": _key_bias, "MORE": _more}


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, q: Layout, k: Layout, v: Layout, options: Options) -> ForwardPlan:
    """Of a call's mean length; the kernels of all other lengths are compiled with it."""
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    lengths = seqlen_q // max(sequences, 1) if options.packed else seqlen_q, *FORWARD_LENGTHS
    return compiled_together(_plan_of_length(length, device, same_lengths, q, k, v, options) for length in lengths)


def _plan_of_length(length: int, device: torch.device, same_lengths: bool, q: Layout, k: Layout, v: Layout,
                    options: Options) -> ForwardPlan:
    _, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    tile = hopper_forward_tile(width, value_width, length, causal=True, window=options.window_left >= 0, packed=options.packed)
    if tile.consumers == 3:  # the bias would not fit into their registers, and a tile would not be one block of queries
        tile = ForwardTile(128, 3, prefetch_tile=True)
    tile = replace(tile, q_slots=1, joint_release=False, k_before_pv=False, row_max_not_negative=False)
    mask_in_loop = masks_in_loop(options.window_left, 0, 0 if same_lengths else None if options.packed else seqlen_k - seqlen_q, ROWS.value)
    head_group = heads_in_l2(seqlen_k, width + value_width) * (q[0][-2] // k[0][-2])
    return plan_forward(hopper_fwd_kernel, device, options, tile, q, k, v, {"head_group": head_group},
                        {"MASK_IN_LOOP": mask_in_loop, "EMPTY_ROWS": mask_in_loop} | HOOKS)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   bias: KeyBias) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for what forward_reason lets through. It passes over
    nothing."""
    out, lse, stats = outputs(q, v.shape[-1])
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    plan = _plan(q.device, q.dtype, same_lengths, layout(q), layout(k), layout(v), options)
    with on_device_of(q):
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), lse, stats, bias.c, bias.starts, cu_seqlens_q,
                    cu_seqlens_k, tile_counter(q.device))
    return out, lse, stats
