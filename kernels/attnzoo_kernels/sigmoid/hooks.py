"""Hooks of sigmoid attention's plain kernels: each weight depends on its own score only, and rows have no statistics."""

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import RowStats
from attnzoo_kernels._triton.scores import alibi
from attnzoo_kernels._triton.softmax import exp_in_units, in_units

SHARING = tl.constexpr(4)  # weights of a thread that are computed with one reciprocal


def _sigmoid(count: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Inline assembly and its constraints for sigmoid(x) of `count` scores, a power of two, with x in base 2, by one reciprocal.

    With t = 2^x and a = 1 + t, a weight is t / a; all a share the reciprocal of their product. Scores of -inf give zero, and small weights
    are exact to 2^-21. Scores are capped at 120 / count, so that the product stays finite; there a weight differs from one by 2^(-120 /
    count).
    """
    lines = [f".reg .f32 t<{count}>, p<{2 * count}>, r<{count}>;"]
    for n in range(count):  # p: a tree of products, the root p1, whose leaves are the a; r: their reciprocals
        lines.append(f"min.NaN.f32 t{n}, ${count + n}, 0f{struct.pack('>f', 120 / count).hex()}; ex2.approx.ftz.f32 t{n}, t{n}; "
                     f"add.f32 p{count + n}, t{n}, 0f3F800000;")
    lines += [f"mul.f32 p{n}, p{2 * n}, p{2 * n + 1};" for n in reversed(range(1, count))]
    lines += [f"mul.f32 t{n}, t{n}, p{(count + n) ^ 1};" for n in range(count)]  # early, so that the leaves take no registers afterwards
    lines.append("rcp.approx.ftz.f32 r1, p1;")
    lines += [f"mul.f32 r{n}, r{n // 2}, p{n ^ 1};" for n in range(2, count)]
    lines += [f"mul.f32 ${n}, t{n}, r{(count + n) // 2};" for n in range(count)]
    return tl.constexpr("{ " + " ".join(lines) + " }"), tl.constexpr(",".join(["=&f"] * count + ["f"] * count))


SIGMOID, REGISTERS = _sigmoid(SHARING.value)


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
def load_slope(given, sequence, head):
    slope = 0.0
    if given.HAS_ALIBI:
        slope = tl.load(given.alibi_slopes + tl.minimum(sequence, given.n_seqs - 1) * given.stride_slopes + head).to(tl.float32)
    return slope


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
    return tl.inline_asm_elementwise(SIGMOID, REGISTERS, [scores], dtype=tl.float32, is_pure=True, pack=SHARING)


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
def hardware_sigmoid_forward(scores, one, unit, MASKED, EXACT, LAGS, less):
    return hardware_sigmoid(scores, unit, 0.0, 0.0, EXACT), one, one


@triton.jit
def sigmoid_forward(scores, one, unit, MASKED, EXACT, LAGS, less):
    """WEIGHTS of the forward. The rows' maximum is always one, and so is the factor of what was accumulated before."""
    return sigmoid(scores, unit, 0.0, 0.0, EXACT), one, one


@triton.jit
def sigmoid_gradient(weights, dweights, delta):
    """GRADIENT."""
    return weights * (1.0 - weights) * dweights


@triton.jit
def no_stats(x, own, at):
    """LOAD_STATS."""
    nothing = tl.zeros([x.shape.BLOCK_M], tl.float32)
    return RowStats(nothing, nothing, nothing)
