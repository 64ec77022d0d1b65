"""The dropout mask of `attnzoo_kernels.dropout` for one tile."""

import triton
import triton.language as tl


@triton.jit
def _words(seed, offset, head, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's Philox words, and the same words rotated by a byte: [BLOCK_M / 2, counters, bit 3 of j, bit 3 of i, bit 4 of j]."""
    # one call serves the elements that differ in bit 3 of i and bits 4, 3 and 0 of j; one thread of a matrix product holds them all
    COUNTERS: tl.constexpr = BLOCK_N // 8 if BLOCK_N >= 32 else 4
    i = row // 2 + tl.arange(0, BLOCK_M // 2)[:, None]
    j = column // 32 * 4 + tl.arange(0, COUNTERS)[None, :]
    zero = tl.zeros([BLOCK_M // 2, COUNTERS], tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, j + zero, i + zero, head + zero, offset + zero, n_rounds=7)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    turned = (words << 8) | (words >> 24)
    if BLOCK_N >= 32:
        words = tl.join(words, turned)
    else:
        words = tl.where(column % 32 == 0, words, turned)  # a tile of 16 columns has one value of bit 4
    return words


@triton.jit
def _in_place(even, odd, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The fields of _words for even and for odd columns, reordered to the tile's [BLOCK_M, BLOCK_N]."""
    fields = tl.join(even, odd)
    if BLOCK_N >= 32:
        # from [M / 16, i, N / 32, j, bit 3 of j, bit 3 of i, bit 4 of j, bit 0 of j]
        fields = fields.reshape(BLOCK_M // 16, 8, BLOCK_N // 32, 4, 2, 2, 2, 2)
        fields = tl.permute(fields, (0, 5, 1, 2, 6, 4, 3, 7))
    else:
        fields = fields.reshape(BLOCK_M // 16, 8, 4, 2, 2, 2)
        fields = tl.permute(fields, (0, 4, 1, 3, 2, 5))
    return fields.reshape(BLOCK_M, BLOCK_N)


@triton.jit
def _in_order(words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The fields of words [BLOCK_M, counters, bit 3 of j, (bit 4 of j)], reordered to the tile's [BLOCK_M, BLOCK_N]."""
    fields = tl.join(words << 17, words << 1)
    if BLOCK_N >= 32:
        # from [M, N / 32, j, bit 3 of j, bit 4 of j, bit 0 of j]
        fields = tl.permute(fields.reshape(BLOCK_M, BLOCK_N // 32, 4, 2, 2, 2), (0, 1, 4, 3, 2, 5))
    else:
        fields = tl.permute(fields.reshape(BLOCK_M, 4, 2, 2), (0, 2, 1, 3))
    return fields.reshape(BLOCK_M, BLOCK_N)


@triton.jit
def keep_rows(seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """keep_tile for any row: each row computes its own words, of which it needs half."""
    COUNTERS: tl.constexpr = BLOCK_N // 8 if BLOCK_N >= 32 else 4
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    zero = tl.zeros([BLOCK_M, COUNTERS], tl.int32)
    i, j = rows // 16 * 8 + rows % 8 + zero, column // 32 * 4 + tl.arange(0, COUNTERS)[None, :] + zero
    w0, w1, w2, w3 = tl.philox(seed, j, i, head + zero, offset + zero, n_rounds=7)
    upper = rows // 8 % 2 + zero == 1  # bit 3 of i
    words = tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1))
    turned = (words << 8) | (words >> 24)
    if BLOCK_N >= 32:
        words = tl.join(words, turned)
    else:
        words = tl.where(column % 32 == 0, words, turned)
    return _in_order(words, BLOCK_M, BLOCK_N) >= (threshold << 17).to(tl.uint32)


@triton.jit
def keep_tile(seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of a tile are kept, bool [BLOCK_M, BLOCK_N]. head = batch * heads + h; row and column must be multiples of 16."""
    words = _words(seed, offset, head, row, column, BLOCK_M, BLOCK_N)
    # each field is shifted to the upper end of its word, so that comparing the words compares the fields
    return _in_place(words << 17, words << 1, BLOCK_M, BLOCK_N) >= (threshold << 17).to(tl.uint32)


@triton.jit
def drop_pairs(weights, seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """16-bit weights, with zeros where keep_tile is false; one comparison serves two weights, on sm_90 and later.

    The fields are compared as magnitudes of bfloat16, which have the fields' order if the threshold is neither subnormal nor NaN.
    """
    words = _words(seed, offset, head, row, column, BLOCK_M, BLOCK_N)
    fields = _in_place(words.to(tl.uint16), (words >> 16).to(tl.uint16), BLOCK_M, BLOCK_N)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; abs.bf16x2 m, $2; set.geu.u32.bf16x2 m, m, $3; and.b32 $0, $1, m; }", "=r,r,r,r",
        [weights, fields, threshold.to(tl.uint16)], dtype=weights.dtype, is_pure=True, pack=2)
