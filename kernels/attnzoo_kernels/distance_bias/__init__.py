"""Attention with a learned bias by distance: T5's buckets (Raffel et al. 2020, arXiv:1910.10683), KERPLE (Chi et al. 2022,
arXiv:2205.09921), and any other function of the distance from a query to a key. The function is given as a table."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.distance_bias import ops
from attnzoo_kernels.distance_bias.cpu import distance_bias_attention_cpu
from attnzoo_kernels.distance_bias.reference import distance_bias_attention_reference


def distance_bias_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    origin: int = 0,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ + bias[head, origin + distance]) v, forward and backward by online softmax, in linear memory.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, the masks of `causal` and `window_size`, and grouped heads: as
    `flash_attention` has them. A query that sees no key gives zeros and LSE -inf, and finite gradients.

    bias: float32 (heads, distances) (the reference also takes float64), at least one distance: what is added to the scores of each query
        head at each distance, in natural units. The distance of query i and key j is i + seqlen_k - seqlen_q - j: how many tokens the key
        lies before the query; it is negative if the key lies after it. Distances beyond the table's ends take its first or last entry.
        The table's gradient is the sums of the gradients of the scores, float32.
    origin: the index of the entry for distance 0, any integer. It is 0 for causal attention; a table for both directions has it in the
        middle.
    softmax_scale: any finite number; default head_dim ** -0.5. T5's is 1.

    return_lse: also return the natural log-sum-exp of the scores, with the bias, float32, (batch, heads, seqlen_q) or (heads, total),
        differentiable.
    deterministic: as in flash_attention; the table's gradient is then plain Triton's, which always repeats bit by bit.
    impl: "gluon" (Hopper: 16 bits, head_dim and value_dim 33 to 128) | "triton" | "cpu" | "reference". On CUDA tensors None takes gluon if
        it supports the call (`why_not_gluon`), else triton. On CPU ones it takes cpu: matrix products by tiles of queries, in linear
        memory, with first derivatives only. A named path runs the forward, or the call raises.
        Gluon's backward makes the table's gradient for widths of up to 64; above them plain Triton's backward runs. It adds up gradients of
        scores that are rounded to 16 bits. Where distances share an entry of the table, the sum can have more than twice the error of eager
        attention. So None takes plain Triton's backward unless queries and keys have at least 128 distances, each with an entry of its own,
        by max_seqlen_q and max_seqlen_k if sequences are packed.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_bias(bias, q)
    checks.integer("origin", origin)
    # kernels add distances to it in 32 bits; this far away all distances take the same entry
    origin = max(-checks.UNLIMITED, min(origin, bias.shape[1] + checks.UNLIMITED))
    left, right = checks.window(window_size, causal)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)
    options = {"origin": origin, "window_size": (left, right), "softmax_scale": softmax_scale, "cu_seqlens_q": cu_seqlens_q,
               "cu_seqlens_k": cu_seqlens_k}
    if dispatch.takes_cpu(impl, "q", q):
        out, lse = distance_bias_attention_cpu(q, k, v, bias, **options)
    elif dispatch.takes_reference("distance_bias", impl, "q", q):
        out, lse = distance_bias_attention_reference(q, k, v, bias, **options, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    else:
        if bias.dtype != torch.float32:
            raise NotImplementedError(f'bias: the kernels take float32, got {bias.dtype}; impl="reference" takes it')
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        longest = [at_most or x.shape[-3] for at_most, x in ((max_seqlen_q, q), (max_seqlen_k, k))]
        covered = ops.is_covered(*longest, bias.shape[1], origin, left, right)
        residual = ops.wants_residual(q, v, bias, impl, deterministic, covered)
        out, lse, *_ = ops.forward(q, k, v, bias, cu_seqlens_q, cu_seqlens_k, residual, impl, deterministic, covered, origin,
                                   softmax_scale, left, right)
    return (out, lse) if return_lse else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take the forward of a call with these arguments of distance_bias_attention; None where it does."""
    return dispatch.why_not_gluon(distance_bias_attention, q, k, v, bias, **options)


def _check_bias(bias: Tensor, q: Tensor) -> None:
    checks.tensor("bias", bias, "a float32 tensor")
    if bias.dim() != 2 or bias.shape[0] != q.shape[-2] or bias.shape[1] == 0:
        raise ValueError(f"bias: must have shape ({q.shape[-2]}, distances), q's heads and at least one distance, got {tuple(bias.shape)}")
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"bias: must be float32, got {bias.dtype}")
    if bias.device != q.device:
        raise ValueError(f"bias: must be on q's device {q.device}, got {bias.device}")
