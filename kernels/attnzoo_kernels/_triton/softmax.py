"""Online softmax, and the functions that it and the scores are computed with.

The softmax's units: its exponentials are powers of two, by the hardware's instruction, and its scores are natural scores times log2(e).
Under EXACT, for float32, both are natural, and every step follows eager PyTorch to the last bit: another base would round each score once
more.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.tiles import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 15 bits, so that its product with an exponent is exact
LN2_LOW = tl.constexpr(1.4286068202862268e-06)
LAG = tl.constexpr(8.0)  # how far row_max may lie below the true maximum, in base 2; weights up to 2**8 fit 16-bit dtypes, too


def _skipped_product(count: int) -> tuple[tl.constexpr, tl.constexpr]:
    """(inline assembly, its constraints): multiplies `count` registers by `count` factors, unless the last operand, an integer, is zero."""
    products = "".join(f"mul.f32 ${n}, ${n}, ${2 * count + n}; " for n in range(count))
    text = "{ .reg .pred moved; setp.ne.s32 moved, $" + str(3 * count) + ", 0; @!moved bra over; " + products + "over: }"
    constraints = ["=f"] * count + [str(n) for n in range(count)] + ["f"] * count + ["r"] * count
    return tl.constexpr(text), tl.constexpr(",".join(constraints))


PRODUCT_32, REGISTERS_32 = _skipped_product(32)
PRODUCT_8, REGISTERS_8 = _skipped_product(8)


@triton.jit
def in_units(x, EXACT: tl.constexpr):
    """x, a natural score or a factor of natural scores, in the softmax's units."""
    if EXACT:
        y = x
    else:
        y = x * LOG2E
    return y


@triton.jit
def _exact_expm1(x):
    """(a, b) with exp(x) = a + b, to float32's last bit, for |x| < 87. b is a power of two, so that a + (b - 1) is exp(x) - 1.

    x is reduced to a whole multiple of ln 2 and a rest t; a is b times the Taylor series of exp(t) - 1.
    """
    whole = tl.floor(x * LOG2E + 0.5)
    t = (x - whole * LN2_HIGH) - whole * LN2_LOW
    series = t * (1.0 + t * (1 / 2 + t * (1 / 6 + t * (1 / 24 + t * (1 / 120 + t * (1 / 720 + t * (1 / 5040)))))))
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return series * power, power


