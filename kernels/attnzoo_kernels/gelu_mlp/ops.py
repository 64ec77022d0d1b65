"""gelu_mlp's products behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(x: Tensor, up: Tensor, down: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what lies between: x upᵀ and GELU of it."""
    from attnzoo_kernels.gelu_mlp.products import launch_forward

    dispatch.note("gelu_mlp forward", "triton")
    between, hidden = launch_forward(x.flatten(0, -2), up, tanh)
    return torch.mm(hidden, down.t()).view(*x.shape[:-1], down.shape[0]), between, hidden


def _fake_forward(x, up, down, tanh):
    rows = x.shape[:-1].numel()
    return x.new_empty(*x.shape[:-1], down.shape[0]), x.new_empty(rows, up.shape[0]), x.new_empty(rows, up.shape[0])


def _gradients(dout: Tensor, x: Tensor, up: Tensor, down: Tensor, between: Tensor, hidden: Tensor,
               tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.gelu_mlp.products import launch_backward

    dispatch.note("gelu_mlp backward", "triton")
    flat = dout.flatten(0, -2)
    dbetween = launch_backward(flat, down, between, tanh)
    return torch.mm(dbetween, up).view(x.shape), torch.mm(dbetween.t(), x.flatten(0, -2)), torch.mm(flat.t(), hidden)


def _fake_gradients(dout, x, up, down, between, hidden, tanh):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(up), torch.empty_like(down)


def _setup_context(ctx, inputs, output):
    x, up, down, ctx.tanh = inputs
    ctx.save_for_backward(x, up, down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, dout, *_):
    return (None,) * 4 if dout is None else (*gradients(dout, *ctx.saved_tensors, ctx.tanh), None)


gelu_mlp = autograd.differentiable("gelu_mlp", "gelu_mlp", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                   autograd.custom_op("gelu_mlp_backward", _gradients, _fake_gradients))
