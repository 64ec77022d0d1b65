"""Gathering and merging behind autograd. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd


def _gather(q: Tensor, pair: Tensor, place: Tensor, rows: int) -> Tensor:
    tokens, heads, width = q.shape
    return q.reshape(tokens * heads // rows, rows * width).index_select(0, pair // place.shape[1]).view(-1, 1, width)


def _fake_gather(q, pair, place, rows):
    return q.new_empty(pair.shape[0] * rows, 1, q.shape[2])


def _sum(part: Tensor, place: Tensor, rows: int, heads: int) -> Tensor:
    from attnzoo_kernels.routed.parts import launch_sum

    return launch_sum(part, place, rows, heads)


def _fake_sum(part, place, rows, heads):
    return part.new_empty(place.shape[0] * rows // heads, heads, part.shape[2])


def _gather_context(ctx, inputs, output):
    q, _, place, ctx.rows = inputs
    ctx.heads = q.shape[1]
    ctx.save_for_backward(place)


def _gather_backward(gradients, ctx, grad):
    return gradients(grad, *ctx.saved_tensors, ctx.rows, ctx.heads), None, None, None


gather = autograd.differentiable("routed_gather", "routed_attention", _gather, _fake_gather, _gather_context, _gather_backward, _sum,
                                 autograd.custom_op("routed_sum", _sum, _fake_sum))


def _merge(own: Tensor, own_lse: Tensor, own_stats: Tensor, part: Tensor, part_lse: Tensor, part_stats: Tensor, place: Tensor,
           rows: int) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.parts import launch_merge

    return launch_merge(own, own_lse, own_stats, part, part_lse, part_stats, place, rows)


def _fake_merge(own, own_lse, own_stats, *_):
    return tuple(map(torch.empty_like, (own, own_lse, own_stats)))


def _merge_gradients(dout: Tensor, grad_lse: Tensor | None, own: Tensor, own_lse: Tensor, own_stats: Tensor, part: Tensor, part_lse: Tensor,
                     part_stats: Tensor, place: Tensor, out: Tensor, stats: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.parts import launch_merge_backward

    return launch_merge_backward(dout, grad_lse, own, own_lse, own_stats, part, part_lse, part_stats, place, out, stats, rows)


def _fake_merge_gradients(dout, grad_lse, own, own_lse, own_stats, part, part_lse, *_):
    return tuple(map(torch.empty_like, (own, own_lse, part, part_lse)))


def _merge_context(ctx, inputs, output):
    *tensors, ctx.rows = inputs
    out, _, stats = output
    ctx.save_for_backward(*tensors, out, stats)
    ctx.set_materialize_grads(False)


def _merge_backward(gradients, ctx, dout, grad_lse, _):
    *parts, out, stats = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    down, down_lse, dpart, dpart_lse = gradients(dout, grad_lse, *parts, out, stats, ctx.rows)
    return down, down_lse, None, dpart, dpart_lse, None, None, None


merge = autograd.differentiable("routed_merge", "routed_attention", _merge, _fake_merge, _merge_context, _merge_backward, _merge_gradients,
                                autograd.custom_op("routed_merge_backward", _merge_gradients, _fake_merge_gradients))
