"""Dual Chunk attention as PyTorch custom operators: the boundary that autograd and torch.compile see. Triton is imported behind it."""

import torch
from torch import Tensor


@torch.library.custom_op("attnzoo::dual_chunk_forward", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, logit_multiplier: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool, chunk: int, top: int, far: int, stages: int, causal: bool,
    rope_interleaved: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.dual_chunk.forward import launch_forward
    from attnzoo_kernels.dual_chunk.options import Extras, Options
    from attnzoo_kernels.dual_chunk.paths import forward_path

    extras = Extras(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k)
    options = Options.of(extras, chunk, top, far, stages, causal, rope_interleaved, softmax_scale)
    if forward_path(impl, q, k, v, options) == "gluon":
        from attnzoo_kernels.dual_chunk.hopper import launch_forward
    return launch_forward(q, k, v, extras, options)


@forward.register_fake
def _(q, k, v, cos, sin, logit_multiplier, cu_seqlens_q, *_):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return out, lse, lse.new_empty(2, *lse_shape)


@torch.library.custom_op("attnzoo::dual_chunk_backward", mutates_args=())
def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, cos: Tensor, sin: Tensor,
    logit_multiplier: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, impl: str | None, deterministic: bool,
    chunk: int, top: int, far: int, stages: int, causal: bool, rope_interleaved: bool, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.dual_chunk.backward import launch_backward
    from attnzoo_kernels.dual_chunk.options import Extras, Options
    from attnzoo_kernels.dual_chunk.paths import backward_path

    extras = Extras(cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k)
    options = Options.of(extras, chunk, top, far, stages, causal, rope_interleaved, softmax_scale)
    if backward_path(impl, q, k, v, options) == "gluon":
        from attnzoo_kernels.dual_chunk import hopper_backward

        return hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, extras, options, deterministic)
    return launch_backward(grad_out, grad_lse, q, k, v, out, stats, extras, options)


@backward.register_fake
def _(grad_out, grad_lse, q, k, v, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[:8], inputs[8:]
    out, _, stats = output
    ctx.save_for_backward(*tensors, out, stats)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse, _):
    q, k, v, cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, out, stats = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = backward(grad_out, grad_lse, q, k, v, out, stats, cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, *ctx.options)
    return *grads, *(None,) * (5 + len(ctx.options))


forward.register_autograd(_backward, setup_context=_setup_context)
