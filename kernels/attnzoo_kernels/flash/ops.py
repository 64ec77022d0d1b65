"""FlashAttention as PyTorch custom operators: the boundary that autograd and torch.compile see. Triton is imported behind it."""

import torch
from torch import Tensor


@torch.library.custom_op("attnzoo::flash_forward", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, rng_state: Tensor | None, softmax_scale: float, window_left: int, window_right: int, softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from attnzoo_kernels.flash.forward import launch_forward
    from attnzoo_kernels.flash.options import Options

    options = Options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, softmax_scale, window_left, window_right, softcap, dropout_p)
    return launch_forward(q, k, v, sinks, options)


@forward.register_fake
def _(q, k, v, cu_seqlens_q, *_):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return out, lse, lse.new_empty(2, *lse_shape)


@torch.library.custom_op("attnzoo::flash_backward", mutates_args=())
def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None, exact_delta: bool,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.flash.backward import launch_backward
    from attnzoo_kernels.flash.options import Options

    options = Options(cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, softmax_scale, window_left, window_right, softcap, dropout_p)
    return launch_backward(grad_out, grad_lse, q, k, v, out, stats, exact_delta, options)


@backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, exact_delta, *_):
    delta = stats.new_empty(stats.shape[1:] if exact_delta else 0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), delta


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse, _):
    q, k, v, out, lse, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    needs_dsinks = sinks is not None and ctx.needs_input_grad[6]
    dq, dk, dv, delta = backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, needs_dsinks,
                                 *ctx.options)
    dsinks = None
    if needs_dsinks:
        # the sink's weight in each row times minus the row's delta, summed in a fixed order
        packed = cu_seqlens_q is not None
        sink = sinks.float().view(-1, 1)
        weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink - lse))
        dsinks = -(weight * delta).sum(1 if packed else (0, 2)).to(sinks.dtype)
    return dq, dk, dv, None, None, None, dsinks, None, None, None, None, None, None


forward.register_autograd(_backward, setup_context=_setup_context)
