"""The dropout mask of `attnzoo_kernels.dropout` for one tile."""

import triton
import triton.language as tl


@triton.jit
def keep_tile(seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of a tile stay, [BLOCK_M, BLOCK_N]; head = batch * heads + h; column must be a multiple of 8."""
    i = row + tl.arange(0, BLOCK_M)[:, None]
    group = column // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    zero = tl.zeros([BLOCK_M, BLOCK_N // 8], tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, group + zero, i + zero, head + zero, offset + zero)
    t = threshold.to(tl.uint32)
    # field f of the eight keys is the low (even) or high (odd) half of word f // 2; join makes f's lowest bit last
    k0 = tl.join((w0 & 0xFFFF) < t, (w0 >> 16) < t)
    k1 = tl.join((w1 & 0xFFFF) < t, (w1 >> 16) < t)
    k2 = tl.join((w2 & 0xFFFF) < t, (w2 >> 16) < t)
    k3 = tl.join((w3 & 0xFFFF) < t, (w3 >> 16) < t)
    # [M, N/8, half, word's low bit, word's high bit] -> [M, N/8, high, low, half]
    keep = tl.join(tl.join(k0, k1), tl.join(k2, k3))
    return tl.permute(keep, (0, 1, 4, 3, 2)).reshape(BLOCK_M, BLOCK_N)
