"""Forgetting attention's backward for Hopper: flash's backward with a bias by key. It also sums dS by key and by query.

Both sums are products with ones, of the same rounded dS from which dK and dQ are made; otherwise their errors would add up over a sequence.
The sums by query are added up in any order. If the order must be fixed, plain Triton's backward takes the call.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels import autograd
from attnzoo_kernels._gluon.backward_step import softmax_weights
from attnzoo_kernels._gluon.backward_sums import add_rows, by_row, first_column, no_sums, ones_and_columns, sum_in_flight
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, KeyTile, next_key_tile, word
from attnzoo_kernels._gluon.hopper import product_layout
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.flash.options import C_BLOCK, KeyBias, Options
from attnzoo_kernels.forgetting.hopper import block_start, start_difference

BLOCK = gl.constexpr(C_BLOCK)
ROWS = 64  # queries of a step: at width 64 the scores of 128 queries and the bias together would spill


class Own(NamedTuple):
    c: Any  # of KeyBias; only the blocks of keys are used: query i is on the diagonal of key i, so that both have the same c
    starts: Any
    columns: Any  # where the sums of dS by key are stored, in blocks like c's
    rows: Any  # to which the sums of dS by query are added, in tiles like those of dQ
    ends: Any  # of KeyBias; () without pruning
    ones: Any  # the ones of sum_in_flight, in shared memory
    numbers: Any  # the `columns` of pair_tiles, in shared memory


@gluon.jit
def _own(tensors, numbers, problem, dtype: gl.constexpr, config):
    """OWN: an Own."""
    ends = ()  # Triton 3.6 returns no struct with None in it
    if tensors[4] is not None:
        ends = tensors[4]
    ones, columns = ones_and_columns(dtype, config)
    return Own(tensors[0], tensors[1], tensors[2], tensors[3], ends, ones, columns)


@gluon.jit
def _columns(own):
    """COLUMNS: shared memory for the `columns` of pair_tiles."""
    return own.numbers


@gluon.jit
def _blocks(batch, number, kv_head, key, problem, config):
    """(number of the block of c with the keys from `key` on for a group's first query head, blocks of a query head)."""
    if config.PACKED:
        head_tiles = problem.seqlen_k // BLOCK + problem.n_seqs + 1
        block = kv_head * problem.group * head_tiles + number % head_tiles
    else:
        head_tiles = (problem.seqlen_k + KEYS - 1) // KEYS
        block = (batch * problem.kv_heads + kv_head) * problem.group * head_tiles + key // KEYS
    return block, head_tiles


@gluon.jit
def _pruned_tile(problem, own, config):
    """NEXT_TILE: next_key_tile, whose steps end with the last queries that do not skip the tile, for any query head of the group."""
    t, sequence, first_q = next_key_tile(problem, own, config)
    block, head_tiles = _blocks(t.batch, t.number, t.kv_head, t.key, problem, config)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    last = 0
    for first in range(0, problem.group, 32):
        member = first + lanes
        there = (member < problem.group) & (t.more != 0)
        last = gl.maximum(last, gl.max(gl.load(own.ends + (block + member * head_tiles), mask=there, other=0), 0))
    end = gl.maximum(gl.minimum(t.end, last * (BLOCK // config.ROWS)), t.begin)
    return KeyTile(t.more, t.batch, t.kv_head, t.key, t.begin, gl.minimum(t.full_begin, end), gl.minimum(t.full_end, end), end, t.len_q,
                   t.len_k, t.first_k, t.dq_tile, t.number), sequence, first_q


class HeadParams(NamedTuple):
    """What the steps of a query head take in place of the scale."""

    scale: Any
    unit: Any  # the factor from base 2 to the unit of the products q·k
    own: Any
    start: Any  # c at the start of the keys' block, in two parts
    near: Any  # c of a consumer's keys minus `start`
    tile: Any  # number of the keys' block of c
    first_tile: Any  # number of the first block of c of the sequence and head
    dq_tile: Any  # number of the first tile of dQ of the sequence and head


@gluon.jit
def _head_params(scale, own, smem, slot, member, dq_tile, problem, config, ME: gl.constexpr):
    """HEAD_PARAMS: a HeadParams."""
    key = word(smem.work, slot, "key")
    first, head_tiles = _blocks(word(smem.work, slot, "batch"), word(smem.work, slot, "number"), word(smem.work, slot, "kv_head"), key,
                                problem, config)
    tile = first + member * head_tiles
    start = block_start(own.starts, tile)
    keys = tile.to(gl.int64) * KEYS + ME * HALF
    near = gl.load(own.c + keys + gl.arange(0, HALF, gl.SliceLayout(1, product_layout(config.ROWS))))
    return HeadParams(scale, 1 / scale, own, start, near, tile, tile - key // KEYS, dq_tile)


@gluon.jit
def _step_params(dq_tile, head_params, config):
    """STEP_PARAMS: c at the start of the keys' block minus c at the start of the queries' block, in the unit of the products."""
    j = dq_tile - head_params.dq_tile
    return start_difference(head_params.start, block_start(head_params.own.starts,
                                                           head_params.first_tile + j * config.ROWS // BLOCK)) * head_params.unit


@gluon.jit
def _weights(scores, difference, smem, stage, head_params, low, high, config, MASKED: gl.constexpr):
    """WEIGHTS, with the bias. difference: as _step_params gives it."""
    return softmax_weights(scores - (head_params.near + difference)[:, None], difference, smem, stage, head_params.scale, low, high, config,
                           MASKED)


@gluon.jit
def _start_sums(columns, ds, head_params, smem, config, ME: gl.constexpr):
    """START_SUMS: the products that sum dS of a step by key and by query."""
    ones = head_params.own.ones
    return sum_in_flight(ds, False, columns, ones), sum_in_flight(ds, True, no_sums(), ones)


@gluon.jit
def _end_sums(products, difference, head_params, dq_tile, config):
    """END_SUMS: adds the sums by query to global memory."""
    columns, rows = products
    add_rows(rows, head_params.own.rows, dq_tile, config)
    return columns


@gluon.jit
def _store_sums(columns, head_params, bounds, config, ME: gl.constexpr):
    """STORE_SUMS: stores the sums by key."""
    keys = head_params.tile.to(gl.int64) * KEYS + ME * HALF
    gl.store(head_params.own.columns + keys + gl.arange(0, HALF, gl.SliceLayout(1, columns.type.layout)), first_column(columns))


HOOKS = (("OWN", _own), ("COLUMNS", _columns), ("HEAD_PARAMS", _head_params), ("STEP_PARAMS", _step_params), ("WEIGHTS", _weights),
         ("INIT_SUMS", no_sums), ("START_SUMS", _start_sums), ("END_SUMS", _end_sums), ("STORE_SUMS", _store_sums))
PRUNED = (("NEXT_TILE", _pruned_tile),)


def backward_reason(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                    deterministic: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if deterministic:
        return "its sums have no fixed order"
    if q.dtype == torch.float16:
        return "the gradient of log_f would break the error rule in float16"
    if q.shape[:-2] != k.shape[:-2] or cu_seqlens_q is not None and cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
        return "queries and keys must have the same lengths, and cu_seqlens_q and cu_seqlens_k be one tensor"
    return flash.backward_reason(q, k, v, options)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens: Tensor | None, options: Options, bias: KeyBias,
                    residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and the sums of dS by key and by query, laid out as the LSE is, for calls that backward_reason accepts. residual: as flash
    takes it."""
    sequences, seqlen, _ = options.sizes(q.shape, k.shape)
    heads = q.shape[-2]
    columns = torch.empty(options.programs(heads, seqlen, sequences, C_BLOCK) * C_BLOCK, dtype=torch.float32, device=q.device)
    rows = torch.zeros(options.programs(heads, seqlen, sequences, ROWS) * ROWS, dtype=torch.float32, device=q.device)
    tile = flash.Tile(ROWS, dq_warp=True) if max(q.shape[-1], v.shape[-1]) <= 64 else flash.Tile(ROWS)
    dq, dk, dv, _ = flash.launch_backward(
        grad_out, grad_lse, q, k, v, out, stats, cu_seqlens, cu_seqlens, options, False, tile,
        rule=flash.Rule(HOOKS + PRUNED if options.pruned else HOOKS),
        own=(bias.c, bias.starts, columns, rows, bias.ends if options.pruned else None), residual=residual)
    shape = autograd.lse_shape(q, options.packed)
    return dq, dk, dv, by_row(columns, shape, cu_seqlens, C_BLOCK), by_row(rows, shape, cu_seqlens, ROWS)

