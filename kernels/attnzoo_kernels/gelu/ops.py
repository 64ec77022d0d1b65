"""bias_gelu for autograd: a plain function in eager mode, custom operators under torch.compile. Triton is imported behind both."""

import functools

import torch
from torch import Tensor


@torch.library.custom_op("attnzoo::bias_gelu", mutates_args=())
def forward_op(x: Tensor, bias: Tensor) -> Tensor:
    from attnzoo_kernels.gelu.forward import launch_forward

    return launch_forward(x, bias)


@forward_op.register_fake
def _(x, bias):
    return torch.empty_like(x)


@torch.library.custom_op("attnzoo::bias_gelu_backward", mutates_args=())
def backward_op(x: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.gelu.backward import launch_backward

    return launch_backward(x, bias, dout)


@backward_op.register_fake
def _(x, bias, dout):
    return torch.empty_like(x), bias.new_empty(bias.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(gradients, ctx, dout):
    x, bias = ctx.saved_tensors
    dx, dbias = gradients(x, bias, dout)
    return dx, dbias.to(bias.dtype)


forward_op.register_autograd(functools.partial(_backward, backward_op), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which takes longer than the launch."""

    @staticmethod
    def forward(ctx, *inputs):
        from attnzoo_kernels.gelu.forward import launch_forward

        _setup_context(ctx, inputs, None)
        return launch_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        from attnzoo_kernels.gelu.backward import launch_backward

        return _backward(launch_backward, ctx, dout)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return forward_op(x, bias) if torch.compiler.is_compiling() else _Eager.apply(x, bias)
