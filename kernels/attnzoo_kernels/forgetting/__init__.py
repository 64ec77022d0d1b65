"""Forgetting attention: softmax attention with a forget gate (Lin et al. 2025, arXiv:2503.02130)."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.forgetting import ops
from attnzoo_kernels.forgetting.cpu import forgetting_attention_cpu
from attnzoo_kernels.forgetting.reference import forgetting_attention_reference


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    prune: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ + c_i - c_j) v with c = cumsum(log_f): the weight of key j is reduced by the gates of the tokens after
    it, up to query i's own. Forward and backward by online softmax, in linear memory.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, and grouped heads: as in `flash_attention`. The mask is always causal,
    aligned to the bottom right: query i sees key j if j <= i + seqlen_k - seqlen_q.

    log_f: float32 (the reference also takes float64), the natural logarithm of the forget gate of every key's token and query head,
        (batch, seqlen_k, heads), or packed (total, heads) with the tokens of k. Finite, and at most 0, which is not checked.
    c: the sum of log_f along each sequence. The kernels compute it exactly at any length, if it stays below 3e7 in magnitude. c_i is the c
        of key i + seqlen_k - seqlen_q, the last one that query i sees.
    window_size: (left, right), inclusive around that key, -1 is unlimited; right has no effect.
    softmax_scale: any finite number; default head_dim ** -0.5.
    A query that sees no key gives zeros and LSE -inf, and finite gradients.

    return_lse: also return the natural log-sum-exp of the scores, with c_i, float32, (batch, heads, seqlen_q) or (heads, total),
        differentiable.
    deterministic: True: repeated runs give the same bits in the backward, too; it is then plain Triton's. None follows
        torch.are_deterministic_algorithms_enabled(). The forward always repeats bit by bit.
    prune: True: the kernels and the path for CPUs skip tiles whose weights together are too small to change a float32. In these, c_i - c_j
        is below -(2 softmax_scale max|q| max|k| + log(seqlen_k) + 17), where |q| and |k| are norms of the head's vectors. None means True
        if there are at least 1024 keys (packed: tokens) and no window. `blocks.passed_over` gives the share of skipped tiles. The reference
        skips none.
    impl: "gluon" (Hopper: 16 bits, head_dim and value_dim 33 to 128) | "triton" | "cpu" | "reference". None takes,
        on CUDA tensors, gluon if it supports the call (`why_not_gluon`), else triton; on CPU ones cpu.
        "cpu" is PyTorch's attention by tiles of queries, in linear memory, with first derivatives only. A named path runs, or the call
        raises. Gluon's backward supports bfloat16, and queries and keys of the same lengths (packed: one tensor as both cu_seqlens), but
        not deterministic=True; other calls take plain Triton's backward, which is slower and more exact. For Gluon's backward the forward
        also keeps the output's rounding error, a tensor like the output. Where keys and values have large means, gradients of Gluon's
        backward can have more than twice the error of eager attention.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_gates(log_f, q, k)
    left, _ = checks.window(window_size, True)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)
    if prune is not None:
        checks.flag("prune", prune, " or None")
    if dispatch.takes_cpu(impl, "q", q):
        out, lse = forgetting_attention_cpu(
            q, k, v, log_f, window_size=(left, 0), softmax_scale=softmax_scale, prune=ops.prunes(k, left, prune), cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k)
    elif dispatch.takes_reference("forgetting", impl, "q", q):
        out, lse = forgetting_attention_reference(
            q, k, v, log_f, window_size=(left, 0), softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    else:
        if log_f.dtype != torch.float32:
            raise NotImplementedError(f'log_f: impl="triton" takes float32, got {log_f.dtype}; impl="reference" takes it')
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        wanted = ops.wants_residual(q, k, v, log_f, impl, deterministic)
        out, _, lse, *_ = ops.forward(q, k, v, log_f, cu_seqlens_q, cu_seqlens_k, wanted, impl, deterministic, softmax_scale, left, prune)
    return (out, lse) if return_lse else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of forgetting_attention; None where it does, and so does
    impl=None."""
    return dispatch.why_not_gluon(forgetting_attention, q, k, v, log_f, **options)


def _check_gates(log_f: Tensor, q: Tensor, k: Tensor) -> None:
    checks.tensor("log_f", log_f, "a float32 tensor")
    shape = (*k.shape[:-2], q.shape[-2])
    if tuple(log_f.shape) != shape:
        raise ValueError(f"log_f: must have shape {shape}, k's tokens and q's heads, got {tuple(log_f.shape)}")
    if log_f.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"log_f: must be float32, got {log_f.dtype}")
    if log_f.device != q.device:
        raise ValueError(f"log_f: must be on q's device {q.device}, got {log_f.device}")
