"""Online softmax on the registers of a warp group's product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_row_sums(x):
    """Row sums of x [M, N], in a product's layout, as [M, 4]: each thread adds up its own elements of a row, without a shuffle. The four
    partial sums of a row are added up once, after the loop."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def row_maximum(x, NOT_NEGATIVE: gl.constexpr):
    """The maximum of each row of x [M, N]. NOT_NEGATIVE: where it is below zero, the result is some number below zero.

    Then maxima are taken of the bits as integers, which is faster: one instruction takes the maximum of three integers. Floats that are not
    negative have the order of their bits.
    """
    if NOT_NEGATIVE:
        return gl.max(x.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
    return gl.max(x, 1)


@gluon.jit
def packed(x, dtype: gl.constexpr, MOVABLE: gl.constexpr = True):
    """x [M, N] rounded to 16 bits, two numbers in each int32 of [M, N / 2] (fault 5). MOVABLE: the compiler may round later, where it would
    keep x till then."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        words = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, MOVABLE, 1)
    else:
        words = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, MOVABLE, 1)
    return words


@gluon.jit
def unpacked(words, layout: gl.constexpr, dtype: gl.constexpr):
    """The inverse of `packed`: [M, N] as the first operand of a product. It costs no instruction."""
    twice = gl.convert_layout(gl.reshape(gl.join(words, words), [words.shape[0], 2 * words.shape[1]]), layout)
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.bfloat16, True, 2)
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.float16, True, 2)
    return x


@gluon.jit
def unpacked_floats(words, layout: gl.constexpr, dtype: gl.constexpr):
    """The numbers of `packed` in float32, [M, N]."""
    if dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        asm: gl.constexpr = "{ .reg .b16 even, odd; mov.b32 {even, odd}, $2; cvt.f32.f16 $0, even; cvt.f32.f16 $1, odd; }"
    even, odd = gl.inline_asm_elementwise(asm, "=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [words.shape[0], words.shape[1] * 2]), layout)


@gluon.jit
def unpacked_rounded(words, layout: gl.constexpr, dtype: gl.constexpr):
    """The numbers of `packed` in 16 bits, [M, N], in any layout."""
    asm: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(asm, "=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    else:
        even, odd = gl.inline_asm_elementwise(asm, "=h,=h,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [words.shape[0], words.shape[1] * 2]), layout)


@gluon.jit
def subtrahend(base, scale, tile_bias):
    """What is subtracted from a row's scores in base 2 before the exponential. base: the maximum, in the scores' unit. tile_bias: as in
    softmax_step."""
    base = base * scale
    return base if tile_bias is None else base + tile_bias[0]


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale, MASKED: gl.constexpr, NOT_NEGATIVE: gl.constexpr = False, tile_bias=None):
    """One step of the online softmax over scores [M, N] (-inf where masked); `scale` > 0 brings them to base 2. NOT_NEGATIVE: no row_max is
    negative. tile_bias: TILE_BIAS's result, which is subtracted from all scores: (in base 2, in the scores' unit); None: there is none.

    Returns the weights, the new maximum (unscaled), the partial sums, and the factor for what was accumulated before.
    """
    new_max = row_maximum(scores, NOT_NEGATIVE)
    if tile_bias is not None:
        if NOT_NEGATIVE:  # an arbitrary number below zero must not become a maximum if `tile_bias` is negative, too
            new_max = gl.maximum(new_max, 0.0)
        new_max = new_max - tile_bias[1]
    new_max = gl.maximum(row_max, new_max)
    base = new_max
    if MASKED:  # avoids inf - inf in a row that has seen no key yet
        base = gl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = gl.exp2((row_max - base) * scale)
    weights = gl.exp2(scores * scale - subtrahend(base, scale, tile_bias)[:, None])
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + partial_row_sums(weights)
    return weights, new_max, row_sum, rescale


@gluon.jit
def log2(x):
    """log2 by one instruction, with an error of 2^-22. The exact function takes 40 instructions, which would delay the last product of a
    tile."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
