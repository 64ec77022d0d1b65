"""Online softmax in base 2 and the score functions that stand before it."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.693147182464599609375)
LN2_REST = tl.constexpr(0.6931471805599453 - 0.693147182464599609375)


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2 ** x; EXACT takes a polynomial to float32's last bit where the hardware's approximation has an error of two or more."""
    if EXACT:
        bounded = tl.maximum(x, -126.0)
        whole = tl.floor(bounded + 0.5)
        t = (bounded - whole) * 0.6931471805599453
        series = 1.0 + t * (1.0 + t * (1 / 2 + t * (1 / 6 + t * (1 / 24 + t * (1 / 120 + t * (1 / 720 + t * (1 / 5040)))))))
        power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        y = tl.where(x < -126.0, 0.0, tl.where(x > 127.0, float("inf"), series * power))
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def tanh(x, EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    """tanh by NVIDIA's instruction (error 2**-11) where HARDWARE, else by exp2; EXACT adds the series near zero, where the quotient
    cancels."""
    if HARDWARE:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        t = 1.0 - 2.0 / (1.0 + exp2(x * (2.0 * LOG2E), EXACT))
    if EXACT:
        square = x * x
        series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
        t = tl.where(square < 0.04, series, t)
    return t


@triton.jit
def add_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; in float32 the product is summed by itself first, which keeps long sums as exact as a matrix product's."""
    if PRECISION == "ieee":
        product = tl.dot(a, b, input_precision=PRECISION)
        acc = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)  # a plain addition would be folded into the product's sum
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def softmax_step(scores, top, norm, scale, MASKED: tl.constexpr, EXACT: tl.constexpr = False):
    """One step of the online softmax over scores [M, N] (-inf where masked), which `scale` brings to base 2.

    Returns the weights relative to the new maximum, the new maximum and sum, and the factor for what was accumulated before.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MASKED:
        # a row that saw no key yet must not make inf - inf
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = exp2(scores * scale - base[:, None], EXACT)
    rescale = exp2(top - base, EXACT)
    return weights, new_top, norm * rescale + tl.sum(weights, 1), rescale


@triton.jit
def log_sum_exp(top, norm):
    """Natural log-sum-exp from the base-2 maximum and sum; -inf for a row without a key."""
    # ln 2 in two parts: its float32 alone would cost the maximum another rounding
    return tl.where(norm > 0, top * LN2 + (top * LN2_REST + tl.log(tl.where(norm > 0, norm, 1.0))), -float("inf"))


@triton.jit
def softmax_stats(top, norm):
    """What the backward subtracts from base-2 scores: the maximum (+inf for a row without a key, whose weights are then zero) and log2
    of the sum.

    Kept apart, they repeat the forward's weights to the last bits; the LSE alone would lose as many as its magnitude takes.
    """
    return tl.where(norm > 0, top, float("inf")), tl.where(norm > 0, tl.log2(tl.where(norm > 0, norm, 1.0)), 0.0)


@triton.jit
def repeat_weights(scores, scale, top, log_norm, EXACT: tl.constexpr):
    """The forward's softmax weights from the saved statistics, which broadcast to the tile; without EXACT `top` is their sum."""
    if EXACT:
        weights = exp2(scores * scale - top - log_norm, EXACT)
    else:
        weights = tl.exp2(scores * scale - top)
    return weights
