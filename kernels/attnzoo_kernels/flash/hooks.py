"""Hooks of `_triton` for what FlashAttention's plain kernels do beside products and softmax: windows, ALiBi, biases by key and by distance,
softcap, dropout.

c, blocks and starts are those of `flash.options.KeyBias`. All c are in the softmax's units.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.dropout import drop_pairs, keep_rows, keep_tile
from attnzoo_kernels._triton.scores import alibi, scores_in_unit
from attnzoo_kernels._triton.tiles import first_lse, load_in_place
from attnzoo_kernels.flash.options import C_BLOCK, DISTANCE_PAD, DROPOUT_FROM_ROW

BLOCK = tl.constexpr(C_BLOCK)
PAD = tl.constexpr(DISTANCE_PAD)
FROM_ROW = tl.constexpr(DROPOUT_FROM_ROW)


class Modifiers(NamedTuple):
    """What all programs of a launch share."""

    window: Any  # Window
    scale: Any  # the softmax scale, in the softmax's units
    softcap: Any  # in natural units
    alibi_slopes: Any
    stride_slopes: Any  # 0 if all sequences have the same slopes
    rng_state: Any
    drop_below: Any  # weights whose field of the dropout mask is below this are dropped
    keep_prob: Any
    n_seqs: Any
    heads: Any
    sinks: Any
    PRESCALE: Any
    HAS_SOFTCAP: Any
    HAS_ALIBI: Any
    ONE_SIDED: Any
    HARDWARE_TANH: Any
    HAS_DROPOUT: Any  # False, True, or FROM_ROW: rng_state also says which row of the mask each sequence's first query has
    HAS_SINKS: Any
    DROP_PAIRS: Any
    BY_WARP: Any
    ONE_LOOP: Any
    FROM_STATS: Any
    key_bias: Any = None  # KeyBias.c, .starts and .ends
    block_starts: Any = None
    block_ends: Any = None
    seqlen_q: Any = 0  # where packed, the total
    seqlen_k: Any = 0
    column_sums: Any = None  # where the sums of dS by key are stored
    PACKED: Any = False
    HAS_KEY_BIAS: Any = False
    PRUNED: Any = False  # tiles are skipped, as block_ends says
    table: Any = None  # of n_seqs key ranges: the one by queries if the program's tile holds queries, else the one by keys
    RANGES: Any = False
    distance_bias: Any = None  # DistanceBias.table, .sums and .unit
    distance_sums: Any = None
    distance_unit: Any = None
    n_distances: Any = 0  # entries of the table
    origin: Any = 0  # index of the entry for distance 0
    HAS_DISTANCES: Any = False


class TileBias(NamedTuple):
    """c of the rows of a program's tile, and what is needed to load c of the other side's rows."""

    source: Any  # number of the other side's first block of c; for float32 inputs a pointer to c of the sequence's first key
    own: Any  # c of the tile's rows, relative to the block's start; for float32 inputs the high parts of c
    low: Any  # for float32 inputs: the low parts
    start: Any  # c at the start of the tile's block, in two parts
    difference: Any  # c at the start of the keys' block minus c at the start of the queries' block; set by keys_bias or queries_bias


class Loaded(NamedTuple):
    """What hooks get as `own`: the modifiers, and their values for one head."""

    window: Any
    modifiers: Any
    slope: Any
    seed: Any
    offset: Any
    head: Any  # its number among the heads of all sequences
    key_bias: Any  # TileBias
    mask_row: Any = 0  # under FROM_ROW: the row of the dropout mask that the sequence's first query has
    distance: Any = 0  # the table index for the first query and the first key of a step's tile; it may lie outside of the table
    END: Any = True  # a struct of structs must end with a constant (fault 18)


@triton.jit
def _parts(m, source, j, len_k):
    """c of the keys j, in two float32 parts; zeros for keys that do not exist."""
    inside = (j >= 0) & (j < len_k)
    stride = m.seqlen_k.to(tl.int64) * m.heads
    if not m.PACKED:
        stride *= m.n_seqs
    return tl.load(source + j, mask=inside, other=0.0), tl.load(source + stride + j, mask=inside, other=0.0)


@triton.jit
def _blocks_before(m, place, first, head, QUERIES: tl.constexpr):
    """How many blocks of c lie before those of a head of a sequence that begins at `first`. The blocks of all keys lie before those of the
    queries."""
    if m.PACKED:
        of_keys = m.seqlen_k // BLOCK + m.n_seqs + 1
        of_queries = m.seqlen_q // BLOCK + m.n_seqs + 1
        before = head.to(tl.int64) * (of_queries if QUERIES else of_keys) + first // BLOCK + place.sequence
    else:
        of_keys = m.n_seqs * tl.cdiv(m.seqlen_k, BLOCK)
        before = (place.sequence * m.heads + head).to(tl.int64) * tl.cdiv(m.seqlen_q if QUERIES else m.seqlen_k, BLOCK)
    if QUERIES:
        before += of_keys.to(tl.int64) * m.heads
    return before


@triton.jit
def _block_start(m, block):
    """c at a block's start, in two parts."""
    return tl.load(m.block_starts + 2 * block), tl.load(m.block_starts + 2 * block + 1)


