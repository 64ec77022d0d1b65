"""add_norm's launches behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(high: Tensor, low: Tensor | None, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
             eps: float, rms: bool, last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.add_norm.forward import launch_forward

    dispatch.note("add_norm forward", "triton")
    return launch_forward(high, low, branch, branch_bias, weight, bias, eps, rms, last)


def leave_arguments_out() -> None:
    """Leaves the arguments out of a message that PyTorch before 2.13 makes of each operator that it compiles, and shows nobody. Their
    length at least doubles with each add_norm behind which they stand (fault 21 in COMPILER_FAULTS.md)."""
    if torch.__version__ < (2, 13):
        from torch._inductor.exc import OperatorIssue

        OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def _fake_forward(high, low, branch, branch_bias, weight, bias, eps, rms, last):
    leave_arguments_out()
    rows = high.shape[:-1].numel()
    like = high.new_empty(high.shape, dtype=torch.bfloat16)
    return (like, high.new_empty(0 if last else high.shape, dtype=torch.int16), torch.empty_like(like),
            *(high.new_empty(n, dtype=torch.float32) for n in (0 if rms else rows, rows)))


def _gradients(high: Tensor, dnormed: Tensor, dstream: Tensor | None, weight: Tensor, means: Tensor, scales: Tensor, bias: bool,
               branch_bias: bool) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.add_norm.backward import launch_backward

    dispatch.note("add_norm backward", "triton")
    return launch_backward(high, dnormed, dstream, weight, means, scales, bias, branch_bias)


def _fake_gradients(high, dnormed, dstream, weight, means, scales, bias, branch_bias):
    return torch.empty_like(high), weight.new_empty(1 + bias + branch_bias, *weight.shape)


def _setup_context(ctx, inputs, output):
    high, _, branch, branch_bias, weight, bias, *_, ctx.last = inputs
    ctx.of_branch, ctx.of_branch_bias, ctx.of_bias, ctx.dtype = (*(x is not None for x in (branch, branch_bias, bias)), high.dtype)
    new_high, new_low, _, means, scales = output
    ctx.save_for_backward(new_high, weight, means, scales)
    ctx.mark_non_differentiable(new_low, means, scales)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, dstream, _, dnormed, *__):
    high, weight, means, scales = ctx.saved_tensors
    dnormed = torch.zeros_like(high) if dnormed is None else dnormed
    dx, sums = gradients(high, dnormed, None if ctx.last else dstream, weight, means, scales, ctx.of_bias, ctx.of_branch_bias)
    return (dx.to(ctx.dtype), None, dx if ctx.of_branch else None, sums[-1] if ctx.of_branch_bias else None, sums[0],
            sums[1] if ctx.of_bias else None, None, None, None)


add_norm = autograd.differentiable("add_norm", "add_norm", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                   autograd.custom_op("add_norm_backward", _gradients, _fake_gradients))
