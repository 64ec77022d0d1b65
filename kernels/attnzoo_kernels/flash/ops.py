"""FlashAttention's launches behind autograd. The functions import Triton when they are called, so that this module does not need it."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch

NARROW = 256  # left windows below this are faster in plain Triton with sinks (docs/performance/flash.md)


def _options(cu_seqlens_q, alibi_slopes, rng_state, *numbers):
    from attnzoo_kernels.flash.options import Options

    options = Options.of(cu_seqlens_q, alibi_slopes, *numbers)
    return options if rng_state is None or rng_state.shape[0] == 2 else replace(options, dropout_from_row=True)


def wants_residual(q: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, ranges: bool, impl: str | None, softcap: float,
                   dropout_p: float) -> bool:
    """Whether the forward must keep the output's rounding error (the residual). Hopper's backward up to head dim 128 needs it for the
    gradient of sinks; plain Triton's does not. torch.compile traces this function, so the device is checked in `empty_residual`."""
    return not (alibi_slopes is not None or ranges or softcap > 0 or dropout_p > 0) and hopper_wants_residual(q, v, (sinks,), impl, 128)


def hopper_wants_residual(q: Tensor, v: Tensor, learned: tuple[Tensor | None, ...], impl: str | None, widest: int) -> bool:
    """Whether a gradient of one of the `learned` tensors is wanted and Hopper's backward, up to a head dim of `widest`, may make it.
    Without the residual, delta = rowsum(dO * O) would carry the rounding error of O into such a gradient."""
    if impl == "triton" or not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in learned):
        return False
    return q.dtype != torch.float32 and 32 < max(q.shape[-1], v.shape[-1]) <= widest


def empty_residual(q: Tensor, v: Tensor, wanted: bool) -> Tensor:
    """A tensor like the output for its rounding error; it has no elements if that is not wanted or the GPU is no Hopper."""
    from attnzoo_kernels._triton.launch import architecture

    kept = wanted and not (q.is_cuda and architecture(q.device) != 90)
    return q.new_empty((*q.shape[:-1], v.shape[-1]) if kept else 0)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, rng_state: Tensor | None, residual_wanted: bool, impl: str | None, deterministic: bool, softmax_scale: float,
    window_left: int, window_right: int, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels._triton import launch

    numbers = softmax_scale, window_left, window_right, softcap, dropout_p
    readable = launch.readable(q, k, v)
    if readable is not None:
        out, lse, stats, residual = _forward(*readable, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, residual_wanted, impl,
                                             deterministic, *numbers)
        return launch.narrowed(out, v), lse, stats, launch.narrowed(residual, v) if residual.numel() else residual
    options = _options(cu_seqlens_q, alibi_slopes, rng_state, *numbers)
    residual = empty_residual(q, v, residual_wanted)
    kept = residual if residual.numel() else None

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.flash import hopper

        if impl is None and sinks is not None and 0 <= window_left < NARROW:
            return "plain Triton is faster with sinks and a narrow window"
        if impl is None and options.ranges and window_left >= 0 and max(q.shape[-1], v.shape[-1]) <= 64:
            return "plain Triton is faster over key ranges in windows up to head_dim 64"
        return hopper.forward_reason(q, k, v, options)

    if dispatch.choose("flash forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.flash import hopper, hopper_ranges

        if options.ranges:
            return *hopper_ranges.launch_forward(q, k, v, cu_seqlens_q, sinks, options), residual
        return *hopper.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, options, residual=kept), residual
    from attnzoo_kernels.flash import forward

    return *forward.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, options, residual=kept), residual


def _fake_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, residual_wanted, *_):
    return *autograd.fake_softmax(q, k, v), empty_residual(q, v, residual_wanted)


def _gradients(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, sinks, impl,
               deterministic, *numbers, into=None):
    """dQ, dK, dV and the gradient of `sinks`, which is empty if sinks is None. sinks: given only if their gradient is wanted."""
    from attnzoo_kernels._triton import launch

    kept = residual if residual.numel() else None
    readable = launch.readable(q, k, v, out, grad_out, *(() if kept is None else (kept,)))
    if readable is not None:
        *wide, dsinks = _gradients(readable[4], grad_lse, *readable[:4], *(readable[5:] or (residual,)), stats, cu_seqlens_q, cu_seqlens_k,
                                   alibi_slopes, rng_state, sinks, impl, deterministic, *numbers)
        narrow = tuple(map(launch.narrowed, wide, (q, k, v)))
        return *(narrow if into is None else (to.copy_(x) for to, x in zip(into, narrow, strict=True))), dsinks
    options = _options(cu_seqlens_q, alibi_slopes, rng_state, *numbers)
    arguments = (grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k)
    exact_delta = sinks is not None

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.flash import hopper_backward, hopper_wide_backward

        if options.ranges and deterministic:
            return "it adds up dQ over key ranges in no order"
        if q.shape[-1] > hopper_wide_backward.FIRST:
            return hopper_wide_backward.backward_reason(q, k, v, options, exact_delta, deterministic)
        reason = hopper_backward.backward_reason(q, k, v, options)
        if reason is None and exact_delta and kept is None:
            reason = "it has no gradient of sinks over key ranges, nor without queries"
        return reason

    if dispatch.choose_backward("flash backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.flash import hopper_backward, hopper_ranges_backward, hopper_wide_backward

        if options.ranges:
            grads = hopper_ranges_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_k, options, into)
        elif q.shape[-1] > hopper_wide_backward.FIRST:
            grads = hopper_wide_backward.launch_backward(*arguments, options, into)
        else:
            ordered = deterministic or hopper_backward.in_order_anyway(q, k, v, options)
            *grads, dsinks = hopper_backward.launch_backward(*arguments, options, ordered, into=into, residual=kept, sinks=sinks)
            if exact_delta:
                return *grads, dsinks.to(sinks.dtype)
        return *grads, stats.new_empty(0)
    from attnzoo_kernels.flash import backward

    *grads, delta = backward.launch_backward(*arguments, alibi_slopes, rng_state, exact_delta, options, into)
    return *grads, _gradient_of_sinks(sinks, stats, delta, q.dtype) if exact_delta else delta


