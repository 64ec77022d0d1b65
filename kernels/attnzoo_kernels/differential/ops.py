"""Differential attention for autograd: plain functions in eager mode, custom operators under torch.compile."""

import functools

import torch
from torch import Tensor

from attnzoo_kernels import taken


def _forward(q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale, window_left, window_right, save):
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
    reason = "" if impl == "triton" else why_not_gluon(q1, q2, k1, k2, v)
    if impl != "gluon" or reason is None:
        taken.note("differential forward", "triton" if reason is not None else "gluon")
    if reason is None:
        from attnzoo_kernels.differential import hopper

        return hopper.launch_forward(*arguments)
    if impl == "gluon":
        raise NotImplementedError(f'impl="gluon" does not take this call: {reason}; impl=None or "triton" does')
    from attnzoo_kernels.differential.forward import launch_forward

    return launch_forward(*arguments)


def why_not_gluon(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor) -> str | None:
    """Why impl="gluon" does not take these tensors; None where it does."""
    if not q1.is_cuda:
        return f"q1 must be on a CUDA device, got {q1.device}"
    from attnzoo_kernels.flash.paths import gluon_loads

    if not gluon_loads():
        return "it does not work with the Triton that is installed"
    from attnzoo_kernels.differential import hopper

    return hopper.forward_reason(q1, q2, k1, k2, v)


def _gradients(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic, *numbers):
    from attnzoo_kernels._triton import launch
    from attnzoo_kernels.differential import backward
    from attnzoo_kernels.differential.options import Options

    readable = launch.readable(q1, k1, v, q2, out, grad_out, out2, *(() if k2 is None else (k2,)))
    if readable is not None:
        wide_q1, wide_k1, wide_v, wide_q2, wide_out, wide_grad_out, wide_out2, *wide_k2 = readable
        *wide, dlam = _gradients(wide_grad_out, wide_q1, wide_q2, wide_k1, wide_k2[0] if wide_k2 else None, wide_v, lam, wide_out,
                                 wide_out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic, *numbers)
        return *(x if like is None else launch.narrowed(x, like) for x, like in zip(wide, (q1, q2, k1, k2, v), strict=True)), dlam
    options = Options.of(cu_seqlens_q, *numbers)
    arguments = (grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, options)
    if backward_path(impl, q1, q2, k1, k2, v, deterministic) == "gluon":
        from attnzoo_kernels.differential import hopper_backward

        return hopper_backward.launch_backward(*arguments)
    return backward.launch_backward(*arguments)


def backward_path(impl: str | None, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, deterministic: bool) -> str:
    """"gluon" or "triton"; what Gluon's backward does not cover goes to plain Triton's, after either forward."""
    from attnzoo_kernels.flash.paths import gluon_loads

    if impl == "triton" or not q1.is_cuda or not gluon_loads():
        return taken.note("differential backward", "triton")
    from attnzoo_kernels.differential import hopper_backward

    reason = hopper_backward.backward_reason(q1, q2, k1, k2, v, deterministic)
    return taken.note("differential backward", "triton" if reason else "gluon")


@torch.library.custom_op("attnzoo::differential_forward", mutates_args=())
def forward_op(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool, softmax_scale: float, window_left: int, window_right: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale, window_left, window_right,
                    save)


@forward_op.register_fake
def _(q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale, window_left, window_right, save):
    out = q1.new_empty(*q1.shape[:-1], v.shape[-1])
    out2 = torch.empty_like(out) if save and q1.dtype != torch.float32 else out.new_empty(0)
    rows = (q1.shape[1], q1.shape[0]) if cu_seqlens_q is not None else (q1.shape[0], q1.shape[2], q1.shape[1])
    lse = q1.new_empty((2, *rows), dtype=torch.float32)
    return out, lse, out2, lse.new_empty((4, *rows) if save else 0)


@torch.library.custom_op("attnzoo::differential_backward", mutates_args=())
def backward_op(
    grad_out: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, out: Tensor, out2: Tensor,
    stats: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlam: bool, impl: str | None, deterministic: bool,
    softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = _gradients(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, impl, deterministic,
                           softmax_scale, window_left, window_right)
    return tuple(x.contiguous() for x in gradients)  # as the fake says, on either path


@backward_op.register_fake
def _(grad_out, q1, q2, k1, k2, v, lam, out, out2, stats, cu_seqlens_q, cu_seqlens_k, needs_dlam, *_):
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


forward_op.register_autograd(functools.partial(_backward, backward_op), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, whose share of a short call's host time is half."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(torch.autograd.function.once_differentiable(functools.partial(_backward, _gradients)))


def forward(*inputs):
    """(out, lse, out2, stats) of `forward_op`'s arguments."""
    return forward_op(*inputs) if torch.compiler.is_compiling() else _Eager.apply(*inputs)
