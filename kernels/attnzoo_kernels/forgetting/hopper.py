"""Forgetting attention's forward for Hopper: flash's forward, with a bias by key.

The bias c_i - c_j of a score has three terms. Minus c of the key, relative to the start of its block, is added by the tensor cores, from
shared memory, where it lies in three parts (`empty_parts`). The difference of the two blocks' starts is the same for all scores of a step
and is subtracted together with the row maximum (TILE_BIAS). c of the query, relative to the start of its block, is the same for all scores
of a row. It is left out and added to the LSE only (LSE_BIAS), so that the statistics lack it, as those of the plain kernels do.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, tiles_like
from attnzoo_kernels._gluon.hopper import descriptor, load_tile, product_layout
from attnzoo_kernels._gluon.tile_scheduler import Span, Tile, loaded_tiles, next_tile, span
from attnzoo_kernels.flash import hopper as flash
from attnzoo_kernels.flash.options import C_BLOCK, KeyBias, Options

forward_reason = flash.forward_reason
BLOCK = gl.constexpr(C_BLOCK)


class Gates(NamedTuple):
    desc: Any  # of the keys' parts; a box is a block
    parts: Any  # [STAGES, 16, BLOCK] in shared memory; TMA fills the rows behind the three parts with zeros
    c: Any  # of KeyBias
    starts: Any  # of KeyBias
    unit: Any  # the factor from base 2 to the unit of the products q·k
    ends: Any  # of the blocks of queries, from KeyBias; () without pruning


class Near(NamedTuple):
    """`own` of a consumer's span."""

    keys: Any  # number of the first block of keys of its sequence and head
    queries: Any  # number of the block of its queries
    start: Any  # c at that block's start, in two parts


@gluon.jit
def _own(tensors, numbers, scale, config):
    """OWN: a Gates."""
    ends = ()  # Triton 3.6 returns no struct with None in it
    if tensors[3] is not None:
        ends = tensors[3]
    return Gates(tensors[0], tiles_like(tensors[0], config.STAGES), tensors[1], tensors[2], 1 / scale, ends)


@gluon.jit
def block_start(starts, block, there=True):
    """c at a block's start, in two float32 parts. One float64 addition in each step would cost a fifth of the forward's time."""
    return gl.load(starts + 2 * block, mask=there, other=0.0), gl.load(starts + 2 * block + 1, mask=there, other=0.0)


@gluon.jit
def start_difference(keys, queries):
    """c at the start of the keys' block minus c at the start of the queries' block. All kernels add the parts up in this order."""
    return (keys[0] - queries[0]) + (keys[1] - queries[1])


