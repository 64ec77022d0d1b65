"""The two frames' launches behind autograd. Triton is imported in them. Queries and keys have two heads for each of a call, as Options."""

from torch import Tensor

from attnzoo_kernels import autograd, dispatch


@autograd.readable(0, 1, 2, like=(2,))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool,
    softmax_scale: float, near_keys: int, far_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.two_frame.options import Options

    options = Options.of(cu_seqlens_q, softmax_scale, near_keys, far_keys)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.two_frame import hopper

        return hopper.forward_reason(q, k, v)

    if dispatch.choose("two_frame forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.two_frame import hopper

        return hopper.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    from attnzoo_kernels.two_frame import forward

    return forward.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def _fake_forward(q, *inputs):
    return autograd.fake_softmax(q[..., ::2, :], *inputs)


@autograd.readable(2, 3, 4, 5, 0, like=(2, 3, 4))
def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool, softmax_scale: float, near_keys: int, far_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.two_frame.options import Options

    options = Options.of(cu_seqlens_q, softmax_scale, near_keys, far_keys)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.two_frame import hopper_backward
        from attnzoo_kernels.two_frame.tiles import FEW

        if impl is None and far_keys < FEW:
            return "plain Triton is faster with few far keys"
        return hopper_backward.backward_reason(q, k, v, options)

    if dispatch.choose_backward("two_frame backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.two_frame import hopper_backward

        return hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options, deterministic)
    from attnzoo_kernels.two_frame import backward

    return backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options)


forward = autograd.differentiable_softmax("two_frame", _forward, _gradients, 2, fake=_fake_forward)