def _gradient_of_sinks(sinks: Tensor, stats: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows of -(the sink's weight) * delta, in a fixed order and in float64, because the rows nearly cancel."""
    row_max, sum_stat = stats
    sink = sinks.float().view(-1, 1)
    if dtype == torch.float32:  # the statistics of `_triton.softmax` are in natural units there
        weight = torch.exp(sink.double() - row_max.double()) / sum_stat
    else:
        weight = torch.exp2(sink * math.log2(math.e) - row_max - sum_stat)
    return -(weight.double() * delta).sum(1 if delta.dim() == 2 else (0, 2)).to(sinks.dtype)


def _backward_op(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, residual: Tensor, stats: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None, sinks: Tensor | None,
    impl: str | None, deterministic: bool, softmax_scale: float, window_left: int, window_right: int, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    contiguous = tuple(x.new_empty(x.shape) for x in (q, k, v))  # as _fake_backward says
    return _gradients(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, sinks,
                      impl, deterministic, softmax_scale, window_left, window_right, softcap, dropout_p, into=contiguous)


def _fake_backward(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, sinks, *_):
    return *(x.new_empty(x.shape) for x in (q, k, v)), _fake_dsinks(stats, sinks)


def _fake_dsinks(stats: Tensor, sinks: Tensor | None) -> Tensor:
    return stats.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _backward_joint_op(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, residual: Tensor, stats: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None, sinks: Tensor | None,
    impl: str | None, deterministic: bool, softmax_scale: float, window_left: int, window_right: int, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """(dQ, dK and dV side by side in one tensor (..., sum of heads x width); the gradient of sinks)."""
    joint = q.new_empty(*q.shape[:-2], sum(_widths(q, k, v)))
    dsinks = _gradients(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, sinks,
                        impl, deterministic, softmax_scale, window_left, window_right, softcap, dropout_p, into=_split(joint, q, k, v))[3]
    return joint, dsinks


def _fake_backward_joint(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
                         sinks, *_):
    return q.new_empty(*q.shape[:-2], sum(_widths(q, k, v))), _fake_dsinks(stats, sinks)


backward_op = autograd.custom_op("flash_backward", _backward_op, _fake_backward)
backward_joint_op = autograd.custom_op("flash_backward_joint", _backward_joint_op, _fake_backward_joint)


def _widths(*tensors: Tensor) -> list[int]:
    return [x.shape[-2] * x.shape[-1] for x in tensors]


def _split(joint: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of the parts of `joint`, each with the shape of one of the tensors."""
    return tuple(part.unflatten(-1, x.shape[-2:]) for part, x in zip(joint.split(_widths(*tensors), joint.dim() - 1), tensors, strict=True))


def _joint_gradients(grad_out, grad_lse, q, k, v, *rest):
    """The gradients as parts of one tensor. Where q, k and v come from one product, its backward gets that tensor without a copy."""
    if q.shape[:-2] != k.shape[:-2] or any(width * q.itemsize % 16 for width in _widths(q, k, v)):
        return backward_op(grad_out, grad_lse, q, k, v, *rest)
    joint, dsinks = backward_joint_op(grad_out, grad_lse, q, k, v, *rest)
    return *_split(joint, q, k, v), dsinks


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, _, *ctx.options = inputs
    out, _, stats, residual = output
    ctx.save_for_backward(q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, grad_lse, *_):
    q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wanted = sinks if ctx.needs_input_grad[6] else None
    dq, dk, dv, dsinks = gradients(grad_out, grad_lse, q, k, v, out, residual, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
                                   wanted, *ctx.options)
    dsinks = None if wanted is None else dsinks
    return dq, dk, dv, None, None, None, dsinks, *(None,) * (2 + len(ctx.options))


forward = autograd.differentiable("flash_forward", "flash_attention", _forward, _fake_forward, _setup_context, _backward,
                                  _gradients, _joint_gradients)
