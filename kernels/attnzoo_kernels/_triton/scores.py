"""From q·k to scores: scale, softcap, ALiBi. Shared by forward, backward and decoding.

Scores are left in a unit that saves one multiplication for each. The softmax multiplies them by this unit, which brings them to its own
units.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import in_units, tanh


@triton.jit
def score_unit(scale, softcap, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """The unit of modified scores: 1 under PRESCALE, where they are in the softmax's units already; with softcap, the cap in these units;
    else `scale`, which is in_units(softmax_scale)."""
    if PRESCALE:
        unit = 1.0
    elif HAS_SOFTCAP:
        unit = in_units(softcap, EXACT)
    else:
        unit = scale
    return unit


@triton.jit
def alibi(i, j, shift, reference, slope, unit, ONE_SIDED: tl.constexpr, EXACT: tl.constexpr):
    """(the bias slope * |i + shift - j| in `unit`, zero). i and j broadcast to the tile; shift = len_k - len_q.

    ONE_SIDED: nobody sees keys after i + shift, so the bias may be negative there. Then it is split into a part by key, the first result,
    and a part by query in the softmax's units, the second result, which costs no instruction for each element. Positions count from
    `reference`, so that the parts are small near the tile.
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
    """(scores in score_unit's unit, from products q·k minus ALiBi's bias in that unit; the softcap's derivative)."""
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
    """(scores in the softmax's own units, from products q·k with softcap and ALiBi; the softcap's derivative)."""
    bias = alibi(i, j, shift, 0, slope, 1.0, False, EXACT)[0] if HAS_ALIBI else 0.0
    return scores_in_unit(products, bias, scale, softcap, True, HAS_SOFTCAP, EXACT, HARDWARE_TANH)
