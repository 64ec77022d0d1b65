"""Block-sparse attention for autograd: a plain function in eager mode, custom operators under torch.compile.

Triton is imported behind both.

A layout comes as its mask, or as a pattern's key, whose layout is then looked up at run time: no length is built into a compiled graph.
"""

import functools

import torch
from torch import Tensor

from attnzoo_kernels.block_sparse.kept import made_apart
from attnzoo_kernels.block_sparse.patterns import kept_layout


@torch.library.custom_op("attnzoo::block_sparse_pattern_mask", mutates_args=())
def pattern_mask(pattern: str, heads: int, q_blocks: int, k_blocks: int, device: torch.device) -> Tensor:
    """A copy of the mask of a pattern's layout, for the reference."""
    with made_apart():
        return kept_layout(pattern, q_blocks, k_blocks, device).mask.clone()


@pattern_mask.register_fake
def _(pattern, heads, q_blocks, k_blocks, device):
    return torch.empty(1, heads, q_blocks, k_blocks, dtype=torch.bool, device=device)


def _mask(q, mask, pattern, q_blocks, k_blocks):
    return kept_layout(pattern, q_blocks, k_blocks, q.device).mask if mask is None else mask


def _forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q, block_k, *numbers):
    from attnzoo_kernels._triton import launch
    from attnzoo_kernels.block_sparse import forward, paths
    from attnzoo_kernels.block_sparse.options import Options

    readable = launch.readable(q, k, v)
    if readable is not None:
        out, lse, stats = _forward(*readable, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q,
                                   block_k, *numbers)
        return launch.narrowed(out, v), lse, stats
    mask = _mask(q, mask, pattern, q_blocks, k_blocks)
    options = Options.of(mask, block_q, block_k, cu_seqlens_q, *numbers)
    if paths.forward_path(impl, q, k, v, options) == "gluon":
        from attnzoo_kernels.block_sparse import hopper

        return hopper.launch_forward(q, k, v, mask, options)
    return forward.launch_forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, options)


def _gradients(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks,
               block_q, block_k, *numbers):
    from attnzoo_kernels._triton import launch
    from attnzoo_kernels.block_sparse import backward, paths
    from attnzoo_kernels.block_sparse.options import Options

    readable = launch.readable(q, k, v, out, grad_out)
    if readable is not None:
        wide = _gradients(readable[4], grad_lse, *readable[:4], stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic,
                          q_blocks, k_blocks, block_q, block_k, *numbers)
        return tuple(map(launch.narrowed, wide, (q, k, v)))
    mask = _mask(q, mask, pattern, q_blocks, k_blocks)
    options = Options.of(mask, block_q, block_k, cu_seqlens_q, *numbers)
    if paths.backward_path(impl, q, k, v, options, deterministic) == "gluon":
        from attnzoo_kernels.block_sparse import hopper_backward

        return hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, mask, options)
    return backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, options)


@torch.library.custom_op("attnzoo::block_sparse_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, pattern: str,
    impl: str | None, deterministic: bool, q_blocks: int, k_blocks: int, block_q: int, block_k: int, softmax_scale: float,
    window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with made_apart():
        return _forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q, block_k,
                        softmax_scale, window_left, window_right)


@forward_op.register_fake
def _(q, k, v, mask, cu_seqlens_q, *_):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return out, lse, lse.new_empty(2, *lse_shape)


@torch.library.custom_op("attnzoo::block_sparse_backward", mutates_args=())
def backward_op(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, pattern: str, impl: str | None, deterministic: bool, q_blocks: int,
    k_blocks: int, block_q: int, block_k: int, softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with made_apart():
        gradients = _gradients(grad_out, grad_lse, q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic,
                               q_blocks, k_blocks, block_q, block_k, softmax_scale, window_left, window_right)
    return tuple(x.contiguous() for x in gradients)  # as the fake says, on either path


@backward_op.register_fake
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, mask, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    out, _, stats = output
    ctx.save_for_backward(q, k, v, out, stats, mask, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _backward(gradients, ctx, grad_out, grad_lse, _):
    tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
    return *gradients(grad_out, grad_lse, *tensors, *ctx.options), *(None,) * 13


forward_op.register_autograd(functools.partial(_backward, backward_op), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher and without a binding of signatures, which together take longer than the launch."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(torch.autograd.function.once_differentiable(functools.partial(_backward, _gradients)))


def forward(*inputs):
    """(out, lse, stats) of `forward_op`'s arguments."""
    return forward_op(*inputs) if torch.compiler.is_compiling() else _Eager.apply(*inputs)
