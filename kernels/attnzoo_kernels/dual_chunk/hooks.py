"""Hooks of `_triton`'s mainloops for tiles of queries: the mainloop goes over the keys relation by relation.

Queries and keys are read from copies that are rotated for the relations. So each relation begins by loading another copy of the same
queries.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.forward import load_first_operand
from attnzoo_kernels._triton.mainloop import QueryTile, range_loop
from attnzoo_kernels._triton.tiles import head_rows
from attnzoo_kernels.dual_chunk.chunks import chunks_apart, key_copy, query_copy, relation_range


class Chunked(NamedTuple):
    """A tile of queries: its Operands of rotated copies, `batches` batch rows each, and where it lies among the chunks."""

    queries: Any
    keys: Any
    batches: Any
    index: Any  # number of its chunk
    chunk: Any
    relations: Any  # bit n: keys n chunks apart are attended to (2: two or more)
    position: Any  # position of its first query
    group: Any
    CAUSAL: Any
    ROTARY_DIM: Any = None  # from here on dQ only; not in Rotation, because Triton 3.6 loses constants of a nested tuple
    INTERLEAVED: Any = None
    HAS_MULTIPLIER: Any = None
    rotation: Any = None  # Rotation, whose stride of one query is the constant 1
    END: Any = True  # a struct of structs must end with a constant (fault 18)


class Relation(NamedTuple):
    """What a mask needs: the queries' positions [BLOCK_M], and the end of the relation's keys."""

    position: Any
    end: Any
    CAUSAL: Any


@triton.jit
def key_bounds(relation, own, place, BLOCK_N: tl.constexpr):
    """(begin, full_end, end) of a relation's keys. begin .. full_end are whole tiles that all queries of the tile see."""
    begin, end = relation_range(relation, own.index, own.chunk, 0, place.other_length)
    full_end = end
    if own.CAUSAL:
        end = tl.minimum(end, own.position + place.length - place.row)
        full_end = tl.minimum(full_end, own.position + 1)
    end = tl.where((own.relations >> chunks_apart(relation)) & 1 == 1, end, begin)
    full_end = begin + tl.maximum(tl.minimum(full_end, end) - begin, 0) // BLOCK_N * BLOCK_N
    return begin, full_end, end


@triton.jit
def seen(x, own, i, j, position):
    """MASK: which keys j [1, N] the queries see among those before `end`."""
    last = own.position[:, None] * 0 + (own.end - 1)
    if own.CAUSAL:
        last = tl.minimum(last, own.position[:, None])
    return j <= last


@triton.jit
def relation_loops(STEP: tl.constexpr, state, x, own, relation, Q_SELECT: tl.constexpr):
    """Steps over one relation's keys, with its copies of queries and keys."""
    begin, full_end, end = key_bounds(relation, own, x.place, x.shape.BLOCK_N)
    q_rows = head_rows(own.queries, query_copy(relation) * own.batches + x.place.batch, x.place.head, x.place.first, x.place.length,
                       x.shape.TMA)
    q = load_first_operand(q_rows, x.place.row, x.shape, False, Q_SELECT)
    k_rows = head_rows(own.keys, key_copy(relation) * own.batches + x.place.batch, x.place.head // own.group, x.place.other_first,
                       x.place.other_length, x.shape.TMA)
    position = own.position + tl.arange(0, x.shape.BLOCK_M)
    for part in tl.static_range(2):
        # TMA reads zeros beyond a dense sequence; pointers and packed neighbours need a guard on tiles that may cross the end
        state = range_loop(
            STEP, state, QueryTile(q, x.do, x.stats, k_rows, x.value_rows, x.place, x.i, x.unit, x.shape, x.EXACT_DELTA),
            Relation(position, end, own.CAUSAL), begin if part == 0 else full_end, full_end if part == 0 else end, 0, 0, x.shape.BLOCK_N,
            "none" if part == 0 else "all", part == 1 and (x.shape.PACKED or not x.shape.TMA), None)
    return state


@triton.jit
def first_relation(own):
    """The first relation that has any keys."""
    return tl.maximum(2 - tl.maximum(own.index, 0), 0)
