"""From q·k to scores: scale, softcap, ALiBi. Shared by forward and backward, and by decoding.

Scores are left in the unit that saves a multiplication of each: the softmax multiplies by the unit, which brings them to its own.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import in_units, tanh


@triton.jit
def score_unit(scale, softcap, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """What modified scores count: scale = in_units(softmax_scale), with softcap the cap, and under PRESCALE the softmax's own unit."""
    if PRESCALE:
        unit = 1.0
    elif HAS_SOFTCAP:
        unit = in_units(softcap, EXACT)
    else:
        unit = scale
    return unit


@triton.jit
def alibi(i, j, shift, reference, slope, unit, ONE_SIDED: tl.constexpr, EXACT: tl.constexpr):
    """slope * |i + shift - j| in `unit`, i and j broadcast to the tile, and zero; shift = len_k - len_q.

    ONE_SIDED lets it be negative for keys behind i + shift, which nobody sees: then it has a part by key, and one by query in the softmax's
    units, which is the second result and costs no instruction an element. Positions count from `reference`, to be small where the bias is.
    """
    slope = in_units(slope, EXACT)
    if ONE_SIDED and not EXACT:
        bias = (slope / unit) * (reference - j).to(tl.float32)
        by_query = slope * (i + (shift - reference)).to(tl.float32)
    else:
        bias = (slope / unit) * tl.abs(i + shift - j).to(tl.float32)
        by_query = tl.zeros_like(i).to(tl.float32)
    return bias, by_query


@triton.jit
def scores_in_unit(products, bias, scale, softcap, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
                   HARDWARE_TANH: tl.constexpr):
    """Scores of products q·k in score_unit's unit, less ALiBi's bias in it, and the cap's derivative."""
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
    """Scores of products q·k with softcap and ALiBi in the softmax's own unit, and the cap's derivative."""
    bias = alibi(i, j, shift, 0, slope, 1.0, False, EXACT)[0] if HAS_ALIBI else 0.0
    return scores_in_unit(products, bias, scale, softcap, True, HAS_SOFTCAP, EXACT, HARDWARE_TANH)
