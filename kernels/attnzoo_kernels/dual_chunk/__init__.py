"""Dual Chunk attention: long contexts in which no rotary distance is larger than in training (An et al. 2024, arXiv:2402.17463)."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.dual_chunk import ops
from attnzoo_kernels.dual_chunk.cpu import dual_chunk_attention_cpu
from attnzoo_kernels.dual_chunk.geometry import STAGES, Geometry, geometry, stage_bits
from attnzoo_kernels.dual_chunk.reference import dual_chunk_attention_reference


def dual_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    chunk_size: int,
    local_size: int,
    variant: str = "paper",
    causal: bool = False,
    rope_interleaved: bool = False,
    stages: tuple[str, ...] = STAGES,
    logit_multiplier: Tensor | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * <R(distance) q, k>) v over UN-ROTATED q and k, in one pass over the keys; linear memory, trainable.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, and grouped heads: as `flash_attention` has them. Each packed sequence
    has its own chunks.

    cos, sin: float32 (positions, rotary_dim / 2), of the angles of positions 0, 1, ...; positions must be larger than the largest position
    below. Each pair's angle must be proportional to the position, because gradients are rotated by differences of positions. rotary_dim
    may be less than head_dim; the channels after it are not rotated. rope_interleaved: channel 2c pairs with 2c + 1 instead of c with
    c + rotary_dim / 2.

    Query i stands at position p = i + seqlen_k - seqlen_q (bottom right), key j at position j. With chunks of L = chunk_size - local_size
    tokens, and n chunks from the key's to the query's, the rotary positions of the two are
      n = 0   intra         p % L                   j % L
      n = 1   successive    min(p % L + L, top)     j % L
      n > 1   inter         far                     j % L
    variant "paper": top = far = chunk_size - 1; "chunkllama" (its code, vLLM's and Qwen's): top = chunk_size, far = min(2 L - 1, top).
    Distances of the paper's Figure 2, chunk_size=10 and local_size=4, keys 0 to 11 of query 11:
        9 8 7 6 5 4 | 5 4 3 2 1 0
    Up to min(top + 1, 2 L) tokens it equals plain rotary attention.

    causal: keys j <= p are seen. Otherwise all keys are seen, and the distance to a later token is minus the distance back from it: then
        the query's position is p % L, and the key's position is that of its stage.
    stages: which of the three stages are attended to; keys of the other stages are masked.
    logit_multiplier: float32 (seqlen_q,), (batch, seqlen_q) or packed (total_q,), multiplies a query's logits (for example by the
        temperature of YaRN for long inputs). Keys do not depend on it, so decoding token by token equals one call for all tokens. No
        gradient in the Triton path.
    A query that sees no key gives zeros and LSE -inf, and finite gradients.

    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the logits, float32, (batch, heads, seqlen_q) or (heads, total), differentiable.
    deterministic: repeated runs give the same gradients bit by bit; None follows torch.are_deterministic_algorithms_enabled(). The forward
        always does, and so does plain Triton's backward.
    impl: "triton" | "gluon" | "cpu" | "reference"; None takes, on CUDA tensors, gluon if it supports the call (Hopper, 16 bits,
        causal, all stages, widths of 33 to 128), else triton; on CPU ones cpu. "cpu" is PyTorch's attention (fused in 16 bits) by tiles of
        queries and stages, in linear memory, with first derivatives only. A named path runs, or the call raises. Calls that gluon's
        backward does not support (chunks that are no multiples of 128 tokens, packed sequences without one cu_seqlens for both sides) take
        triton's backward.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    packed = checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    chunks = geometry(chunk_size, local_size, variant)
    bits = stage_bits(stages)
    _check_tables(q, cos, sin, chunks)
    if logit_multiplier is not None:
        _check_multiplier(q, logit_multiplier, packed)
    checks.flag("causal", causal)
    checks.flag("rope_interleaved", rope_interleaved)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)

    if dispatch.takes_cpu(impl, "q", q):
        out, lse = dual_chunk_attention_cpu(
            q, k, v, cos=cos, sin=sin, geometry=chunks, stages=bits, causal=causal, rope_interleaved=rope_interleaved,
            logit_multiplier=logit_multiplier, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    elif dispatch.takes_reference("dual_chunk", impl, "q", q):
        out, lse = dual_chunk_attention_reference(
            q, k, v, cos=cos, sin=sin, geometry=chunks, stages=bits, causal=causal, rope_interleaved=rope_interleaved,
            logit_multiplier=logit_multiplier, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    else:
        checks.no_gradient(cos=cos, sin=sin, logit_multiplier=logit_multiplier)
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        out, lse, _ = ops.forward(q, k, v, cos, sin, logit_multiplier, cu_seqlens_q, cu_seqlens_k, impl, deterministic, *chunks, bits,
                                  causal, rope_interleaved, softmax_scale)
    return (out, lse) if return_lse else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of dual_chunk_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(dual_chunk_attention, q, k, v, **options)


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, chunks: Geometry) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        checks.tensor(name, table)
        shape = tuple(table.shape)
        if len(shape) != 2 or not 1 <= shape[1] <= q.shape[-1] // 2:
            raise ValueError(f"{name}: must be (positions, rotary_dim / 2) with rotary_dim up to q's {q.shape[-1]}, got {shape}")
        if table.shape[0] < chunks.positions:
            raise ValueError(f"{name}: must have a row for each of the {chunks.positions} positions of these chunks, got {table.shape[0]}")
        if table.dtype != torch.float32:
            raise TypeError(f"{name}: must be float32, got {table.dtype}")
        if table.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {table.device}")
        if not table.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {table.stride()}; call .contiguous()")
    if sin.shape[1] != cos.shape[1]:
        raise ValueError(f"sin: must have cos's {cos.shape[1]} columns, got {sin.shape[1]}")


def _check_multiplier(q: Tensor, multiplier: Tensor, packed: bool) -> None:
    checks.tensor("logit_multiplier", multiplier, "a float32 tensor")
    shapes = [(q.shape[0],)] if packed else [(q.shape[1],), tuple(q.shape[:2])]
    if tuple(multiplier.shape) not in shapes:
        raise ValueError(f"logit_multiplier: must have shape {' or '.join(map(str, shapes))}, got {tuple(multiplier.shape)}")
    if multiplier.dtype != torch.float32:
        raise TypeError(f"logit_multiplier: must be float32, got {multiplier.dtype}")
    if multiplier.device != q.device:
        raise ValueError(f"logit_multiplier: must be on q's device {q.device}, got {multiplier.device}")
    if multiplier.stride(-1) != 1 and multiplier.shape[-1] > 1:
        raise ValueError(f"logit_multiplier: last dimension must be contiguous, got stride {multiplier.stride(-1)}")
