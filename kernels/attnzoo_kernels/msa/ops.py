"""The choice of blocks and the loss of what chooses them, behind torch.compile and autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd


def _choose(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, slots: int) -> Tensor:
    from attnzoo_kernels.msa.choose import launch_blocks

    return launch_blocks(q, k, cu_seqlens_q, cu_seqlens_k, block_size, slots)


def _fake_choose(q, k, cu_seqlens_q, cu_seqlens_k, block_size, slots):
    return q.new_empty(*q.shape[:-1], slots, dtype=torch.int32)


def _loss(index_q: Tensor, expected: Tensor, lse: Tensor, scale: float) -> Tensor:
    from attnzoo_kernels.msa.loss import launch_loss

    return launch_loss(index_q, expected, lse, scale)


def _fake_loss(index_q, expected, lse, scale):
    return lse.new_empty(index_q.shape[:2])


def _gradients(grad: Tensor, index_q: Tensor, expected: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.msa.loss import launch_loss_backward

    return launch_loss_backward(grad, index_q, expected, lse, scale)


def _fake_gradients(grad, index_q, expected, lse, scale):
    return index_q.new_empty(index_q.shape), torch.empty_like(expected), torch.empty_like(lse)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(gradients, ctx, grad):
    return *gradients(grad, *ctx.saved_tensors, ctx.scale), None


choose = autograd.forward_only("msa_blocks", _choose, _fake_choose)
loss = autograd.differentiable("msa_loss", "msa_attention", _loss, _fake_loss, _setup, _backward, _gradients,
                               autograd.custom_op("msa_loss_backward", _gradients, _fake_gradients))
