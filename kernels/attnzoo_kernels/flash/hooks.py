"""What FlashAttention's plain kernels have beside products and softmax, as hooks of `_triton`: windows, ALiBi, a bias by key, softcap,
dropout."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.dropout import drop_pairs, keep_tile
from attnzoo_kernels._triton.scores import alibi, scores_in_unit
from attnzoo_kernels._triton.tiles import first_lse


class Modifiers(NamedTuple):
    """What all programs of a launch have in common."""

    window: Any
    scale: Any
    softcap: Any
    alibi_slopes: Any
    stride_slopes: Any
    rng_state: Any
    drop_below: Any
    keep_prob: Any
    n_seqs: Any
    heads: Any
    sinks: Any
    PRESCALE: Any
    HAS_SOFTCAP: Any
    HAS_ALIBI: Any
    ONE_SIDED: Any
    HARDWARE_TANH: Any
    HAS_DROPOUT: Any
    HAS_SINKS: Any
    DROP_PAIRS: Any
    BY_WARP: Any
    ONE_LOOP: Any
    FROM_STATS: Any
    key_bias: Any = None  # c of each key and query head, high parts before low ones: scores get c_i - c_j, i the query's own key
    seqlen_k: Any = 0  # of packed sequences the total
    column_sums: Any = None  # where those of dS go
    PACKED: Any = False
    HAS_KEY_BIAS: Any = False
    table: Any = None  # of n_seqs key ranges, by what the program's tile holds
    RANGES: Any = False


class KeyBias(NamedTuple):
    """c in the softmax's units, in two parts: of the rows of a program's tile, and of the tile's first one."""

    source: Any  # that of the sequence's first key
    high: Any
    low: Any
    first_high: Any
    first_low: Any


class Loaded(NamedTuple):
    """What hooks take: the modifiers, and what one head has of them."""

    window: Any
    modifiers: Any
    slope: Any
    seed: Any
    offset: Any
    head: Any  # counted over all sequences
    key_bias: Any  # KeyBias
    END: Any = True  # fault 18


@triton.jit
def load_slope(m, sequence, head):
    slope = 0.0
    if m.HAS_ALIBI:
        slope = tl.load(m.alibi_slopes + tl.minimum(sequence, m.n_seqs - 1) * m.stride_slopes + head).to(tl.float32)
    return slope


@triton.jit
def _parts(m, source, j, len_k):
    """c of the keys j in two parts, zeros where there is no such key."""
    inside = (j >= 0) & (j < len_k)
    stride = m.seqlen_k.to(tl.int64) * m.heads
    if not m.PACKED:
        stride *= m.n_seqs
    return tl.load(source + j, mask=inside, other=0.0), tl.load(source + stride + j, mask=inside, other=0.0)


@triton.jit
def load_key_bias(m, place, head, rows, shift, first_k, len_k):
    """Of a program's tile, whose rows stand at the keys rows + shift."""
    bias = KeyBias(0, 0, 0, 0, 0)
    if m.HAS_KEY_BIAS:
        source = m.key_bias + first_lse(place.batch, head, first_k, m.seqlen_k, m.heads, m.PACKED)
        high, low = _parts(m, source, rows + shift, len_k)
        first = tl.maximum(place.row + shift, 0)
        first_high, first_low = _parts(m, source, first, len_k)
        bias = KeyBias(source, high, low, first_high, first_low)
    return bias


@triton.jit
def load_seed(m):
    seed = 0
    offset = 0
    if m.HAS_DROPOUT:
        seed = tl.load(m.rng_state)
        offset = tl.load(m.rng_state + 1).to(tl.int32)
    return seed, offset


@triton.jit
def _forgotten(bias, query_high, query_low, key_high, key_low, unit, EXACT: tl.constexpr):
    """c_j - c_i in `unit`, and zero; but for EXACT in a part by key and one by query in the softmax's units, as alibi. Their differences
    from the c of a near row are small where weights are not, however large c is."""
    if EXACT:
        less = (key_high - query_high) + (key_low - query_low)
        by_query = tl.zeros_like(query_high)
    else:
        less = ((key_high - bias.first_high) + (key_low - bias.first_low)) * (1 / unit)
        by_query = (bias.first_high - query_high) + (bias.first_low - query_low)
    return less, by_query


@triton.jit
def _modified(products, i, j, shift, at, unit, m, slope, key_bias, len_k, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    scores = products
    derivative = 1.0
    by_row = 0.0
    if m.PRESCALE or m.HAS_SOFTCAP or m.HAS_ALIBI or m.HAS_KEY_BIAS:
        bias = 0.0
        if m.HAS_ALIBI:
            bias, by_row = alibi(i, j, shift, at, slope, unit, m.ONE_SIDED, PRECISION == "ieee")
        if m.HAS_KEY_BIAS:
            high, low = _parts(m, key_bias.source, i + shift if TRANSPOSED else j, len_k)
            if TRANSPOSED:
                bias, by_row = _forgotten(key_bias, high, low, key_bias.high, key_bias.low, unit, PRECISION == "ieee")
            else:
                bias, by_row = _forgotten(key_bias, key_bias.high, key_bias.low, high, low, unit, PRECISION == "ieee")
        scores, derivative = scores_in_unit(products, bias, m.scale, m.softcap, m.PRESCALE, m.HAS_SOFTCAP, PRECISION == "ieee",
                                            m.HARDWARE_TANH)
    return scores, by_row, derivative


@triton.jit
def modified(x, own, products, i, j, at):
    """SCORE of forward and dQ: softcap and ALiBi."""
    return _modified(products, i, j, x.place.other_length - x.place.length, at, x.unit, own.modifiers, own.slope, own.key_bias,
                     x.place.other_length, x.shape.PRECISION, False)


@triton.jit
def modified_transposed(x, own, products, i, j, at):
    """SCORE of dK/dV."""
    return _modified(products, i, j, x.place.length - x.place.other_length, at, x.unit, own.modifiers, own.slope, own.key_bias,
                     x.place.length, x.shape.PRECISION, True)


@triton.jit
def _keep(own, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return keep_tile(own.seed, own.offset, own.head, row, column, own.modifiers.drop_below, BLOCK_M, BLOCK_N)


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
