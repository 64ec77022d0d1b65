"""The best of scores that come by tile by tile: the choice of blocks stores none."""

import triton
import triton.language as tl


@triton.jit
def keep_best(best, chosen, scores, block, SLOTS: tl.constexpr):
    """Put the best of scores [M, N], of the rising numbers `block` [1, N], among `best` and `chosen` [M, SLOTS]. Of equal ones the one with
    the lower number stays. Slots that are not there have best +inf; empty ones have -inf, and numbers below 0 that differ."""
    left = tl.sum((scores > -float("inf")).to(tl.int32))
    while left > 0:
        top = tl.max(scores, 1)
        number = tl.min(tl.where(scores == top[:, None], block, 2147483647), 1)
        worst = tl.min(best, 1)
        evicted = tl.max(tl.where(best == worst[:, None], chosen, -2147483648), 1)
        better = top > worst
        here = better[:, None] & (best == worst[:, None]) & (chosen == evicted[:, None])
        best = tl.where(here, top[:, None], best)
        chosen = tl.where(here, number[:, None], chosen)
        scores = tl.where(better[:, None] & (block != number[:, None]), scores, -float("inf"))
        left = tl.sum(better.to(tl.int32))
    return best, chosen
