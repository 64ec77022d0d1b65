"""Sigmoid attention's launches behind autograd. Triton is imported in them."""

from torch import Tensor

from attnzoo_kernels import autograd, dispatch


@autograd.readable(0, 1, 2, like=(2,))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
    impl: str | None, deterministic: bool, softmax_scale: float, sigmoid_bias: float | None, window_left: int, window_right: int,
) -> Tensor:
    from attnzoo_kernels.sigmoid.options import Options

    options = Options.of(cu_seqlens_q, alibi_slopes, softmax_scale, sigmoid_bias, window_left, window_right)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.sigmoid import hopper

        return hopper.forward_reason(q, k, v, options)

    if dispatch.choose("sigmoid forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.sigmoid import hopper

        return hopper.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    from attnzoo_kernels.sigmoid import forward

    return forward.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)


def _fake_forward(q, k, v, *_):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@autograd.readable(1, 2, 3, 0, like=(1, 2, 3))
def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None, impl: str | None, deterministic: bool, softmax_scale: float, sigmoid_bias: float | None,
    window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.sigmoid.options import Options

    options = Options.of(cu_seqlens_q, alibi_slopes, softmax_scale, sigmoid_bias, window_left, window_right)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.sigmoid import hopper_backward

        return hopper_backward.backward_reason(q, k, v, options)

    if dispatch.choose_backward("sigmoid backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.sigmoid import hopper_backward

        return hopper_backward.launch_backward(grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, options, deterministic)
    from attnzoo_kernels.sigmoid import backward

    return backward.launch_backward(grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)


def _fake_gradients(grad_out, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.impl, ctx.deterministic, ctx.scale, ctx.bias, ctx.left, ctx.right = inputs
    ctx.save_for_backward(*tensors)


def _backward(gradients, ctx, grad_out):
    return *gradients(grad_out, *ctx.saved_tensors, ctx.impl, ctx.deterministic, ctx.scale, ctx.bias, ctx.left, ctx.right), *(None,) * 9


forward = autograd.differentiable("sigmoid_forward", "sigmoid_attention", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                  autograd.custom_op("sigmoid_backward", _gradients, _fake_gradients))
