"""Binary searches in bounds, such as those of packed sequences, for several values at once."""

import triton
import triton.language as tl


@triton.jit
def last_up_to(bounds_ptr, x, entries, steps, inside):
    """For each x, the index of the last of `entries` ascending bounds that is at most x. The first bound must be.

    steps: how often the interval is halved, at least log2(entries). inside: which x are wanted; others get any index.
    """
    low = tl.zeros(x.shape, tl.int32)
    high = low + (entries - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        here = tl.load(bounds_ptr + middle, mask=inside, other=0) <= x
        low = tl.where(here, middle, low)
        high = tl.where(here, high, tl.maximum(middle - 1, low))
    return low
