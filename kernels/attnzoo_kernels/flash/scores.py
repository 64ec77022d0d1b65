"""From q·k to FlashAttention's scores in base 2: scale, softcap, ALiBi. Shared by forward and backward."""

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import LOG2E, tanh


@triton.jit
def modified_scores(products, i, j, shift, slope, scale, softcap,
                    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, EXACT: tl.constexpr,
                    HARDWARE_TANH: tl.constexpr):
    """Base-2 scores of products q·k with softcap and ALiBi, and the cap's derivative.

    i and j broadcast to the tile, shift = len_k - len_q, scale = softmax_scale * log2(e).
    """
    derivative = 1.0
    if HAS_SOFTCAP:
        capped = tanh(products * (scale / (softcap * LOG2E)), EXACT, HARDWARE_TANH)
        derivative = 1.0 - capped * capped
        scores = capped * (softcap * LOG2E)
    else:
        scores = products * scale
    if HAS_ALIBI:
        scores -= (slope * LOG2E) * tl.abs(i + shift - j).to(tl.float32)
    return scores, derivative