@triton.jit
def _start_difference(keys, queries):
    """c at the start of the keys' block minus c at the start of the queries' block. All kernels add the parts up in this order."""
    return (keys[0] - queries[0]) + (keys[1] - queries[1])


@triton.jit
def load_key_bias(m, place, head, rows, EXACT: tl.constexpr, QUERIES: tl.constexpr):
    """The TileBias of a program's tile of queries or keys, whose rows are `rows`."""
    bias = TileBias(0, 0, 0, 0, 0)
    if m.HAS_KEY_BIAS:
        if EXACT:
            first = place.other_first if QUERIES else place.first
            length = place.other_length if QUERIES else place.length
            source = m.key_bias + first_lse(place.batch, head, first, m.seqlen_k, m.heads, m.PACKED)
            high, low = _parts(m, source, rows + (place.other_length - place.length) if QUERIES else rows, length)
            bias = TileBias(source, high, low, 0, 0)
        else:
            block = _blocks_before(m, place, place.first, head, QUERIES)
            own = tl.load(m.key_bias + block * BLOCK + rows)
            start = _block_start(m, block + place.row // BLOCK)
            bias = TileBias(_blocks_before(m, place, place.other_first, head, not QUERIES), own, 0, start, 0)
    return bias


@triton.jit
def rows_lse_bias(place, m, rows):
    """LSE_BIAS of the forward: c of the queries, relative to the start of their block. The scores of a row all lack it."""
    return tl.load(m.key_bias + _blocks_before(m, place, place.first, place.head, True) * BLOCK + rows)


@triton.jit
def keys_bias(m, bias, at, x):
    """The TileBias of a tile of queries, with `difference` for the block of the keys from `at` on."""
    if m.HAS_KEY_BIAS and x.shape.PRECISION != "ieee":
        difference = _start_difference(_block_start(m, bias.source + at // BLOCK), bias.start)
        bias = TileBias(bias.source, bias.own, 0, bias.start, difference)
    return bias


@triton.jit
def queries_bias(m, bias, at, x):
    """The TileBias of a tile of keys, with `difference` for the block of the queries from `at` on."""
    if m.HAS_KEY_BIAS and x.shape.PRECISION != "ieee":
        difference = _start_difference(bias.start, _block_start(m, bias.source + at // BLOCK))
        bias = TileBias(bias.source, bias.own, 0, bias.start, difference)
    return bias


@triton.jit
def first_key(m, place, head):
    """The first key that a tile of queries does not skip."""
    first = 0
    if m.PRUNED:
        first = tl.load(m.block_ends + _blocks_before(m, place, place.first, head, True) + place.row // BLOCK) * BLOCK
    return first


@triton.jit
def last_query(m, place, head):
    """The end of the queries that do not skip a tile of keys."""
    last = 0
    if m.PRUNED:
        last = tl.load(m.block_ends + _blocks_before(m, place, place.first, head, False) + place.row // BLOCK) * BLOCK
    return last


@triton.jit
def queries_distance(m, place, at):
    """Loaded.distance for a tile of queries and the keys from `at` on."""
    return place.row - at + (place.other_length - place.length + m.origin)


@triton.jit
def keys_distance(m, place, at):
    """Loaded.distance for a tile of keys and the queries from `at` on."""
    return at - place.row + (place.length - place.other_length + m.origin)


@triton.jit
def load_seed(m, sequence):
    """(seed, offset, Loaded.mask_row)."""
    seed = 0
    offset = 0
    row = 0
    if m.HAS_DROPOUT:
        seed = tl.load(m.rng_state)
        offset = tl.load(m.rng_state + 1).to(tl.int32)
        if m.HAS_DROPOUT == FROM_ROW:
            row = tl.load(m.rng_state + 2 + tl.minimum(sequence, m.n_seqs - 1)).to(tl.int32)
    return seed, offset, row


@triton.jit
def _are_many(m, distance, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a tile's distances take more than one entry of the table."""
    return (distance + BLOCK_M > 1) & (distance - BLOCK_N < m.n_distances - 2) & (m.n_distances > 1)


@triton.jit
def _by_distance(m, head, distance, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The bias by distance of a tile's scores."""
    # beyond these bounds all distances of a tile have the same entry, which the table's padding repeats
    first = tl.minimum(tl.maximum(distance, -BLOCK_M), m.n_distances + BLOCK_N)
    source = m.distance_bias + (head.to(tl.int64) * (m.n_distances + 2 * PAD) + PAD + first - (BLOCK_N - 1))
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N) ^ (BLOCK_N - 1)  # BLOCK_N - 1 - n; as an XOR it gives the loads constant offsets
    if TRANSPOSED:
        pointers = (source + row)[None, :] + column[:, None]
    else:
        pointers = (source + row)[:, None] + column[None, :]
    return load_in_place(pointers)


@triton.jit
def _add_diagonals(m, head, distance, dscores, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds a tile's dS to the sums by distance. The sums are integers, so that they do not depend on the order of additions."""
    unit = tl.load(m.distance_unit)
    sums = m.distance_sums + head.to(tl.int64) * m.n_distances
    if _are_many(m, distance, BLOCK_M, BLOCK_N):
        # row i is rotated by i, so that each column holds a diagonal; elements that wrapped around belong to another diagonal
        column = tl.arange(0, BLOCK_N)
        turned = column[None, :] + tl.arange(0, BLOCK_M)[:, None]
        turned_scores = tl.gather(dscores, turned % BLOCK_N, 1)
        for n in tl.static_range((BLOCK_M - 1) // BLOCK_N + 2):
            part = tl.sum(tl.where(turned // BLOCK_N == n, turned_scores, 0.0), 0)
            entry = tl.minimum(tl.maximum(distance - column + n * BLOCK_N, 0), m.n_distances - 1)
            tl.atomic_add(sums + entry, (part.to(tl.float64) * unit).to(tl.int64), mask=part != 0, sem="relaxed")
    else:
        total = tl.sum(tl.sum(dscores, 1), 0)
        end = tl.minimum(tl.maximum(distance, 0), m.n_distances - 1)
        tl.atomic_add(sums + end, (total.to(tl.float64) * unit).to(tl.int64), sem="relaxed")


@triton.jit
def add_distances(x, own, dscores, at):
    """SUMS of dQ: adds a tile's dS to the sums by distance, in the last sweep over the keys."""
    if own.modifiers.distance_sums is not None and x.KEPT:
        _add_diagonals(own.modifiers, x.place.head, own.distance, dscores, x.shape.BLOCK_M, x.shape.BLOCK_N)


@triton.jit
def _modified(products, i, j, shift, at, x, m, slope, key_bias, head, distance, len_k, TRANSPOSED: tl.constexpr):
    """SCORE for a head: (scores, row_bias, the softcap's derivative). A `bias` is subtracted from the scores."""
    PRECISION: tl.constexpr = x.shape.PRECISION
    scores = products
    derivative = 1.0
    row_bias = 0.0
    if m.PRESCALE or m.HAS_SOFTCAP or m.HAS_ALIBI or m.HAS_KEY_BIAS:
        bias = 0.0
        if m.HAS_DISTANCES:
            bias = -_by_distance(m, head, distance, x.shape.BLOCK_M, x.shape.BLOCK_N, TRANSPOSED)
        if m.HAS_ALIBI:
            bias, row_bias = alibi(i, j, shift, at, slope, x.unit, m.ONE_SIDED, PRECISION == "ieee")
        if m.HAS_KEY_BIAS:
            if PRECISION == "ieee":
                high, low = _parts(m, key_bias.source, i + shift if TRANSPOSED else j, len_k)
                bias = (high - key_bias.own) + (low - key_bias.low)
                bias = -bias if TRANSPOSED else bias
                row_bias = tl.zeros_like(i).to(tl.float32)
            else:
                # c is loaded as a row, after the product: as a vector, or before the product, the load causes fault 3
                bias = key_bias.own if TRANSPOSED else tl.load(m.key_bias + key_bias.source * BLOCK + j)
                row_bias = key_bias.difference + tl.zeros_like(i).to(tl.float32)
        scores, derivative = scores_in_unit(products, bias, m.scale, m.softcap, m.PRESCALE, m.HAS_SOFTCAP, PRECISION == "ieee",
                                            m.HARDWARE_TANH)
    return scores, row_bias, derivative


@triton.jit
def modified(x, own, products, i, j, at):
    """SCORE of forward and dQ: softcap and biases."""
    return _modified(products, i, j, x.place.other_length - x.place.length, at, x, own.modifiers, own.slope, own.key_bias, x.place.head,
                     own.distance, x.place.other_length, False)


@triton.jit
def modified_transposed(x, own, products, i, j, at):
    """SCORE of dK/dV: softcap and biases."""
    return _modified(products, i, j, x.place.length - x.place.other_length, at, x, own.modifiers, own.slope, own.key_bias, x.head,
                     own.distance, x.place.length, True)


@triton.jit
def _keep(own, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of a tile dropout keeps, bool [BLOCK_M, BLOCK_N]."""
    if own.modifiers.HAS_DROPOUT == FROM_ROW:
        keep = keep_rows(own.seed, own.offset, own.head, own.mask_row + row, column, own.modifiers.drop_below, BLOCK_M, BLOCK_N)
    else:
        keep = keep_tile(own.seed, own.offset, own.head, row, column, own.modifiers.drop_below, BLOCK_M, BLOCK_N)
    return keep


@triton.jit
def dropped(x, own, weights, at):
    """DROP of the forward."""
    kept = weights
    if own.modifiers.HAS_DROPOUT:
        if own.modifiers.DROP_PAIRS:
            kept = drop_pairs(kept.to(x.q.dtype), own.seed, own.offset, own.head, x.place.row, at, own.modifiers.drop_below,
                              x.shape.BLOCK_M, x.shape.BLOCK_N)
        else:
            kept = tl.where(_keep(own, x.place.row, at, x.shape.BLOCK_M, x.shape.BLOCK_N), kept, 0.0)
    return kept


@triton.jit
def dropped_gradient(x, own, weights, dweights, at, TRANSPOSED: tl.constexpr):
    """DROP of dQ and dK/dV."""
    kept = weights
    if own.modifiers.HAS_DROPOUT:
        if TRANSPOSED:
            keep = tl.trans(_keep(own, at, x.place.row, x.shape.BLOCK_M, x.shape.BLOCK_N))
        else:
            keep = _keep(own, x.place.row, at, x.shape.BLOCK_M, x.shape.BLOCK_N)
        kept = tl.where(keep, weights, 0.0)
        dweights = tl.where(keep, dweights / own.modifiers.keep_prob, 0.0)
    return kept, dweights
