"""Routed attention's launches behind autograd: flash's over packed sequences, and those that gather (spread) and merge. In 16 bits,
chosen blocks of at most 128 keys have kernels of their own instead, plain Triton's and Hopper's. Triton is imported in them.

The backward keeps only what any attention keeps. In 16 bits, each part's backward uses the statistics of the whole row. Its weights are
then those of the whole softmax, and it needs no output of its own. In float32, delta is added up from the weights of each part, which must
then be a softmax by itself; so the parts are computed again.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.flash import ops as flash


class Part(NamedTuple):
    """What one call of flash's kernels reads beside q, k and v. window_right: 0 (causal) for a query's own block, -1 for chosen blocks."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    window_right: int


def _attend(q: Tensor, k: Tensor, v: Tensor, part: Part, impl: str | None, deterministic: bool,
            softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return flash._forward(q, k, v, part.cu_seqlens_q, part.cu_seqlens_k, None, None, None, False, impl, deterministic, softmax_scale, -1,
                          part.window_right, 0.0, 0.0)[:3]


def _derive(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, part: Part,
            impl: str | None, deterministic: bool, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    residual = out.new_empty(0)
    return flash._gradients(grad_out, grad_lse, q, k, v, out, residual, stats, part.cu_seqlens_q, part.cu_seqlens_k, None, None, None,
                            impl, deterministic, softmax_scale, -1, part.window_right, 0.0, 0.0)[:3]


def _heads_first(x: Tensor) -> Tensor:
    """(tokens, heads, width) as (heads * tokens, 1, width)."""
    return x.transpose(0, 1).reshape(-1, 1, x.shape[-1])


def _kernels(impl: str | None, q: Tensor, k: Tensor, v: Tensor, block_size: int, grad_out: Tensor | None = None) -> ModuleType | None:
    """The module whose kernels are made for the chosen blocks of a call, of its forward if grad_out is None; None if none are. Where
    Hopper's do not take the call, plain Triton's do, also if impl="gluon"."""
    from attnzoo_kernels.routed import walk

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.routed import hopper

        return hopper.why_not_gluon(q, k, v, block_size, grad_out)

    if not walk.takes(q, v, block_size):
        return None
    call = "routed forward" if grad_out is None else "routed backward"
    if dispatch.choose(call, "triton" if impl == "triton" else None, why_not_gluon) == "triton":
        return walk
    from attnzoo_kernels.routed import hopper, hopper_backward

    return hopper if grad_out is None else hopper_backward


def _forward(
    q: Tensor, k: Tensor, v: Tensor, place: Tensor, pair: Tensor, bounds_q: Tensor, bounds_k: Tensor, chosen_q: Tensor, chosen_k: Tensor,
    rows: int, block_size: int, impl: str | None, deterministic: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.parts import launch_merge, launch_spread

    options = impl, deterministic, softmax_scale
    own = _attend(q, k, v, Part(bounds_q, bounds_k, 0), *options)
    kernels = _kernels(impl, q, k, v, block_size)
    if kernels:
        *chosen, together = kernels.launch_forward(q, k, v, place, pair, chosen_q, chosen_k, rows, block_size, softmax_scale)
        return launch_merge(*own, *chosen, None, place, rows, together)
    chosen = _attend(launch_spread(q, None, place, rows)[0], _heads_first(k), _heads_first(v), Part(chosen_q, chosen_k, -1), *options)
    return launch_merge(*own, *chosen, place, rows, rows)


def _fake_forward(q, k, v, *_):
    lse = q.new_empty(autograd.lse_shape(q, True), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, lse.new_empty(2, *lse.shape)


def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, place: Tensor, pair: Tensor,
    bounds_q: Tensor, bounds_k: Tensor, chosen_q: Tensor, chosen_k: Tensor, rows: int, block_size: int, impl: str | None,
    deterministic: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.parts import launch_merge_backward, launch_spread, launch_sum

    options = impl, deterministic, softmax_scale
    own, chosen = Part(bounds_q, bounds_k, 0), Part(chosen_q, chosen_k, -1)
    grad_out, grad_lse = grad_out.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    kernels = _kernels(impl, q, k, v, block_size, grad_out)
    if kernels:
        # over sequences as short as these blocks, plain Triton's backward is the faster one
        dq, dk, dv = _derive(grad_out, grad_lse, q, k, v, out, stats, own, impl or "triton", deterministic, softmax_scale)
        dparts, together = kernels.launch_backward(grad_out, grad_lse, q, k, v, out, stats, place, pair, chosen_q, chosen_k, rows,
                                                   block_size, softmax_scale, dk, dv)
        return launch_sum(dq, dparts, place, rows, together), dk, dv
    k_heads, v_heads = _heads_first(k), _heads_first(v)
    parts_q, _ = launch_spread(q, None, place, rows)
    if q.dtype == torch.float32:
        own_out, _, own_stats = _attend(q, k, v, own, *options)
        parts_out, _, parts_stats = _attend(parts_q, k_heads, v_heads, chosen, *options)
        own_grads = launch_merge_backward(grad_out, grad_lse, own_out, own_stats, parts_out, parts_stats, place, out, stats, rows)
        parts_grads = own_grads[2:]
    else:
        own_out, own_stats, own_grads = out, stats, (grad_out, grad_lse)
        parts_out, parts_stats = launch_spread(out, stats, place, rows)
        parts_grads = launch_spread(grad_out, grad_lse, place, rows)
    dq, dk, dv = _derive(*own_grads[:2], q, k, v, own_out, own_stats, own, *options)
    dparts, dk_heads, dv_heads = _derive(*parts_grads, parts_q, k_heads, v_heads, parts_out, parts_stats, chosen, *options)
    dk, dv = (x + y.view(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) for x, y in ((dk, dk_heads), (dv, dv_heads)))
    return launch_sum(dq, dparts, place, rows, rows), dk, dv


def _fake_gradients(grad_out, grad_lse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.rows, ctx.block_size, ctx.impl, ctx.deterministic, ctx.softmax_scale = inputs
    out, _, stats = output
    ctx.save_for_backward(*tensors, out, stats)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, grad_lse, _):
    q, k, v, *integers, out, stats = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return *gradients(grad_out, grad_lse, q, k, v, out, stats, *integers, ctx.rows, ctx.block_size, ctx.impl, ctx.deterministic,
                      ctx.softmax_scale), *(None,) * 11


forward = autograd.differentiable("routed_forward", "routed_attention", _forward, _fake_forward, _setup_context, _backward, _gradients,
                                  autograd.custom_op("routed_backward", _gradients, _fake_gradients))
