"""Differential attention: the difference of two softmax maps over the same values (Ye et al. 2024, arXiv:2410.05258)."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.differential import ops
from attnzoo_kernels.differential.cpu import differential_attention_cpu
from attnzoo_kernels.differential.reference import differential_attention_reference
from attnzoo_kernels.differential.tiles import MAX_HEAD_DIM


def differential_attention(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor,
    *,
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
    """(softmax(softmax_scale * q1 k1ᵀ) - lam * softmax(softmax_scale * q2 k2ᵀ)) v in one pass over k1, k2 and v, in linear memory.

    Dense: q1, q2 (batch, seqlen_q, heads, head_dim), k1, k2 (batch, seqlen_k, kv_heads, head_dim),
    v (batch, seqlen_k, kv_heads, value_dim).
    Packed: the same without batch, (total, heads, head_dim), with cu_seqlens_q, cu_seqlens_k (int32, sequences + 1, may repeat the last
    value as padding; tokens behind it give zeros). max_seqlen_q, max_seqlen_k (ints, at least the longest sequence) spare the reference a
    wait for the device; kernels do not read them.
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free,
    so that kernels need no copy of interleaved heads q[..., 0::2, :], q[..., 1::2, :]. head_dim up to 128 (cpu and the reference: 256),
    value_dim up to 256.
    kv_heads divides heads; pair h reads key pair and value head h // (heads // kv_heads).

    k2: if it is None, or the tensor k1 itself, both branches share the keys, which are read once.
    lam: float32 (cpu and the reference also take float64), a scalar (), per head (heads,), or per token and head (batch, seqlen_q, heads)
        or (total, heads). Not clamped. All inputs have gradients; lam's is summed in a fixed order.
    causal, window_size: as in `flash_attention`, the diagonal at the bottom right.
    softmax_scale: any finite number; default head_dim ** -0.5.
    Each softmax has its own maximum and sum. Their outputs are subtracted in float32 and rounded once. The rows of the combined map sum to
    1 - lam. A query that sees no key gives zeros, LSEs of -inf, and finite gradients.

    return_lse: also return the natural log-sum-exps of both branches' scores, float32, (2, batch, heads, seqlen_q) or (2, heads, total),
        without gradient.
    There is no dropout: the paper defines none for the difference of two maps.
    deterministic: True: repeated runs give the same bits in the backward too; False: Gluon's backward adds up the queries' gradients in
        any order; None follows torch.are_deterministic_algorithms_enabled(). The forward repeats bit by bit always, and so does plain
        Triton's backward.
    impl: "gluon" (Hopper: 16 bits, head_dim and value_dim 33 to 128, above head_dim 64 value_dim up to 256) | "triton" | "cpu" |
        "reference". Gluon's forward is one launch that goes over the keys once for each branch. Its backward, unless deterministic asks for
        plain Triton's, goes over them once for all gradients; above head_dim 64, once for each branch and 128 columns of v. None takes, on
        CUDA tensors, gluon if it supports the call, else triton; on CPU ones cpu. "cpu" is PyTorch's attention (fused in 16 bits) by tiles
        of queries, in linear memory, with first derivatives only. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.attention_inputs(q1, k1, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, names=("q1", "k1", "v"))
    checks.alike("q2", q2, "q1", q1)
    if k2 is not None:
        checks.alike("k2", k2, "k1", k1)
    _check_lambda(lam, q1)
    left, right = checks.window(window_size, causal)
    softmax_scale = checks.softmax_scale(softmax_scale, q1.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)
    if k2 is k1:
        k2 = None
    if dispatch.takes_cpu(impl, "q1", q1):
        out, lse = differential_attention_cpu(q1, q2, k1, k2, v, lam, window_size=(left, right), softmax_scale=softmax_scale,
                                              cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    elif dispatch.takes_reference("differential", impl, "q1", q1):
        out, lse = differential_attention_reference(
            q1, q2, k1, k2, v, lam, window_size=(left, right), softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    else:
        if lam.dtype != torch.float32:
            raise NotImplementedError(f'lam: impl="triton" takes float32, got {lam.dtype}; impl="reference" takes it')
        if q1.shape[-1] > MAX_HEAD_DIM:
            raise NotImplementedError(f'q1: impl="triton" takes head_dim up to {MAX_HEAD_DIM}, got {q1.shape[-1]}; '
                                      'impl="reference" takes it')
        softmax_scale, q1, q2 = checks.positive_scale(softmax_scale, q1, q2)
        differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q1, q2, k1, k2, v, lam))
        out, lse, _, _ = ops.forward(q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale,
                                     left, right, differentiable)
    return (out, lse.detach()) if return_lse else out


def why_not_gluon(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of differential_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(differential_attention, q1, q2, k1, k2, v, lam, **options)


def _check_lambda(lam: Tensor, q: Tensor) -> None:
    checks.tensor("lam", lam, way_out="; a number goes in as torch.tensor(number)")
    *tokens, heads, _ = q.shape
    shapes = [(), (heads,), (*tokens, heads)]
    if tuple(lam.shape) not in shapes:
        raise ValueError(f"lam: must have shape {' or '.join(map(str, shapes))}, got {tuple(lam.shape)}")
    if lam.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lam: must be float32, got {lam.dtype}")
    if lam.device != q.device:
        raise ValueError(f"lam: must be on q1's device {q.device}, got {lam.device}")
