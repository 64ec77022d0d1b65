"""The dropout mask of `attnzoo_kernels.dropout` for one tile.

A Philox call takes a counter (j', i', head, offset) and gives four 32-bit words, of which 16 elements read one 15-bit field each. i and j
number queries and keys; that module's docstring says which bits of i and j choose the field.
"""

import triton
import triton.language as tl


@triton.jit
def _philox(seed, offset, head, i, column, BLOCK_N: tl.constexpr):
    """The four words for counters with i' = i [M, 1] and the j' of a tile's columns, each [M, counters]."""
    COUNTERS: tl.constexpr = BLOCK_N // 8 if BLOCK_N >= 32 else 4
    j = column // 32 * 4 + tl.arange(0, COUNTERS)[None, :]
    zero = tl.zeros([i.shape[0], COUNTERS], tl.int32)
    return tl.philox(seed, j + zero, i + zero, head + zero, offset + zero, n_rounds=7)


@triton.jit
def _by_bit_4(words, column, BLOCK_N: tl.constexpr):
    """The words for both values of bit 4 of j, as a last dimension: unchanged for 0, rotated by a byte for 1. In a tile of 16 columns this
    bit has one value, and the dimension is left out."""
    turned = (words << 8) | (words >> 24)
    if BLOCK_N >= 32:
        words = tl.join(words, turned)
    else:
        words = tl.where(column % 32 == 0, words, turned)
    return words


@triton.jit
def _words(seed, offset, head, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's words, [BLOCK_M / 2, counters, bit 3 of j, bit 3 of i, (bit 4 of j)]."""
    # the 16 elements of a call differ in bit 3 of i and in bits 4, 3 and 0 of j; one thread of a matrix product holds them all
    w0, w1, w2, w3 = _philox(seed, offset, head, row // 2 + tl.arange(0, BLOCK_M // 2)[:, None], column, BLOCK_N)
    return _by_bit_4(tl.join(tl.join(w0, w1), tl.join(w2, w3)), column, BLOCK_N)


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
def keep_rows(seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """keep_tile for any `row`, not only a multiple of 16: each row computes its own words, of which it uses half."""
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    w0, w1, w2, w3 = _philox(seed, offset, head, rows // 16 * 8 + rows % 8, column, BLOCK_N)
    upper = rows // 8 % 2 == 1  # bit 3 of i
    words = _by_bit_4(tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1)), column, BLOCK_N)
    # each field is shifted to the upper end of its word, as in keep_tile
    fields = tl.join(words << 17, words << 1)
    if BLOCK_N >= 32:
        # from [M, N / 32, j, bit 3 of j, bit 4 of j, bit 0 of j]
        fields = tl.permute(fields.reshape(BLOCK_M, BLOCK_N // 32, 4, 2, 2, 2), (0, 1, 4, 3, 2, 5))
    else:
        fields = tl.permute(fields.reshape(BLOCK_M, 4, 2, 2), (0, 2, 1, 3))
    return fields.reshape(BLOCK_M, BLOCK_N) >= (threshold << 17).to(tl.uint32)


@triton.jit
def keep_tile(seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which weights of a tile are kept, bool [BLOCK_M, BLOCK_N]. head = batch * heads + h; row and column must be multiples of 16."""
    words = _words(seed, offset, head, row, column, BLOCK_M, BLOCK_N)
    # each field is shifted to the upper end of its word, so that comparing the words compares the fields
    return _in_place(words << 17, words << 1, BLOCK_M, BLOCK_N) >= (threshold << 17).to(tl.uint32)


@triton.jit
def drop_pairs(weights, seed, offset, head, row, column, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """16-bit weights, with zeros where keep_tile is false. One instruction compares the fields of two weights, on sm_90 and later.

    The fields are compared as absolute values of bfloat16 numbers. These have the order of the fields, if the threshold is neither
    subnormal nor NaN.
    """
    words = _words(seed, offset, head, row, column, BLOCK_M, BLOCK_N)
    fields = _in_place(words.to(tl.uint16), (words >> 16).to(tl.uint16), BLOCK_M, BLOCK_N)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; abs.bf16x2 m, $2; set.geu.u32.bf16x2 m, m, $3; and.b32 $0, $1, m; }", "=r,r,r,r",
        [weights, fields, threshold.to(tl.uint16)], dtype=weights.dtype, is_pure=True, pack=2)
