"""bias_gelu's launches behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    from attnzoo_kernels.gelu.forward import launch_forward

    dispatch.note("bias_gelu forward", "triton")
    return launch_forward(x, bias, tanh)


def _fake_forward(x, bias, tanh):
    return torch.empty_like(x)


def _gradients(x: Tensor, bias: Tensor | None, dout: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.gelu.backward import launch_backward

    dispatch.note("bias_gelu backward", "triton")
    return launch_backward(x, bias, dout, tanh)


def _fake_gradients(x, bias, dout, tanh):
    return torch.empty_like(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup_context(ctx, inputs, output):
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _backward(gradients, ctx, dout):
    x, bias = ctx.saved_tensors
    dx, dbias = gradients(x, bias, dout, ctx.tanh)
    return dx, None if bias is None else dbias, None


bias_gelu = autograd.differentiable("bias_gelu", "bias_gelu", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                    autograd.custom_op("bias_gelu_backward", _gradients, _fake_gradients))
