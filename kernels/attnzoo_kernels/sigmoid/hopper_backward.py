"""Sigmoid attention's backward on Hopper: flash's without row statistics. A step computes the scores' gradients from the weights and their
gradients alone."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_plan import Tile
from attnzoo_kernels._gluon.backward_step import masked_scores
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.sigmoid.hopper import bias_of, sigmoid
from attnzoo_kernels.sigmoid.options import Options


@gluon.jit
def own_bias(tensors, numbers, problem, dtype: gl.constexpr, config):
    """OWN: the bias in base 2."""
    return numbers[0]


@gluon.jit
def bias_of_tile(own, key, len_q, len_k, config):
    """TILE_PARAMS: the bias."""
    return bias_of(own, len_k, config.OPTIONS)


@gluon.jit
def _gradient(weights, dweights, smem, stage, config):
    """GRADIENT: dS = P (1 - P) dP."""
    dweights = weights * dweights
    return dweights - weights * dweights


@gluon.jit
def _head_params(scale, bias, smem, slot, member, dq_tile, problem, config, ME: gl.constexpr):
    """HEAD_PARAMS: (the scale that brings scores to base 2, the bias in base 2)."""
    return scale, bias


@gluon.jit
def _weights(scores, step_params, smem, stage, head_params, low, high, config, MASKED: gl.constexpr):
    """WEIGHTS. Queries after a sequence's end have an output gradient of zero, so they add nothing."""
    scores = scores * head_params[0] + head_params[1]
    if MASKED:
        scores = masked_scores(scores, smem.columns, low, high, config)
    return sigmoid(scores)


HOOKS = (("OWN", own_bias), ("TILE_PARAMS", bias_of_tile), ("HEAD_PARAMS", _head_params), ("WEIGHTS", _weights), ("GRADIENT", _gradient))


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.slopes_stride is not None:
        return "it has no alibi_slopes"
    return why_not_tma(q, k, v)


def launch_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                    options: Options, deterministic: bool, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, for calls that backward_reason accepts."""
    ordered = deterministic or flash.in_order_anyway(q, k, v, options)
    rule = flash.Rule((*HOOKS, ("OPTIONS", options.by_length)), (options.base_2_bias(k.shape[-3]),))
    return flash.launch_backward(grad_out, None, q, k, v, None, None, cu_seqlens_q, cu_seqlens_k, options, ordered, tile, rule=rule)[:3]
