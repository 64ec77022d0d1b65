"""Block-sparse attention's launches behind autograd. Triton is imported in them.

A layout is passed as its mask, or as a pattern's key; its layout is looked up at run time, so that compiled graphs depend on no length.
"""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.block_sparse.layout_cache import made_apart
from attnzoo_kernels.block_sparse.patterns import kept_layout


def _pattern_mask(pattern: str, heads: int, q_blocks: int, k_blocks: int, device: torch.device) -> Tensor:
    """A copy of the mask of a pattern's layout, for the reference."""
    with made_apart():
        return kept_layout(pattern, q_blocks, k_blocks, device).mask.clone()


def _fake_pattern_mask(pattern, heads, q_blocks, k_blocks, device):
    return torch.empty(1, heads, q_blocks, k_blocks, dtype=torch.bool, device=device)


pattern_mask = autograd.custom_op("block_sparse_pattern_mask", _pattern_mask, _fake_pattern_mask)


def _mask(q, mask, pattern, q_blocks, k_blocks):
    return kept_layout(pattern, q_blocks, k_blocks, q.device).mask if mask is None else mask


def _options(mask, block_q, block_k, cu_seqlens_q, *numbers):
    from attnzoo_kernels.block_sparse.options import Options

    return Options.of(mask, block_q, block_k, cu_seqlens_q, *numbers)


def _forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q, block_k, *numbers):
    from attnzoo_kernels._triton import launch

    readable = launch.readable(q, k, v)
    if readable is not None:
        out, lse, stats = _forward(*readable, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q,
                                   block_k, *numbers)
        return launch.narrowed(out, v), lse, stats
    mask = _mask(q, mask, pattern, q_blocks, k_blocks)
    options = _options(mask, block_q, block_k, cu_seqlens_q, *numbers)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.block_sparse import hopper

        return hopper.forward_reason(q, k, v, options)

    if dispatch.choose("block_sparse forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.block_sparse import hopper

        return hopper.launch_forward(q, k, v, mask, options)
    from attnzoo_kernels.block_sparse import forward

    return forward.launch_forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, options)


def _gradients(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks,
               block_q, block_k, *numbers):
    from attnzoo_kernels._triton import launch

    readable = launch.readable(q, k, v, out, grad_out)
    if readable is not None:
        wide = _gradients(readable[4], grad_lse, *readable[:4], stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic,
                          q_blocks, k_blocks, block_q, block_k, *numbers)
        return tuple(map(launch.narrowed, wide, (q, k, v)))
    mask = _mask(q, mask, pattern, q_blocks, k_blocks)
    options = _options(mask, block_q, block_k, cu_seqlens_q, *numbers)

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.block_sparse import hopper_backward

        return hopper_backward.backward_reason(q, k, v, options, deterministic)

    if dispatch.choose_backward("block_sparse backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.block_sparse import hopper_backward

        return hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, mask, options)
    from attnzoo_kernels.block_sparse import backward

    return backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, options)


def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, pattern: str,
    impl: str | None, deterministic: bool, q_blocks: int, k_blocks: int, block_q: int, block_k: int, softmax_scale: float,
    window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with made_apart():
        return _forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q, block_k,
                        softmax_scale, window_left, window_right)


def _backward_op(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, pattern: str, impl: str | None, deterministic: bool, q_blocks: int,
    k_blocks: int, block_q: int, block_k: int, softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with made_apart():
        gradients = _gradients(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic,
                               q_blocks, k_blocks, block_q, block_k, softmax_scale, window_left, window_right)
    return tuple(x.contiguous() for x in gradients)  # as the fake says, by either implementation


forward = autograd.differentiable_softmax("block_sparse", _forward, _gradients, 3, forward_op=_forward_op, backward_op=_backward_op)
