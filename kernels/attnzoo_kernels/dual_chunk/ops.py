"""Dual Chunk attention's launches behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _options(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, *numbers):
    from attnzoo_kernels.dual_chunk.options import Extras, Options

    extras = Extras(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k)
    return extras, Options.of(extras, *numbers)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, logit_multiplier: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool, chunk: int, top: int, far: int, stages: int, causal: bool,
    rope_interleaved: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    extras, options = _options(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, chunk, top, far, stages, causal, rope_interleaved,
                               softmax_scale)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.dual_chunk import hopper

        return hopper.forward_reason(q, k, v, options)

    if dispatch.choose("dual_chunk forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.dual_chunk import hopper

        return hopper.launch_forward(q, k, v, extras, options)
    from attnzoo_kernels.dual_chunk import forward

    return forward.launch_forward(q, k, v, extras, options)


def _fake_forward(q, k, v, cos, sin, logit_multiplier, cu_seqlens_q, *_):
    lse = q.new_empty(autograd.lse_shape(q, cu_seqlens_q is not None), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, lse.new_empty(2, *lse.shape)


def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, cos: Tensor, sin: Tensor,
    logit_multiplier: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool,
    chunk: int, top: int, far: int, stages: int, causal: bool, rope_interleaved: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    extras, options = _options(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, chunk, top, far, stages, causal, rope_interleaved,
                               softmax_scale)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.dual_chunk import hopper_backward

        return hopper_backward.backward_reason(q, k, v, options)

    if dispatch.choose_backward("dual_chunk backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.dual_chunk import hopper_backward

        return hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, extras, options, deterministic)
    from attnzoo_kernels.dual_chunk import backward

    return backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, extras, options)


def _fake_gradients(grad_out, grad_lse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[:8], inputs[8:]
    out, _, stats = output
    ctx.save_for_backward(*tensors, out, stats)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, grad_lse, _):
    q, k, v, cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, out, stats = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = gradients(grad_out, grad_lse, q, k, v, out, stats, cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, *ctx.options)
    return *grads, *(None,) * (5 + len(ctx.options))


forward = autograd.differentiable("dual_chunk_forward", "dual_chunk_attention", _forward, _fake_forward, _setup_context, _backward,
                                  _gradients, autograd.custom_op("dual_chunk_backward", _gradients, _fake_gradients))
