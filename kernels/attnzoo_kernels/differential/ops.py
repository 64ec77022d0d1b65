"""Differential attention's launches behind autograd. The functions import Triton when they are called."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool, softmax_scale: float, window_left: int, window_right: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels._triton import launch
    from attnzoo_kernels.differential.options import Options

    readable = launch.readable(q1, k1, v, q2, *(() if k2 is None else (k2,)))
    if readable is not None:
        wide_q1, wide_k1, wide_v, wide_q2, *wide_k2 = readable
        out, lse, out2, stats = _forward(wide_q1, wide_q2, wide_k1, wide_k2[0] if wide_k2 else None, wide_v, lam, cu_seqlens_q,
                                         cu_seqlens_k, impl, deterministic, softmax_scale, window_left, window_right, save)
        out, out2 = (launch.narrowed(x, v) for x in (out, out2))
        return out, lse, out2, stats
    options = Options.of(cu_seqlens_q, softmax_scale, window_left, window_right)
    arguments = (q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, save, options)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.differential import hopper

        return hopper.forward_reason(q1, q2, k1, k2, v)

    if dispatch.choose("differential forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.differential import hopper

        return hopper.launch_forward(*arguments)
    from attnzoo_kernels.differential.forward import launch_forward

    return launch_forward(*arguments)


def _fake_forward(q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale, window_left, window_right, save):
    out = q1.new_empty(*q1.shape[:-1], v.shape[-1])
    out2 = torch.empty_like(out) if save and q1.dtype != torch.float32 else out.new_empty(0)
    rows = autograd.lse_shape(q1, cu_seqlens_q is not None)
    lse = q1.new_empty((2, *rows), dtype=torch.float32)
    return out, lse, out2, lse.new_empty((4, *rows) if save else 0)


def _gradients(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic, *numbers):
    from attnzoo_kernels._triton import launch
    from attnzoo_kernels.differential.options import Options

    readable = launch.readable(q1, k1, v, q2, out, grad_out, out2, *(() if k2 is None else (k2,)))
    if readable is not None:
        wide_q1, wide_k1, wide_v, wide_q2, wide_out, wide_grad_out, wide_out2, *wide_k2 = readable
        *wide, dlam = _gradients(wide_grad_out, wide_q1, wide_q2, wide_k1, wide_k2[0] if wide_k2 else None, wide_v, lam, wide_out,
                                 wide_out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic, *numbers)
        return *(x if like is None else launch.narrowed(x, like) for x, like in zip(wide, (q1, q2, k1, k2, v), strict=True)), dlam
    options = Options.of(cu_seqlens_q, *numbers)
    arguments = (grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, options)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.differential import hopper_backward

        return hopper_backward.backward_reason(q1, q2, k1, k2, v, deterministic)

    if dispatch.choose_backward("differential backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.differential import hopper_backward

        return hopper_backward.launch_backward(*arguments)
    from attnzoo_kernels.differential import backward

    return backward.launch_backward(*arguments)


def _backward_op(
    grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor, out2: Tensor,
    stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool, impl: str | None, deterministic: bool,
    softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = _gradients(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic,
                           softmax_scale, window_left, window_right)
    return tuple(x.contiguous() for x in gradients)  # as the fake says, by either implementation


def _fake_backward(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, *_):
    dk2 = k1.new_empty(0) if k2 is None else k2.new_empty(k2.shape)
    dlam = lam.new_empty(lam.shape if needs_dlam else 0)
    dq1, dq2, dk1, dv = (x.new_empty(x.shape) for x in (q1, q2, k1, v))
    return dq1, dq2, dk1, dk2, dv, dlam


def _setup_context(ctx, inputs, output):
    q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, *options, _ = inputs
    out, _, out2, stats = output
    ctx.options = options
    ctx.save_for_backward(q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, *_):
    q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    needs_dlam = ctx.needs_input_grad[5]
    dq1, dq2, dk1, dk2, dv, dlam = gradients(
        grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, *ctx.options)
    return dq1, dq2, dk1, None if k2 is None else dk2, dv, dlam if needs_dlam else None, *(None,) * 8


forward = autograd.differentiable("differential_forward", "differential_attention", _forward, _fake_forward, _setup_context, _backward,
                                  _gradients, autograd.custom_op("differential_backward", _backward_op, _fake_backward))