@gluon.jit
def blocks_before(sequence, head, first, seqlen, problem, PACKED: gl.constexpr):
    """Blocks of c before those of a sequence and query head."""
    if PACKED:
        before = head * (seqlen // BLOCK + problem.n_seqs + 1) + first // BLOCK + sequence
    else:
        before = (sequence * problem.heads + head) * ((seqlen + BLOCK - 1) // BLOCK)
    return before


@gluon.jit
def _load_bias(slot, tile, key, program, config):
    """LOAD_BIAS. Keys past a packed sequence's end may get zeros or another block's numbers: no query sees them."""
    problem = program.problem
    block = blocks_before(tile.sequence, tile.head, tile.first_k, problem.seqlen_k, problem, config.PACKED) + key // BLOCK
    load_tile(program.own.desc, program.own.parts, program.bars.k_full, slot, block, 0, 0)


@gluon.jit
def _key_bias(slot, KEYS: gl.constexpr, program, config):
    """KEY_BIAS: the start of the keys' block minus c of the keys."""
    return program.own.parts.index(slot).slice(0, KEYS, dim=1)


@gluon.jit
def _tile_bias(column, s, program, config):
    """TILE_BIAS: the difference of c at the starts of the two blocks. Only in a consumer's first tile of keys it may be below zero."""
    difference = start_difference(block_start(program.own.starts, s.own.keys + column // BLOCK, column < s.len_k), s.own.start)
    return difference, difference * program.own.unit


@gluon.jit
def _next_tile(index, program, config):
    """NEXT_TILE. OPTIONS says whether tiles are pruned: then the consumers also get the first tile of keys that is not skipped."""
    t = next_tile(index, program, config)
    words, own = t.words, t.own
    if config.OPTIONS:
        problem = program.problem
        there = t.index < problem.n_tiles
        ends = program.own.ends + blocks_before(t.sequence, t.head, t.first_q, problem.seqlen_q, problem, config.PACKED)
        first = gl.load(ends + t.row // BLOCK, mask=there, other=0)
        if config.CONSUMERS * ROWS > BLOCK:  # 192 queries lie in two blocks
            last = gl.minimum(t.row + config.CONSUMERS * ROWS, t.len_q) - 1
            first = gl.minimum(first, gl.load(ends + last // BLOCK, mask=there, other=0))
        own = (first,)
        words = words + own
    return Tile(t.index, words, t.sequence, t.head, t.row, t.first_q, t.len_q, t.first_k, t.len_k, own)


@gluon.jit
def _loaded(tile, program, config):
    """LOADED_TILES, without the skipped tiles of keys."""
    begin, end = loaded_tiles(tile, program, config)
    if config.OPTIONS:
        begin = gl.minimum(gl.maximum(begin, tile.own[0]), end - 1)
    return begin, end


@gluon.jit
def _span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN, with a Near in `own`. A consumer's queries lie in one block."""
    s = span(tile, ME, taken, program, config)
    begin, end = s.begin, s.end
    if config.OPTIONS:
        begin = gl.maximum(begin, s.loaded_begin)
        end = gl.maximum(end, begin + 1)
    problem = program.problem
    if config.PACKED:
        of_keys = problem.heads * (problem.seqlen_k // BLOCK + problem.n_seqs + 1)
    else:
        of_keys = problem.heads * problem.n_seqs * ((problem.seqlen_k + BLOCK - 1) // BLOCK)
    keys = blocks_before(tile.sequence, tile.head, tile.first_k, problem.seqlen_k, problem, config.PACKED)
    queries = of_keys + blocks_before(tile.sequence, tile.head, tile.first_q, problem.seqlen_q, problem, config.PACKED)
    queries += gl.minimum(s.row, s.len_q - 1) // BLOCK
    return Span(s.row, s.len_q, s.len_k, s.loaded_begin, s.loaded_end, begin, s.full_begin, s.full_end, end,
                Near(keys, queries, block_start(program.own.starts, queries)))


@gluon.jit
def _lse_bias(tile, s, program, config):
    """LSE_BIAS: c of the queries minus c at the start of their block."""
    rows = s.row % BLOCK + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    return gl.load(program.own.c + s.own.queries.to(gl.int64) * BLOCK + rows)


# OUT_SLOTS: no shared memory is left for more outputs
HOOKS = (("OWN", _own), ("NEXT_TILE", _next_tile), ("LOADED_TILES", _loaded), ("LOAD_BIAS", _load_bias), ("KEY_BIAS", _key_bias),
         ("TILE_BIAS", _tile_bias), ("SPAN", _span), ("LSE_BIAS", _lse_bias), ("OUT_SLOTS", None))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   bias: KeyBias, parts: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts. bias, parts: as
    `blocks.key_bias` makes them. residual: where the output's rounding error is stored, a tensor like the output."""
    sequences, _, seqlen_k = options.sizes(q.shape, k.shape)
    of_keys = options.programs(q.shape[-2], seqlen_k, sequences, C_BLOCK)
    own = descriptor(parts[:, :, None], 16, C_BLOCK), bias.c, bias.starts, bias.ends[of_keys:] if options.pruned else None
    rule = flash.Rule((*HOOKS, ("OPTIONS", options.pruned), ("TILE_WORDS", 4 if options.pruned else None)))
    return flash.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, None, options, residual=residual, rule=rule, own=own)
