"""Online softmax on the registers of a warp group's product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_row_sums(x):
    """[M, N] in a product's layout to [M, 4]: a thread adds up what it holds, without a shuffle; the last sum is taken once at the end."""
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(scores, top, norm, scale, MASKED: gl.constexpr):
    """One step over scores [M, N] (-inf where masked), which `scale` > 0 brings to base 2.

    Returns weights, the maximum (unscaled), partial sums and the factor for what was accumulated before.
    """
    new_top = gl.maximum(top, gl.max(scores, 1))
    base = new_top
    if MASKED:  # a row that saw no key yet must not make inf - inf
        base = gl.where(new_top == -float("inf"), 0.0, new_top)
    rescale = gl.exp2((top - base) * scale)
    weights = gl.exp2(scores * scale - (base * scale)[:, None])
    norm = norm * gl.convert_layout(rescale, gl.SliceLayout(1, norm.type.layout))[:, None] + partial_row_sums(weights)
    return weights, new_top, norm, rescale


@gluon.jit
def log2(x):
    """By one instruction, to 2^-22; the exact function takes 40, between which the last product of a tile begins late."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
