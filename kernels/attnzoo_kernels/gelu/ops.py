"""bias_gelu's launches behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    from attnzoo_kernels.gelu.forward import launch_forward

    dispatch.note("bias_gelu forward", "triton")
    return launch_forward(x, bias)


def _fake_forward(x, bias):
    return torch.empty_like(x)


def _gradients(x: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.gelu.backward import launch_backward

    dispatch.note("bias_gelu backward", "triton")
    return launch_backward(x, bias, dout)


def _fake_gradients(x, bias, dout):
    return torch.empty_like(x), bias.new_empty(bias.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(gradients, ctx, dout):
    x, bias = ctx.saved_tensors
    dx, dbias = gradients(x, bias, dout)
    return dx, dbias.to(bias.dtype)


bias_gelu = autograd.differentiable("bias_gelu", "bias_gelu", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                    autograd.custom_op("bias_gelu_backward", _gradients, _fake_gradients))