@triton.jit
def exp_in_units(x, EXACT: tl.constexpr):
    """exp(x) for x <= 0, where x is in the softmax's units."""
    if EXACT:
        a, b = _exact_expm1(tl.where(x < -87.0, -87.0, x))
        y = tl.where(x < -87.0, 0.0, a + b)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def tanh(x, EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    """tanh by NVIDIA's instruction (error 2**-11) under HARDWARE, else by an exponential."""
    if HARDWARE:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif EXACT:
        bounded = tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
        a, b = _exact_expm1(2.0 * bounded)
        difference = a + (b - 1.0)
        t = tl.div_rn(difference, difference + 2.0)
    else:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return t


@triton.jit
def _added_by_pairs(parts):
    """The sum of [M, N, K] over its last axis, pair by pair, so that the order of additions does not depend on the layout."""
    M: tl.constexpr = parts.shape[0]
    N: tl.constexpr = parts.shape[1]
    K: tl.constexpr = parts.shape[2]
    even, odd = tl.split(parts.reshape(M, N, K // 2, 2))
    if K == 2:
        total = even.reshape(M, N) + odd.reshape(M, N)
    else:
        total = _added_by_pairs(even + odd)
    return total


@triton.jit
def score_dot(a, b, PRECISION: tl.constexpr):
    """a bᵀ for a [M, K] and b [N, K]. In float32 it is summed in parts of 16 columns: one long sum would lose twice the bits that a matrix
    product loses."""
    PARTS: tl.constexpr = a.shape[1] // 16
    if PRECISION == "ieee" and PARTS > 1:
        parts_a = tl.permute(a.reshape(a.shape[0], PARTS, 16), (1, 0, 2))
        parts_b = tl.permute(b.reshape(b.shape[0], PARTS, 16), (1, 2, 0))
        product = _added_by_pairs(tl.permute(tl.dot(parts_a, parts_b, input_precision=PRECISION), (1, 2, 0)))
    else:
        product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return product


@triton.jit
def add_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. In float32 the product is computed by itself first, which keeps long sums as exact as those of a matrix product."""
    if PRECISION == "ieee":
        product = tl.dot(a, b, input_precision=PRECISION)
        acc = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)  # a plain addition would be fused into the product's sum
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def softmax_weights(scores, row_max, scale, MASKED: tl.constexpr, EXACT: tl.constexpr, LAGS: tl.constexpr, row_bias=None):
    """A step of the online softmax, without the row sum, over scores [M, N] (-inf where masked). `scale` brings them to the softmax's
    units.

    LAGS (not under EXACT): row_max is replaced only where the new maximum is more than LAG above it, so that accumulators seldom need
        rescaling.
    row_bias: [M], subtracted from every score of a row, in the softmax's units.

    Returns the weights relative to the new maximum, the new maximum, and the factor for what was accumulated before.
    """
    tile_max = tl.max(scores, 1) * scale
    if row_bias is not None:
        tile_max -= row_bias
    if LAGS and not EXACT:
        new_max = tl.where(tile_max > row_max + LAG, tile_max, row_max)
    else:
        new_max = tl.maximum(row_max, tile_max)
    base = new_max
    if MASKED:
        # avoids inf - inf in a row that has seen no key yet
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = exp_in_units(row_max - base, EXACT)
    if row_bias is not None:
        base += row_bias
    return exp_in_units(scores * scale - base[:, None], EXACT), new_max, rescale


@triton.jit
def softmax_step(scores, row_max, row_sum, scale, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """softmax_weights and the row sum: the weights, the new maximum, the new sum, and the factor for what was accumulated before."""
    weights, new_max, rescale = softmax_weights(scores, row_max, scale, MASKED, EXACT, False)
    return weights, new_max, row_sum * rescale + tl.sum(weights, 1), rescale


@triton.jit
def rescaled(acc, rescale, row_max, old_max, BY_WARP: tl.constexpr):
    """acc [M, N] times rescale [M], in float32. BY_WARP: a warp skips the product if none of its rows has a new maximum.

    BY_WARP is only for accumulators of Hopper's products where four warps share 64 rows. There a thread holds elements of two rows, whose
    maxima it compares.
    """
    if BY_WARP and not INTERPRETED:
        moved = tl.inline_asm_elementwise(
            "{ .reg .pred moved, other; setp.neu.f32 moved, $2, $4; setp.neu.f32 other, $3, $5; or.pred moved, moved, other;"
            " vote.sync.any.pred moved, moved, 0xffffffff; selp.s32 $0, 1, 0, moved; mov.s32 $1, $0; }",
            "=&r,=&r,f,f,f,f", [row_max, old_max], dtype=tl.int32, is_pure=True, pack=2)
        operands = [acc, rescale[:, None], moved[:, None]]
        if acc.shape[1] >= 64:
            acc = tl.inline_asm_elementwise(PRODUCT_32, REGISTERS_32, operands, dtype=tl.float32, is_pure=True, pack=32)
        else:
            acc = tl.inline_asm_elementwise(PRODUCT_8, REGISTERS_8, operands, dtype=tl.float32, is_pure=True, pack=8)
    else:
        acc *= rescale[:, None]
    return acc


@triton.jit
def log_sum_exp(row_max, row_sum, EXACT: tl.constexpr):
    """Natural log-sum-exp from a row's maximum and sum; -inf for a row without a key."""
    positive = tl.where(row_sum > 0, row_sum, 1.0)
    if EXACT:
        lse = row_max + tl.log(positive)
    else:
        lse = row_max * LN2_HIGH + (row_max * LN2_LOW + tl.log2(positive) * LN2)  # the same logarithm as in softmax_stats
    return tl.where(row_sum > 0, lse, -float("inf"))


@triton.jit
def softmax_stats(row_max, row_sum, EXACT: tl.constexpr):
    """What the backward needs of each row: the maximum (+inf for a row without a key, so that its weights are zero), and log2 of the sum,
    or, under EXACT, the sum itself.

    From these two numbers the backward computes the forward's weights to the last bits. The LSE, which is their sum, has been rounded: the
    larger it is, the more bits are lost.
    """
    sum_stat = tl.where(row_sum > 0, row_sum, 1.0)
    if not EXACT:
        sum_stat = tl.log2(sum_stat)
    return tl.where(row_sum > 0, row_max, float("inf")), sum_stat


@triton.jit
def repeat_weights(scores, scale, row_max, sum_stat, EXACT: tl.constexpr):
    """WEIGHTS of the backward: the forward's softmax weights again, from statistics that broadcast to the tile. Without EXACT, `row_max` is
    the LSE in base 2, and sum_stat is not read."""
    if EXACT:
        weights = exp_in_units(scores * scale - row_max, EXACT)
        weights = tl.div_rn(weights, sum_stat + tl.zeros_like(weights))
    else:
        weights = tl.exp2(scores * scale - row_max)
    return weights
