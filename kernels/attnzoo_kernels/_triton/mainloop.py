"""The loops over tiles, which all passes share, and the structs that a step in them reads.

The forward and dQ have a tile of queries and go over the keys; dK and dV have a tile of keys and go over the queries. What a loop goes over
is called the other side.

A step is a jit function `STEP(state, x, own, at, position, edge, MASKED, GUARD)` that returns the next state:
    x               the program's tile, a QueryTile or a KeyTile
    own             the variant's own struct, which its hooks read
    at              the first row of the other side's tile
    position        the tile's place in a list of tiles; 0 if there is no list
    MASKED, edge    which tiles need a mask: "none", "all", or under "edges" those for which `edge` is true
    GUARD           the tile may cross the sequence's end, so that loads must check
A variant's step names its hooks and calls a step of `_triton.forward` or `_triton.backward`. docs/add-a-variant.md lists the hooks with
their arguments and results.

Structs that hold constants must be made in the call that takes them. Assigned to a name first, they would hold tensors in place of
constants. No field may be called `values` or `type`, because Triton gives these to every tuple.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.tiles import load_rows


class RowStats(NamedTuple):
    """What the backward knows of each row of queries."""

    lse_log2: Any  # the LSE in base 2; for float32 inputs the row maximum, in natural units
    row_sum: Any  # the softmax's sum, for float32 inputs only
    delta: Any  # rowsum(dO * O) - dLSE


class QueryTile(NamedTuple):
    """A program's tile of queries, and the keys and values that a forward or dQ loads for it."""

    q: Any  # [BLOCK_M, BLOCK_D]
    do: Any  # [BLOCK_M, BLOCK_DV]; None in the forward
    stats: Any  # RowStats; None in the forward
    key_rows: Any  # Rows
    value_rows: Any  # Rows
    place: Any  # Place of the queries
    i: Any  # [BLOCK_M, 1], the queries' rows
    unit: Any  # the factor that turns SCORE's scores into the softmax's units, see `_triton.scores`
    shape: Any  # Shape
    EXACT_DELTA: Any  # in dQ: whether row sums of weights times their gradients are wanted, see dq_step
    KEPT: Any = True  # in dQ: whether this is the last sweep over the keys


class KeyTile(NamedTuple):
    """A program's tile of keys and values, and the queries and output gradients that dK/dV loads for it."""

    k: Any  # [BLOCK_N, BLOCK_D]
    v: Any  # [BLOCK_N, BLOCK_DV]
    query_rows: Any  # Rows
    grad_rows: Any  # Rows
    row_stats: Any  # pointer to the row statistics of the sequence's first row; the statistics lie stride_rows apart
    stride_rows: Any
    place: Any  # Place of the keys; its head is the key head
    head: Any  # the query head
    j: Any  # [BLOCK_N, 1], the keys' rows
    unit: Any  # as in QueryTile
    shape: Any  # Shape


@triton.jit
def load_keys(x, rows, at, GUARD: tl.constexpr):
    """Keys at .. at + BLOCK_N for a QueryTile, [BLOCK_N, BLOCK_D]."""
    return load_rows(rows, at, x.shape.HEAD_DIM, x.shape.BLOCK_N, x.shape.BLOCK_D, GUARD, x.shape.TMA)


@triton.jit
def load_values(x, at, GUARD: tl.constexpr):
    """The values of these keys, [BLOCK_N, BLOCK_DV]."""
    return load_rows(x.value_rows, at, x.shape.VALUE_DIM, x.shape.BLOCK_N, x.shape.BLOCK_DV, GUARD, x.shape.TMA)


@triton.jit
def load_query_rows(x, rows, at, GUARD: tl.constexpr):
    """Queries at .. at + BLOCK_M for a KeyTile, [BLOCK_M, BLOCK_D]."""
    return load_rows(rows, at, x.shape.HEAD_DIM, x.shape.BLOCK_M, x.shape.BLOCK_D, GUARD, x.shape.TMA)


@triton.jit
def load_gradients(x, at, GUARD: tl.constexpr):
    """The output's gradients of these queries, [BLOCK_M, BLOCK_DV]."""
    return load_rows(x.grad_rows, at, x.shape.VALUE_DIM, x.shape.BLOCK_M, x.shape.BLOCK_DV, GUARD, x.shape.TMA)


@triton.jit
def masked(scores, otherwise, x, own, i, j, position, edge, MASKED: tl.constexpr, MASK: tl.constexpr):
    """A tile of scores or weights, with `otherwise` where MASK says that a query does not see a key."""
    if MASKED == "all":
        scores = tl.where(MASK(x, own, i, j, position), scores, otherwise)
    elif MASKED == "edges":
        if edge:
            scores = tl.where(MASK(x, own, i, j, position), scores, otherwise)
    return scores


@triton.jit
def window_seen(x, own, i, j, position):
    """MASK of forward and dQ: which keys j [1, N] the queries i [M, 1] of a QueryTile see in own.window."""
    return keys_seen(i, j, x.place.length, x.place.other_length, own.window)


@triton.jit
def window_seen_transposed(x, own, i, j, position):
    """MASK of dK/dV: which queries i [1, M] see the keys j [N, 1] of a KeyTile."""
    return queries_seeing(i, j, x.place.other_length, x.place.length, own.window)


