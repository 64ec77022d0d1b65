"""Online softmax on the registers of a warp group's product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_row_sums(x):
    """[M, N] in a product's layout to [M, 4]: a thread adds up what it holds, without a shuffle; the last sum is taken once at the end."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def row_maximum(x, NOT_NEGATIVE: gl.constexpr):
    """[M, N] to [M]. NOT_NEGATIVE: a maximum below zero need only be some number below zero. Floats from zero on compare as integers do, of
    which one instruction takes the maximum of three."""
    if NOT_NEGATIVE:
        return gl.max(x.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
    return gl.max(x, 1)


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """[M, N] in 16 bits, two in an int32 of [M, N / 2] (fault 5)."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        words = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    else:
        words = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, True, 1)
    return words


@gluon.jit
def unpacked(words, layout: gl.constexpr, dtype: gl.constexpr):
    """What `packed` made, [M, N] as the first operand of a product, which costs no instruction."""
    twice = gl.convert_layout(gl.reshape(gl.join(words, words), [words.shape[0], 2 * words.shape[1]]), layout)
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.bfloat16, True, 2)
    else:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], gl.float16, True, 2)
    return x


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale, MASKED: gl.constexpr, NOT_NEGATIVE: gl.constexpr = False):
    """One step over scores [M, N] (-inf where masked), which `scale` > 0 brings to base 2. NOT_NEGATIVE: no maximum was below zero before.

    Returns weights, the maximum (unscaled), partial sums and the factor for what was accumulated before.
    """
    new_max = gl.maximum(row_max, row_maximum(scores, NOT_NEGATIVE))
    base = new_max
    if MASKED:  # a row that saw no key yet must not make inf - inf
        base = gl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = gl.exp2((row_max - base) * scale)
    weights = gl.exp2(scores * scale - (base * scale)[:, None])
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + partial_row_sums(weights)
    return weights, new_max, row_sum, rescale


@gluon.jit
def log2(x):
    """By one instruction, to 2^-22; the exact function takes 40, between which the last product of a tile begins late."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
