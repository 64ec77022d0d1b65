"""Dual Chunk attention's launches behind autograd. Triton is imported in them."""

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


forward = autograd.differentiable_softmax("dual_chunk", _forward, _gradients, 5)