@triton.jit
def range_loop(STEP: tl.constexpr, state, x, own, begin, end, full_begin, full_end, BLOCK: tl.constexpr, MASKED: tl.constexpr,
               GUARD: tl.constexpr, STAGES: tl.constexpr):
    """Steps over the rows begin .. end. Under MASKED "edges", tiles outside of full_begin .. full_end need a mask."""
    for at in tl.range(begin, end, BLOCK, num_stages=STAGES):
        edge = False
        if MASKED == "edges":
            edge = (at < full_begin) | (at >= full_end)
        state = STEP(state, x, own, at, 0, edge, MASKED, GUARD)
    return state


@triton.jit
def range_loops(STEP: tl.constexpr, state, x, own, bounds, BLOCK: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr,
                TAIL: tl.constexpr, ONE_LOOP: tl.constexpr, SHORT_BEHIND: tl.constexpr, SHORT_TAIL: tl.constexpr):
    """Steps over the bounds of key_ranges or query_ranges, in up to four loops: masked tiles BEFORE the full ones, the full tiles, which
    need no mask, masked tiles BEHIND them, and the TAIL that crosses the sequence's end. ONE_LOOP: one loop for all but the tail, in which
    masking is a branch.

    SHORT_BEHIND, SHORT_TAIL: that loop runs for one or two tiles only and is not pipelined.
    """
    for part in tl.static_range(4):
        if part == 0 and (BEFORE or ONE_LOOP) or part == 1 and not ONE_LOOP or part == 2 and BEHIND and not ONE_LOOP or part == 3 and TAIL:
            state = range_loop(
                STEP, state, x, own, bounds[part], bounds[3 if ONE_LOOP and part == 0 else part + 1], bounds[1], bounds[2], BLOCK,
                "none" if part == 1 else "edges" if ONE_LOOP and part == 0 else "all", part == 3,
                1 if part == 3 and SHORT_TAIL or part == 2 and SHORT_BEHIND else None)
    return state


@triton.jit
def key_loops(STEP: tl.constexpr, state, x, own, ONE_LOOP: tl.constexpr, SHORT_TAIL: tl.constexpr, first=None):
    """Steps over the keys that a QueryTile sees in own.window.

    first: keys before it are skipped; a multiple of BLOCK_N, not after the key on the diagonal of the tile's first query.
    """
    # TMA reads zeros past the sequence's end, so only pointers need a loop of their own for the tail
    TAIL: tl.constexpr = not x.shape.TMA
    bounds = key_ranges(x.place.row, x.place.length, x.place.other_length, own.window, x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
    if first is not None:
        first = tl.maximum(first, 0) // x.shape.BLOCK_N * x.shape.BLOCK_N  # rounded anew: for a loaded bound Triton 3.6 has fault 3
        bounds = (tl.maximum(bounds[0], first), tl.maximum(bounds[1], first), bounds[2], bounds[3], bounds[4])
    return range_loops(STEP, state, x, own, bounds, x.shape.BLOCK_N, own.window.HAS_LEFT, own.window.HAS_RIGHT or not TAIL, TAIL, ONE_LOOP,
                       SHORT_TAIL and not (own.window.HAS_LEFT or own.window.HAS_RIGHT), SHORT_TAIL)


@triton.jit
def query_loops(STEP: tl.constexpr, state, x, own, ONE_LOOP: tl.constexpr, last=None):
    """Steps over the queries that see a KeyTile in own.window.

    last: queries from it on are skipped; a multiple of BLOCK_M, after the query on the diagonal of the tile's last key.
    """
    TAIL: tl.constexpr = not x.shape.TMA
    bounds = query_ranges(x.place.row, x.place.other_length, x.place.length, own.window, x.shape.BLOCK_M, x.shape.BLOCK_N, TAIL)
    if last is not None:
        bounds = (bounds[0], bounds[1], tl.minimum(bounds[2], last), tl.minimum(bounds[3], last), tl.minimum(bounds[4], last))
    return range_loops(STEP, state, x, own, bounds, x.shape.BLOCK_M, own.window.HAS_RIGHT, own.window.HAS_LEFT, TAIL, ONE_LOOP, False,
                       False)


@triton.jit
def listed_loop(STEP: tl.constexpr, NTH_TILE: tl.constexpr, state, x, own, begin, end, first_masked, BLOCK: tl.constexpr,
                MASKED: tl.constexpr, GUARD: tl.constexpr):
    """Steps over the listed tiles begin .. end. NTH_TILE(own, n, MASKED) gives (position in the list, number) of the n-th tile. Under
    MASKED "edges", tiles from first_masked on need a mask."""
    position, tile = NTH_TILE(own, begin, MASKED)
    for n in tl.range(begin, end):
        at = tile * BLOCK
        here = position
        # the next entry is read one step ahead, so that the tile's loads do not wait for it
        position, tile = NTH_TILE(own, n + 1, MASKED)
        edge = False
        if MASKED == "edges":
            edge = n >= first_masked
        state = STEP(state, x, own, at, here, edge, MASKED, GUARD)
    return state
