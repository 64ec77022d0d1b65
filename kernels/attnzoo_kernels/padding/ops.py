"""Padding removal's launches behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.padding.inputs import contiguous_rows


def _mask_indices(attention_mask: Tensor, unused_mask: Tensor | None, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_mask_indices

    dispatch.note("padding forward", "triton")
    return launch_mask_indices(attention_mask, unused_mask, max_tokens)


def _length_indices(lengths: Tensor, seqlen: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_length_indices

    dispatch.note("padding forward", "triton")
    return launch_length_indices(lengths, seqlen, max_tokens)


def _document_lengths(lengths: Tensor, max_documents: int) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_document_lengths

    dispatch.note("padding forward", "triton")
    return launch_document_lengths(lengths, max_documents)


def _position_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    from attnzoo_kernels.padding.indices import launch_position_ids

    dispatch.note("padding forward", "triton")
    return launch_position_ids(cu_seqlens, total)


def _fake_indices(like: Tensor, batch: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    indices = like.new_empty(max_tokens, dtype=torch.int64)
    return indices, *(like.new_empty(n, dtype=torch.int32) for n in (batch + 1, batch, 2))


mask_indices = autograd.forward_only("padding_mask_indices", _mask_indices,
                                     lambda mask, unused_mask, max_tokens: _fake_indices(mask, mask.shape[0], max_tokens))
length_indices = autograd.forward_only("padding_length_indices", _length_indices,
                                       lambda lengths, seqlen, max_tokens: _fake_indices(lengths, lengths.shape[0], max_tokens))
document_lengths = autograd.forward_only(
    "padding_document_lengths", _document_lengths,
    lambda lengths, max_documents: tuple(lengths.new_empty(n, dtype=torch.int32) for n in (max_documents + 1, lengths.shape[0], 3)))
position_ids = autograd.forward_only("padding_position_ids", _position_ids,
                                     lambda cu_seqlens, total: cu_seqlens.new_empty(total, dtype=torch.int64))


def _remove(x: Tensor, indices: Tensor) -> Tensor:
    from attnzoo_kernels.padding.rows import launch_remove

    dispatch.note("padding forward", "triton")
    return launch_remove(x, indices)


def _restore(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    from attnzoo_kernels.padding.rows import launch_restore

    dispatch.note("padding forward", "triton")
    return launch_restore(tokens, indices, batch, seqlen)


def _readable(grad: Tensor, leading: int) -> Tensor:
    # autograd may pass an expanded gradient, which no kernel can read row by row
    return grad if contiguous_rows(grad, leading) else grad.contiguous()


def _remove_setup(ctx, inputs, output):
    x, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows = x.shape[:2]


def _remove_backward(restore, ctx, grad):
    return restore(_readable(grad, 1), *ctx.saved_tensors, *ctx.rows), None


def _restore_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _restore_backward(remove, ctx, grad):
    return remove(_readable(grad, 2), *ctx.saved_tensors), None, None, None


def _add_norm(hidden: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, indices: Tensor, batch: int, seqlen: int,
              eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.norm import launch_add_norm

    dispatch.note("padding forward", "triton")
    return launch_add_norm(hidden, residual, weight, bias, indices, batch, seqlen, eps)


def _fake_add_norm(hidden, residual, weight, bias, indices, batch, seqlen, eps):
    statistics = hidden.new_empty(hidden.shape[0], 1, dtype=torch.float32)
    return hidden.new_empty(batch, seqlen, hidden.shape[1]), statistics, torch.empty_like(statistics)


def _add_norm_setup(ctx, inputs, output):
    hidden, residual, weight, bias, indices, *_ = inputs
    ctx.save_for_backward(hidden, residual, weight, bias, indices, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _add_norm_backward(remove, ctx, grad, *_):
    hidden, residual, weight, bias, indices, mean, rstd = ctx.saved_tensors
    x, grad = hidden + residual, remove(_readable(grad, 2), indices)
    parameters = (p.to(x.dtype if x.is_cuda else mean.dtype) for p in (weight, bias))  # on a CPU, in the statistics' dtype
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, *parameters, [True, True, True])
    return dx, dx, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None, None


# remove and restore are each other's derivative, and can be differentiated any number of times
remove = autograd.differentiable(
    "padding_remove", "remove_padding", _remove, lambda x, indices: x.new_empty(indices.shape[0], *x.shape[2:]), _remove_setup,
    _remove_backward, lambda *inputs: restore(*inputs), lambda *inputs: torch.ops.attnzoo.padding_restore(*inputs), once=False)
restore = autograd.differentiable(
    "padding_restore", "pad_input", _restore, lambda tokens, indices, batch, seqlen: tokens.new_empty(batch, seqlen, *tokens.shape[1:]),
    _restore_setup, _restore_backward, remove, torch.ops.attnzoo.padding_remove, once=False)
_add_norm_and_statistics = autograd.differentiable("padding_add_norm", "add_norm_pad_input", _add_norm, _fake_add_norm, _add_norm_setup,
                                                   _add_norm_backward, remove, torch.ops.attnzoo.padding_remove)


def add_norm(*inputs) -> Tensor:
    return _add_norm_and_statistics(*inputs)[0]
