"""The choice of blocks, and what goes between queries and units, behind torch.compile and autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd


def _choose(
    q: Tensor, k_cmp: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor, compress_size: int,
    compress_stride: int, block_size: int, slots: int, softmax_scale: float,
) -> Tensor:
    from attnzoo_kernels.nsa.choose import launch_blocks

    return launch_blocks(q, k_cmp, lse.contiguous(), cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, compress_size, compress_stride, block_size,
                         slots, softmax_scale)


def _fake_choose(q, k_cmp, lse, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, compress_size, compress_stride, block_size, slots, *_):
    return q.new_empty(q.shape[0], k_cmp.shape[1], slots, dtype=torch.int32)


def _lay_out(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.nsa.units import launch_layout

    return launch_layout(cu_seqlens_q, cu_seqlens_k, total_q, size, stride)


def _fake_layout(cu_seqlens_q, cu_seqlens_k, total_q, size, stride):
    sequences = cu_seqlens_q.shape[0] - 1
    rows = (total_q // stride + 2 * sequences + 1) * stride
    return tuple(cu_seqlens_q.new_empty(n) for n in (sequences + 1, sequences + 1, total_q, rows))


def _fold(x: Tensor, place: Tensor, source: Tensor, kv_heads: int, stride: int) -> Tensor:
    from attnzoo_kernels.nsa.units import launch_fold

    return launch_fold(x, None, source, kv_heads, stride)


def _fake_fold(x, place, source, kv_heads, stride):
    return x.new_empty(source.shape[0] // stride, stride * x.shape[1], x.shape[2])


def _unfold(x: Tensor, place: Tensor, kv_heads: int, stride: int) -> Tensor:
    from attnzoo_kernels.nsa.units import launch_unfold

    return launch_unfold(x.contiguous(), place, kv_heads, stride)


def _fake_unfold(x, place, kv_heads, stride):
    return x.new_empty(place.shape[0], x.shape[1] // stride, x.shape[2])


def _unfold_lse(lse: Tensor, place: Tensor, kv_heads: int, stride: int) -> Tensor:
    from attnzoo_kernels.nsa.units import launch_unfold_lse

    return launch_unfold_lse(lse.contiguous(), place, kv_heads, stride)


def _fold_setup(ctx, inputs, output):
    _, place, _, ctx.kv_heads, ctx.stride = inputs
    ctx.save_for_backward(place)


def _fold_backward(unfold, ctx, grad):
    return unfold(grad, *ctx.saved_tensors, ctx.kv_heads, ctx.stride), None, None, None, None


def _combine(compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, place: Tensor, source: Tensor, kv_heads: int,
             stride: int) -> Tensor:
    from attnzoo_kernels.nsa.units import launch_combine

    return launch_combine(compressed, selected, near, gates, place, kv_heads, stride)


def _fake_combine(compressed, selected, near, gates, *_):
    return selected.new_empty(selected.shape)


def _gradients(grad_out: Tensor, compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, place: Tensor, source: Tensor,
               kv_heads: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.nsa.units import launch_combine_backward

    return launch_combine_backward(grad_out.contiguous(), compressed, selected, near, gates, place, source, kv_heads, stride)


def _fake_gradients(grad_out, *branches_and_gates):
    return tuple(x.new_empty(x.shape) for x in branches_and_gates[:4])


def _combine_setup(ctx, inputs, output):
    *tensors, ctx.kv_heads, ctx.stride = inputs
    ctx.save_for_backward(*tensors)


def _combine_backward(gradients, ctx, grad_out):
    return *gradients(grad_out, *ctx.saved_tensors, ctx.kv_heads, ctx.stride), None, None, None, None


choose = autograd.forward_only("nsa_blocks", _choose, _fake_choose)
layout = autograd.forward_only("nsa_layout", _lay_out, _fake_layout)
unfold_lse = autograd.forward_only("nsa_unfold_lse", _unfold_lse, lambda lse, place, kv_heads, stride: lse.new_empty(
    lse.shape[0] // stride, place.shape[0]))
fold = autograd.differentiable("nsa_fold", "nsa_attention", _fold, _fake_fold, _fold_setup, _fold_backward, _unfold,
                               autograd.custom_op("nsa_unfold", _unfold, _fake_unfold))
combine = autograd.differentiable("nsa_combine", "nsa_attention", _combine, _fake_combine, _combine_setup, _combine_backward, _gradients,
                                  autograd.custom_op("nsa_combine_backward", _gradients, _fake_gradients))
