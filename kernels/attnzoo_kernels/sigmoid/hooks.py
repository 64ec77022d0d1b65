"""What sigmoid attention's plain kernels have beside products: each score alone makes its weight, no row has statistics."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import RowStats
from attnzoo_kernels._triton.scores import alibi
from attnzoo_kernels._triton.softmax import exp_in_units, in_units

# sigmoid(x), x in base 2, of four scores by one reciprocal: weights that are zero for -inf, and exact to 2^-21 where they are small. Above
# 2^30 they are one, and the product of four stays finite
SIGMOID = tl.constexpr(
    "{ .reg .f32 t<4>, a<4>, l, h, r; "
    + "".join(f"min.NaN.f32 t{n}, ${n + 4}, 0f41F00000; ex2.approx.ftz.f32 t{n}, t{n}; add.f32 a{n}, t{n}, 0f3F800000; " for n in range(4))
    + "mul.f32 l, a0, a1; mul.f32 h, a2, a3; mul.f32 r, l, h; rcp.approx.ftz.f32 r, r; mul.f32 h, h, r; mul.f32 l, l, r; "
    + "".join(f"mul.f32 t{n}, t{n}, a{n ^ 1}; mul.f32 ${n}, t{n}, {'hl'[n // 2]}; " for n in range(4)) + "}")
REGISTERS = tl.constexpr("=&f,=&f,=&f,=&f,f,f,f,f")


class Given(NamedTuple):
    """What all programs of a launch have in common."""

    window: Any
    alibi_slopes: Any
    stride_slopes: Any
    bias: Any
    n_seqs: Any
    HAS_BIAS: Any  # else it is minus the logarithm of a sequence's keys
    HAS_ALIBI: Any
    HARDWARE: Any  # NVIDIA's instructions
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
    return tl.inline_asm_elementwise(SIGMOID, REGISTERS, [scores], dtype=tl.float32, is_pure=True, pack=4)


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
    """WEIGHTS of the forward: the rows' maximum is one throughout, and so is the factor of what was added up."""
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
