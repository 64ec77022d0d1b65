"""Sigmoid attention: weights without a softmax (Ramapuram et al. 2024, arXiv:2409.04431)."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.sigmoid import ops
from attnzoo_kernels.sigmoid.cpu import sigmoid_attention_cpu
from attnzoo_kernels.sigmoid.reference import sigmoid_attention_reference


def sigmoid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    sigmoid_bias: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor:
    """sigmoid(softmax_scale * q kᵀ + sigmoid_bias) v, forward and backward in linear memory.

    Each weight depends on its own score only. The weights of a row do not add up to one, and there is no log-sum-exp.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, the masks of `causal` and `window_size`, and grouped heads: as
    `flash_attention` has them. A key that a query does not see has weight zero; a query that sees none gives zeros.

    softmax_scale: any finite number; default head_dim ** -0.5. It has flash_attention's name, though no softmax follows.
    sigmoid_bias: a finite number that is added to every score. None takes the paper's -log(n), where n is the number of keys of each
        sequence, whether a query sees them or not. Each packed sequence has its own n, which the kernels read on the device. A model that
        decodes token by token needs the bias of its training instead, -log(context). No gradient.
    alibi_slopes: float32 (heads,) or (batch, heads): adds -slope * |i + seqlen_k - seqlen_q - j|. No gradient.
    deterministic: as in flash_attention. Plain Triton's forward and backward always repeat bit by bit.
    impl: "gluon" (Hopper: 16 bits, head_dim and value_dim 33 to 128, no ALiBi; what its backward does not take, plain Triton's does) |
        "triton" | "cpu" | "reference". On CUDA tensors None takes gluon if it supports the call (`why_not_gluon`), else triton. On CPU ones
        it takes cpu, or the reference if `alibi_slopes` require a gradient. "cpu" is matrix products by tiles, in linear memory, with first
        derivatives only. A named path runs, or the call raises. On a GPU a NaN in one query can make other queries of its tile NaN.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    packed = checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    heads, head_dim = q.shape[-2:]
    left, right = checks.window(window_size, causal)
    if alibi_slopes is not None:
        checks.per_head("alibi_slopes", alibi_slopes, q, heads, cu_seqlens_q.shape[0] - 1 if packed else q.shape[0])
    softmax_scale = checks.softmax_scale(softmax_scale, head_dim)
    if sigmoid_bias is not None:
        checks.finite("sigmoid_bias", sigmoid_bias, "a finite number, or None for minus the logarithm of the number of keys")
        sigmoid_bias = float(sigmoid_bias)
    deterministic = checks.deterministic(deterministic)

    differentiable_slopes = torch.is_grad_enabled() and alibi_slopes is not None and alibi_slopes.requires_grad
    if dispatch.takes_cpu(impl, "q", q, "alibi_slopes require a gradient" if differentiable_slopes else None):
        return sigmoid_attention_cpu(
            q, k, v, window_size=(left, right), softmax_scale=softmax_scale, sigmoid_bias=sigmoid_bias, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if dispatch.takes_reference("sigmoid", impl, "q", q):
        return sigmoid_attention_reference(
            q, k, v, window_size=(left, right), softmax_scale=softmax_scale, sigmoid_bias=sigmoid_bias, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    checks.no_gradient(alibi_slopes=alibi_slopes)
    softmax_scale, q = checks.positive_scale(softmax_scale, q)
    return ops.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, impl, deterministic, softmax_scale, sigmoid_bias, left, right)


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of sigmoid_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(sigmoid_attention, q, k, v, **options)
