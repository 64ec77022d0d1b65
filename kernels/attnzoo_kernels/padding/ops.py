"""Padding removal as PyTorch custom operators: the boundary that autograd and torch.compile see. Triton is imported behind it."""

import torch
from torch import Tensor

from attnzoo_kernels.padding.inputs import contiguous_rows


@torch.library.custom_op("attnzoo::padding_mask_indices", mutates_args=())
def mask_indices(attention_mask: Tensor, unused_mask: Tensor | None, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_mask_indices

    return launch_mask_indices(attention_mask, unused_mask, max_tokens)


@mask_indices.register_fake
def _(attention_mask, unused_mask, max_tokens):
    return _fake_indices(attention_mask, attention_mask.shape[0], max_tokens)


@torch.library.custom_op("attnzoo::padding_length_indices", mutates_args=())
def length_indices(lengths: Tensor, seqlen: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_length_indices

    return launch_length_indices(lengths, seqlen, max_tokens)


@length_indices.register_fake
def _(lengths, seqlen, max_tokens):
    return _fake_indices(lengths, lengths.shape[0], max_tokens)


def _fake_indices(like: Tensor, batch: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    indices = like.new_empty(max_tokens, dtype=torch.int64)
    return indices, *(like.new_empty(n, dtype=torch.int32) for n in (batch + 1, batch, 2))


@torch.library.custom_op("attnzoo::padding_document_lengths", mutates_args=())
def document_lengths(lengths: Tensor, max_documents: int) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.padding.indices import launch_document_lengths

    return launch_document_lengths(lengths, max_documents)


@document_lengths.register_fake
def _(lengths, max_documents):
    return tuple(lengths.new_empty(n, dtype=torch.int32) for n in (max_documents + 1, lengths.shape[0], 3))


@torch.library.custom_op("attnzoo::padding_position_ids", mutates_args=())
def position_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    from attnzoo_kernels.padding.indices import launch_position_ids

    return launch_position_ids(cu_seqlens, total)


@position_ids.register_fake
def _(cu_seqlens, total):
    return cu_seqlens.new_empty(total, dtype=torch.int64)


@torch.library.custom_op("attnzoo::padding_remove", mutates_args=())
def remove(x: Tensor, indices: Tensor) -> Tensor:
    from attnzoo_kernels.padding.rows import launch_remove

    return launch_remove(x, indices)


@remove.register_fake
def _(x, indices):
    return x.new_empty(indices.shape[0], *x.shape[2:])


@torch.library.custom_op("attnzoo::padding_restore", mutates_args=())
def restore(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    from attnzoo_kernels.padding.rows import launch_restore

    return launch_restore(tokens, indices, batch, seqlen)


@restore.register_fake
def _(tokens, indices, batch, seqlen):
    return tokens.new_empty(batch, seqlen, *tokens.shape[1:])


def _remove_setup(ctx, inputs, output):
    x, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows = x.shape[:2]


def _remove_backward(ctx, grad):
    return restore(_readable(grad, 1), *ctx.saved_tensors, *ctx.rows), None


def _restore_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _restore_backward(ctx, grad):
    return remove(_readable(grad, 2), *ctx.saved_tensors), None, None, None


def _readable(grad: Tensor, leading: int) -> Tensor:
    # autograd may hand over an expanded gradient, which no kernel can read row by row
    return grad if contiguous_rows(grad, leading) else grad.contiguous()


remove.register_autograd(_remove_backward, setup_context=_remove_setup)
restore.register_autograd(_restore_backward, setup_context=_restore_setup)
