"""Binary searches in bounds, such as those of packed sequences, for several values at once."""

import triton
import triton.language as tl


@triton.jit
def count_below(bounds_ptr, x, entries, steps, inside=True, STRIDE: tl.constexpr = 1):
    """For each x, how many of `entries` ascending bounds, STRIDE apart, are less than x.

    steps: how often the interval is halved, at least entries.bit_length(). inside: which x are wanted; others get any number.
    """
    low = tl.zeros(x.shape, tl.int32)
    high = low + entries
    for _ in range(steps):
        some = low < high
        middle = (low + high) // 2
        below = some & (tl.load(bounds_ptr + middle.to(tl.int64) * STRIDE, mask=inside & some, other=0) < x)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def last_up_to(bounds_ptr, x, entries, steps, inside):
    """For each x, the index of the last of `entries` ascending bounds that is at most x. The first bound must be.

    steps: at least (entries - 1).bit_length(). inside: as in count_below.
    """
    return count_below(bounds_ptr + 1, x + 1, entries - 1, steps, inside)
