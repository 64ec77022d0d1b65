"""From q·k to scores: scale, softcap, ALiBi. Shared by forward, backward and decoding.

The softmax computes exp2(scores * unit - row_max): `unit` brings scores to the softmax's units, in the instruction that also subtracts the
maximum. So the scale or the softcap need not be multiplied in before, and scores are products q·k, or tanh of them, in this unit.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import in_units, tanh


@triton.jit
def score_unit(scale, softcap, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """The unit of scores_in_unit: 1 under PRESCALE, where scores are in the softmax's units already; in_units(softcap) if there is a
    softcap; else `scale`, which is in_units(softmax_scale)."""
    if PRESCALE:
        unit = 1.0
    elif HAS_SOFTCAP:
        unit = in_units(softcap, EXACT)
    else:
        unit = scale
    return unit


@triton.jit
def load_slope(given, sequence, head):
    """The slope of a head of a sequence, zero without ALiBi, from a struct with HAS_ALIBI, alibi_slopes, stride_slopes and n_seqs."""
    slope = 0.0
    if given.HAS_ALIBI:
        slope = tl.load(given.alibi_slopes + tl.minimum(sequence, given.n_seqs - 1) * given.stride_slopes + head).to(tl.float32)
    return slope


@triton.jit
def alibi(i, j, shift, reference, slope, unit, ONE_SIDED: tl.constexpr, EXACT: tl.constexpr):
    """ALiBi's bias, slope * |i + shift - j| with shift = len_k - len_q, which is subtracted from the scores: (bias by element, in `unit`;
    row_bias, in the softmax's units). i and j broadcast to the tile.

    ONE_SIDED: no query sees a key after i + shift, where the bias may therefore be wrong. The absolute value is then left out, and the bias
    is the sum of a part by key, the first result, and a part by query, the second one, which costs no instruction for each element.
    Positions count from `reference`, so that both parts are small near the tile. Otherwise row_bias is zero.
    """
    slope = in_units(slope, EXACT)
    if ONE_SIDED and not EXACT:
        bias = (slope / unit) * (reference - j).to(tl.float32)
        row_bias = slope * (i + (shift - reference)).to(tl.float32)
    else:
        bias = (slope / unit) * tl.abs(i + shift - j).to(tl.float32)
        row_bias = tl.zeros_like(i).to(tl.float32)
    return bias, row_bias


@triton.jit
def scores_in_unit(products, bias, scale, softcap, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
                   HARDWARE_TANH: tl.constexpr):
    """(scores in score_unit's unit, the softcap's derivative), from products q·k and a bias in that unit, which is subtracted."""
    derivative = 1.0
    if HAS_SOFTCAP:
        scores = tanh(products * (scale / in_units(softcap, EXACT)), EXACT, HARDWARE_TANH)
        derivative = 1.0 - scores * scores
        if PRESCALE:
            scores *= in_units(softcap, EXACT)
    elif PRESCALE:
        scores = products * scale
    else:
        scores = products
    return scores - bias, derivative


@triton.jit
def modified_scores(products, i, j, shift, slope, scale, softcap, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, EXACT: tl.constexpr,
                    HARDWARE_TANH: tl.constexpr):
    """(scores in the softmax's units, the softcap's derivative), from products q·k, with softcap and ALiBi."""
    bias = alibi(i, j, shift, 0, slope, 1.0, False, EXACT)[0] if HAS_ALIBI else 0.0
    return scores_in_unit(products, bias, scale, softcap, True, HAS_SOFTCAP, EXACT, HARDWARE_TANH)
