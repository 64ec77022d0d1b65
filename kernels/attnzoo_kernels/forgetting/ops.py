"""Forgetting attention's launches behind autograd. The functions import Triton when they are called."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.flash.ops import empty_residual, hopper_wants_residual
from attnzoo_kernels.forgetting import gates

FEWEST_KEYS = 1024  # with fewer keys, finding the tiles to skip would cost more than skipping saves


def prunes(k: Tensor, window_left: int, prune: bool | None) -> bool:
    """Whether tiles are skipped; None decides by the number of keys."""
    return k.shape[-3] >= FEWEST_KEYS and window_left < 0 if prune is None else prune


def _options(cu_seqlens_q: Tensor | None, k: Tensor, softmax_scale: float, window_left: int, prune: bool | None):
    from attnzoo_kernels._triton.call import packed_sequences
    from attnzoo_kernels.flash.options import Options

    return Options(sequences=packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale, window_left=window_left, window_right=0,
                   key_bias=True, pruned=prunes(k, window_left, prune))


def wants_residual(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, impl: str | None, deterministic: bool) -> bool:
    """Whether the forward must keep the output's rounding error: Hopper's backward needs it for dQ, dK and the gradient of log_f."""
    taken = not deterministic and q.dtype == torch.bfloat16 and q.shape[:-2] == k.shape[:-2]
    return taken and hopper_wants_residual(q, v, (q, k, log_f), impl, 128)


@autograd.readable(0, 1, 2, like=(2, 2))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, residual_wanted: bool,
    impl: str | None, deterministic: bool, softmax_scale: float, window_left: int, prune: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = _options(cu_seqlens_q, k, softmax_scale, window_left, prune)
    residual = empty_residual(q, v, residual_wanted)
    kept = residual if residual.numel() else None

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.forgetting import hopper

        return hopper.forward_reason(q, k, v, options)

    path = dispatch.choose("forgetting forward", impl, why_not_gluon)
    from attnzoo_kernels.forgetting.blocks import empty_parts, key_bias

    parts = empty_parts(q, k, options) if path == "gluon" else None
    bias = key_bias(log_f, q, k, cu_seqlens_q, cu_seqlens_k, options, parts)
    if path == "gluon":
        from attnzoo_kernels.forgetting import hopper

        out, lse, stats = hopper.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options, bias, parts, kept)
    else:
        from attnzoo_kernels.flash.forward import launch_forward

        out, lse, stats = launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, None, options, bias, residual=kept)
    return out, residual, lse, stats, *bias


def _fake_forward(q, k, v, log_f, cu_seqlens_q, cu_seqlens_k, residual_wanted, impl, deterministic, softmax_scale, window_left, prune):
    from attnzoo_kernels.forgetting.blocks import shapes

    lse = q.new_empty(autograd.lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)
    c, starts, ends = shapes(q, k, log_f, _options(cu_seqlens_q, k, softmax_scale, window_left, prune))
    return (q.new_empty(*q.shape[:-1], v.shape[-1]), empty_residual(q, v, residual_wanted), lse, lse.new_empty(2, *lse.shape),
            lse.new_empty(c), lse.new_empty(starts), lse.new_empty(ends, dtype=torch.int32))


@autograd.readable(2, 3, 4, 5, 6, 0, like=(2, 3, 4))
def _gradients(grad_out, grad_lse, q, k, v, out, residual, stats, c, starts, ends, cu_seqlens_q, cu_seqlens_k, needs_dlog_f, impl,
               deterministic, *numbers):
    from attnzoo_kernels.flash.options import KeyBias

    options = _options(cu_seqlens_q, k, *numbers)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.forgetting import hopper_backward

        return hopper_backward.backward_reason(q, k, v, cu_seqlens_q, cu_seqlens_k, options, deterministic)

    if dispatch.choose_backward("forgetting backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.forgetting import hopper_backward

        dq, dk, dv, columns, rows = hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, options,
                                                                    KeyBias(c, starts, ends), residual if residual.numel() else None)
        if not needs_dlog_f:
            return dq, dk, dv, stats.new_empty(0)
        return dq, dk, dv, gates.gradient(columns, rows.double(), cu_seqlens_q, cu_seqlens_q)
    from attnzoo_kernels.flash.backward import launch_backward

    columns = torch.empty(autograd.lse_shape(q, cu_seqlens_q is not None)[:-1] + (k.shape[-3],), device=q.device,
                          dtype=torch.float64 if q.dtype == torch.float32 else torch.float32)
    dq, dk, dv, rows = launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, None, None,
                                       "residual" if needs_dlog_f else False, options,
                                       key_bias=KeyBias(c, starts, ends), column_sums=columns)
    if not needs_dlog_f:
        return dq, dk, dv, stats.new_empty(0)
    return dq, dk, dv, gates.gradient(columns, rows.double() if grad_lse is None else rows.double() + grad_lse, cu_seqlens_q, cu_seqlens_k)


def _backward_op(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, residual: Tensor, stats: Tensor, c: Tensor,
    starts: Tensor, ends: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, needs_dlog_f: bool, impl: str | None,
    deterministic: bool, softmax_scale: float, window_left: int, prune: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = _gradients(grad_out, grad_lse, q, k, v, out, residual, stats, c, starts, ends, cu_seqlens_q, cu_seqlens_k, needs_dlog_f,
                           impl, deterministic, softmax_scale, window_left, prune)
    return tuple(x.contiguous() for x in gradients)  # as the fake says, by either implementation


def _fake_backward(grad_out, grad_lse, q, k, v, out, residual, stats, c, starts, ends, cu_seqlens_q, cu_seqlens_k, needs_dlog_f, *_):
    return *(x.new_empty(x.shape) for x in (q, k, v)), stats.new_empty((*k.shape[:-2], q.shape[-2]) if needs_dlog_f else 0)


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, cu_seqlens_q, cu_seqlens_k, _, *ctx.options = inputs
    out, residual, _, stats, *bias = output
    ctx.save_for_backward(q, k, v, out, residual, stats, *bias, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, _, grad_lse, *__):
    q, k, v, out, *saved = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    needs_dlog_f = ctx.needs_input_grad[3]
    dq, dk, dv, dlog_f = gradients(grad_out, grad_lse, q, k, v, out, *saved, needs_dlog_f, *ctx.options)
    return dq, dk, dv, dlog_f if needs_dlog_f else None, *(None,) * (3 + len(ctx.options))


forward = autograd.differentiable("forgetting_forward", "forgetting_attention", _forward, _fake_forward, _setup_context, _backward,
                                  _gradients, autograd.custom_op("forgetting_backward", _backward_op, _fake_backward))
