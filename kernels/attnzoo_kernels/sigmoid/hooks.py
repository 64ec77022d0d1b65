"""Hooks of sigmoid attention's plain kernels: each weight depends on its own score only, and rows have no statistics."""

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import RowStats
from attnzoo_kernels._triton.scores import alibi
from attnzoo_kernels._triton.softmax import exp_in_units, in_units

SHARING = tl.constexpr(4)  # weights of a thread that are computed with one reciprocal
TOGETHER = tl.constexpr(16)  # on Hopper: weights of a thread that are computed by a series if all are small; as many as SHARING: never
TERMS = 3  # of the series t - t^2 + t^3 ...
SMALL = 2.0 ** (-12 / TERMS)  # up to which the series, cut there, errs by much less than a rounding to bfloat16


def _bits(x: float) -> str:
    """Of a float32, in hexadecimal digits."""
    return struct.pack(">f", x).hex()


def _sigmoid(count: int, together: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Inline assembly and its constraints for sigmoid(x) from t = 2^x of `together` scores, with x in base 2.

    A weight is t / (1 + t). In a warp whose t are all small it is a series. Else `count` weights, a power of two, have one reciprocal:
    those of t and u are (t + t u) / d and (u + t u) / d with d = (1 + t) + (u + t u), and all d share the reciprocal of their product. They
    are exact to 2^-21, close to zero, too. There t is capped at 2^(120 / count), so that the product stays finite, and a weight differs
    from one by 2^(-120 / count) at most. Scores of -inf give zero, and NaN gives NaN.
    """
    lines = [f".reg .f32 t<{together}>, w<{together}>, p<{count}>, r<{count}>; .reg .b32 most, b; .reg .pred large;"]
    powers = [f"${together + n}" for n in range(together)]
    if together > count:
        lines.append("mov.b32 most, 0;")  # floats that are not negative compare as integers do, and NaN is the largest
        lines += [f"mov.b32 b, {t}; max.s32 most, most, b;" for t in powers]
        lines.append(f"setp.gt.s32 large, most, 0x{_bits(SMALL)}; vote.sync.any.pred large, large, 0xffffffff; @large bra.uni LARGE;")
        for n, t in enumerate(powers):
            longer = f"fma.rn.f32 w{n}, t{n}, w{n}, {t}; "  # from k terms to k + 1
            lines.append(f"neg.f32 t{n}, {t}; mov.b32 w{n}, {t}; {longer * (TERMS - 1)}mov.b32 ${n}, w{n};")
        lines.append("bra.uni DONE; LARGE:")
    lines += [f"min.NaN.f32 t{n}, {t}, 0f{_bits(2.0 ** (120 / count))};" for n, t in enumerate(powers)]
    for first in range(0, together, count):  # p: a tree of products, the root p1, whose leaves are the d; r: their reciprocals
        for n in range(first, first + count, 2):
            lines.append(f"fma.rn.f32 w{n}, t{n}, t{n + 1}, t{n}; fma.rn.f32 w{n + 1}, t{n}, t{n + 1}, t{n + 1}; "
                         f"add.f32 t{n}, t{n}, 0f{_bits(1.0)}; add.f32 p{(count + n - first) // 2}, t{n}, w{n + 1};")
        lines += [f"mul.f32 p{n}, p{2 * n}, p{2 * n + 1};" for n in reversed(range(1, count // 2))]
        lines.append("rcp.approx.ftz.f32 r1, p1;")
        lines += [f"mul.f32 r{n}, r{n // 2}, p{n ^ 1};" for n in range(2, count)]
        lines += [f"mul.f32 ${first + n}, w{first + n}, r{(count + n) // 2};" for n in range(count)]
    lines.append("DONE:")
    return tl.constexpr("{ " + " ".join(lines) + " }"), tl.constexpr(",".join(["=&f"] * together + ["f"] * together))


SIGMOID, REGISTERS = _sigmoid(SHARING.value, SHARING.value)
HOPPER_SIGMOID, HOPPER_REGISTERS = _sigmoid(SHARING.value, TOGETHER.value)


class Given(NamedTuple):
    """What all programs of a launch have in common."""

    window: Any
    alibi_slopes: Any
    stride_slopes: Any
    bias: Any
    n_seqs: Any
    HAS_BIAS: Any  # False: the bias is minus the logarithm of the number of a sequence's keys
    HAS_ALIBI: Any
    HARDWARE: Any  # whether NVIDIA's instructions are used
    ONE_LOOP: Any


class Loaded(NamedTuple):
    """What hooks take: the bias of a sequence and the slope of a head, both in the kernel's units."""

    window: Any
    given: Any
    bias: Any
    slope: Any
    END: Any = True  # fault 18


@triton.jit
def load_bias(given, len_k, EXACT: tl.constexpr):
    bias = given.bias
    if not given.HAS_BIAS:
        bias = -tl.log(tl.maximum(len_k, 1).to(tl.float32))
    return in_units(bias, EXACT)


@triton.jit
def _biased(products, i, j, shift, unit, own, EXACT: tl.constexpr):
    scores = products * unit
    if own.given.HAS_ALIBI:
        scores -= alibi(i, j, shift, 0, own.slope, 1.0, False, EXACT)[0]
    return scores + own.bias, 0.0, 1.0


@triton.jit
def biased(x, own, products, i, j, at):
    """SCORE of forward and dQ."""
    return _biased(products, i, j, x.place.other_length - x.place.length, x.unit, own, x.shape.PRECISION == "ieee")


@triton.jit
def biased_transposed(x, own, products, i, j, at):
    """SCORE of dK/dV."""
    return _biased(products, i, j, x.place.length - x.place.other_length, x.unit, own, x.shape.PRECISION == "ieee")


@triton.jit
def hardware_sigmoid(scores, unit, lse, row_sum, EXACT: tl.constexpr):
    return tl.inline_asm_elementwise(SIGMOID, REGISTERS, [tl.exp2(scores)], dtype=tl.float32, is_pure=True, pack=SHARING)


@triton.jit
def sigmoid(scores, unit, lse, row_sum, EXACT: tl.constexpr):
    """WEIGHTS of the backward."""
    if EXACT:
        small = exp_in_units(-tl.abs(scores), EXACT)
        weights = tl.div_rn(tl.where(scores < 0, small, 1.0), 1.0 + small)
    else:
        weights = 1.0 / (1.0 + tl.exp2(-scores))
    return weights


@triton.jit
def hardware_sigmoid_forward(scores, one, unit, MASKED, EXACT, LAGS, row_bias):
    return hardware_sigmoid(scores, unit, 0.0, 0.0, EXACT), one, one


@triton.jit
def sigmoid_forward(scores, one, unit, MASKED, EXACT, LAGS, row_bias):
    """WEIGHTS of the forward. The rows' maximum is always one, and so is the factor of what was accumulated before."""
    return sigmoid(scores, unit, 0.0, 0.0, EXACT), one, one


@triton.jit
def sigmoid_gradient(weights, dweights, delta):
    """GRADIENT: dS = P (1 - P) dP."""
    return weights * (1.0 - weights) * dweights


@triton.jit
def no_stats(x, own, at):
    """LOAD_STATS: a sigmoid has no row statistics."""
    nothing = tl.zeros([x.shape.BLOCK_M], tl.float32)
    return RowStats(nothing, nothing, nothing)
