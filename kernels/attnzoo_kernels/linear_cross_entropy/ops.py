"""linear_cross_entropy behind autograd: gradients made with the summed loss, or, for losses by token, in the backward. Triton is imported
in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


@dispatch.without_autocast
def _passed_over(x, weight, bias, targets, scales, *numbers, gradient):
    from attnzoo_kernels.linear_cross_entropy.chunks import passed_over

    return passed_over(x.contiguous(), weight, bias, targets.contiguous(), None if scales is None else scales.contiguous(), *numbers,
                       gradient=gradient)


def _fake_gradients(x, weight, bias):
    wide = {"dtype": torch.float32}
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(weight.shape, **wide), \
        x.new_empty(0 if bias is None else weight.shape[0], **wide)


def _summed(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scales: Tensor | None, gradient: bool, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, vocab_size: int, fp8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dispatch.note("linear_cross_entropy forward", "triton")
    numbers = ignore_index, label_smoothing, z_loss, softcap, vocab_size, fp8
    losses, dx, dw, db = _passed_over(x, weight, bias, targets, scales, *numbers, gradient=gradient)
    return losses.sum(), dx, dw, db


def _fake_summed(x, weight, bias, targets, scales, gradient, *_):
    loss = x.new_empty((), dtype=torch.float32)
    return loss, *(_fake_gradients(x, weight, bias) if gradient else (x.new_empty(0), loss.new_empty(0), loss.new_empty(0)))


def _summed_context(ctx, inputs, output):
    _, weight, bias, *_ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _summed_backward(gradients, ctx, dloss, *_):
    dx, dw, db = ctx.saved_tensors
    weight, bias = ctx.dtypes
    return (dx * dloss).to(dx.dtype), (dw * dloss).to(weight), None if bias is None else (db * dloss).to(bias), *(None,) * 9


_summed_op = autograd.differentiable("linear_cross_entropy", "linear_cross_entropy", _summed, _fake_summed, _summed_context,
                                     _summed_backward, None, None)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, *rest) -> Tensor:
    """The sum of all losses, (); arguments as of passed_over."""
    targets, scales, *numbers = rest
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return _summed_op(x, weight, bias, targets, scales, gradient, *numbers)[0]


def _losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scales: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, vocab_size: int, fp8: bool,
) -> Tensor:
    dispatch.note("linear_cross_entropy forward", "triton")
    return _passed_over(x, weight, bias, targets, scales, ignore_index, label_smoothing, z_loss, softcap, vocab_size, fp8,
                        gradient=False)[0]


def _gradients(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scales: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, vocab_size: int, fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dispatch.note("linear_cross_entropy backward", "triton")
    scales = dlosses if scales is None else dlosses * scales
    return _passed_over(x, weight, bias, targets, scales, ignore_index, label_smoothing, z_loss, softcap, vocab_size, fp8,
                        gradient=True)[1:]


def _losses_context(ctx, inputs, output):
    *tensors, ctx.ignore_index, ctx.smoothing, ctx.z_loss, ctx.softcap, ctx.vocab_size, ctx.fp8 = inputs
    ctx.save_for_backward(*tensors)


def _losses_backward(gradients, ctx, dlosses):
    x, weight, bias, targets, scales = ctx.saved_tensors
    dx, dw, db = gradients(dlosses, x, weight, bias, targets, scales, ctx.ignore_index, ctx.smoothing, ctx.z_loss, ctx.softcap,
                           ctx.vocab_size, ctx.fp8)
    return dx, dw.to(weight.dtype), None if bias is None else db.to(bias.dtype), *(None,) * 8


losses = autograd.differentiable(
    "linear_cross_entropy_by_token", "linear_cross_entropy", _losses, lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32),
    _losses_context, _losses_backward, _gradients,
    autograd.custom_op("linear_cross_entropy_by_token_backward", _gradients,
                       lambda dlosses, x, weight, bias, *_: _fake_gradients(x, weight, bias)))
