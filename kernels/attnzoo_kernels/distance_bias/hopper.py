"""Attention with a bias by distance, forward for Hopper: flash's, with the bias added to the scores of the tiles that need it.

A tile whose distances all take one entry of the table needs no addition to its scores: the entry goes with the rows' maxima. With a short
table most tiles are of this kind.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels.flash import hopper as flash
from attnzoo_kernels.flash.options import DISTANCE_PAD, Options

forward_reason = flash.forward_reason
PAD = gl.constexpr(DISTANCE_PAD)


class Own(NamedTuple):
    table: Any  # of DistanceBias, in base 2
    count: Any  # entries of the table
    origin: Any
    unit: Any  # the factor from base 2 to the unit of the products


class Near(NamedTuple):
    """For a consumer's span: the head's table, from entry 0 on, and the number of the entry for its first query and key 0."""

    entries: Any
    first: Any


@gluon.jit
def own(tensors, numbers, scale, config):
    """OWN: an Own."""
    return Own(tensors[0], numbers[0], numbers[1], 1 / scale)


@gluon.jit
def entry(x, count):
    """The number of the table's entry for a number that may lie outside of it."""
    return gl.minimum(gl.maximum(x, 0), count - 1)


@gluon.jit
def head_table(table, head, count):
    """The entry 0 of a head."""
    return table + (head.to(gl.int64) * (count + 2 * PAD) + PAD)


@gluon.jit
def several(first, COLUMNS: gl.constexpr, count):
    """Whether a tile of ROWS queries and COLUMNS keys, whose corner has the entry `first`, takes several entries."""
    return entry(first - (COLUMNS - 1), count) != entry(first + (ROWS - 1), count)


@gluon.jit
def _near(tile, row, program, config):
    """SPAN_PARAMS: a Near."""
    own = program.own
    return Near(head_table(own.table, tile.head, own.count), row + (tile.len_k - tile.len_q + own.origin))


@gluon.jit
def _tile_bias(column, s, program, config):
    """TILE_BIAS: minus the entry that all scores of a tile take; zero if they take several."""
    own = program.own
    first = s.own.first - column
    bias = gl.load(s.own.entries + entry(first, own.count))
    bias = gl.where(several(first, config.BLOCK_N, own.count), 0.0, -bias)
    return bias, bias * own.unit


@gluon.jit
def _scores(scores, column, s, program, config):
    """SCORE: with their bias, unless it is in TILE_BIAS."""
    own = program.own
    first = s.own.first - column
    if several(first, config.BLOCK_N, own.count):
        COLUMNS: gl.constexpr = scores.shape[1]
        i = gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, scores.type.layout))
        # counted from the last column: XOR of bits becomes constant offsets of the loads
        pointers = (s.own.entries + (first - (COLUMNS - 1)) + i)[:, None] + (j ^ (COLUMNS - 1))[None, :]
        scores += gl.load(pointers) * own.unit
    return scores


@gluon.jit
def _unmasked_from(last_step, s, program, config):
    """UNMASKED_FROM: the tiles that lie so far before the queries that all have the table's last entry, and need no mask. Tiles of keys
    come from the last one down."""
    unmasked = last_step
    if not config.HAS_LEFT:
        key = s.own.first - (program.own.count - 1) - (config.BLOCK_N - 1)  # the last one with which a tile may begin
        tile = gl.minimum(gl.maximum(key + config.BLOCK_N, 0) // config.BLOCK_N, s.full_end) - 1
        unmasked = s.begin + last_step - 1 - tile
    return unmasked


HOOKS = (("OWN", own), ("SPAN_PARAMS", _near), ("TILE_BIAS", _tile_bias), ("SCORE", _scores), ("UNMASKED_FROM", _unmasked_from),
         ("ROW_MAX_NOT_NEGATIVE", False))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   table: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts; residual, too.
    table: of DistanceBias."""
    many = 2 * options.distances > k.shape[-3]  # many tiles of keys take several entries
    rule = flash.Rule(HOOKS, (options.distances, options.origin), heavy=many)
    return flash.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, None, options, residual=residual, rule=rule, own=(table,))
