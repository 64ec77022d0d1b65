"""What FlashAttention's plain kernels have beside products and softmax, as hooks of `_triton`: windows, ALiBi, softcap, dropout."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.dropout import drop_pairs, keep_tile
from attnzoo_kernels._triton.scores import alibi, scores_in_unit


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


class Loaded(NamedTuple):
    """What hooks take: the modifiers, and what one head has of them."""

    window: Any
    modifiers: Any
    slope: Any
    seed: Any
    offset: Any
    head: Any  # counted over all sequences
    END: Any = True  # fault 18


@triton.jit
def load_slope(m, sequence, head):
    slope = 0.0
    if m.HAS_ALIBI:
        slope = tl.load(m.alibi_slopes + tl.minimum(sequence, m.n_seqs - 1) * m.stride_slopes + head).to(tl.float32)
    return slope


@triton.jit
def load_seed(m):
    seed = 0
    offset = 0
    if m.HAS_DROPOUT:
        seed = tl.load(m.rng_state)
        offset = tl.load(m.rng_state + 1).to(tl.int32)
    return seed, offset


@triton.jit
def _modified(products, i, j, shift, at, unit, m, slope, PRECISION: tl.constexpr):
    scores = products
    derivative = 1.0
    by_row = 0.0
    if m.PRESCALE or m.HAS_SOFTCAP or m.HAS_ALIBI:
        bias = 0.0
        if m.HAS_ALIBI:
            bias, by_row = alibi(i, j, shift, at, slope, unit, m.ONE_SIDED, PRECISION == "ieee")
        scores, derivative = scores_in_unit(products, bias, m.scale, m.softcap, m.PRESCALE, m.HAS_SOFTCAP, PRECISION == "ieee",
                                            m.HARDWARE_TANH)
    return scores, by_row, derivative


@triton.jit
def modified(x, own, products, i, j, at):
    """SCORE of forward and dQ: softcap and ALiBi."""
    return _modified(products, i, j, x.place.other_length - x.place.length, at, x.unit, own.modifiers, own.slope, x.shape.PRECISION)


@triton.jit
def modified_transposed(x, own, products, i, j, at):
    """SCORE of dK/dV."""
    return _modified(products, i, j, x.place.length - x.place.other_length, at, x.unit, own.modifiers, own.slope, x.shape.PRECISION)


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
