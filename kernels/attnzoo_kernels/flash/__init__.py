"""FlashAttention: exact attention without the quadratic matrix (Dao 2023, arXiv:2307.08691)."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.dropout import check_state, new_rng_state
from attnzoo_kernels.flash import ops
from attnzoo_kernels.flash.cpu import flash_attention_cpu
from attnzoo_kernels.flash.reference import flash_attention_reference
from attnzoo_kernels.ranges import KeyRanges, check_form, check_values, make_tables


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    ranges: Tensor | KeyRanges | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ + bias) v by online softmax, forward and backward in linear memory.

    Dense: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, value_dim).
    Packed: the same without batch, (total, heads, head_dim), with cu_seqlens_q, cu_seqlens_k (int32, sequences + 1, may repeat the last
    value as padding; tokens behind it give zeros). max_seqlen_q, max_seqlen_k (ints, at least the longest sequence) spare the reference a
    wait for the device; kernels do not read them.
    Packed, with ranges in place of cu_seqlens: a list that says which keys queries see, int32 (n, 5) as in `KeyRanges`. A KeyRanges also
    keeps the list's tables, so that many calls make them once. Each range says whether it is causal, so `causal` must be False; windows
    count from each range's own diagonal. If several ranges show a query the same key, the key counts once for each. With ranges there is no
    alibi_slopes, no dropout_p and no path for CPUs, and plain Triton's backward is taken if it must repeat bit by bit. On a GPU, ranges are
    not checked; KeyRanges.of can check them. There, ranges share tiles: a NaN can reach nearby tokens that do not see it.
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free.
    head_dim and value_dim up to 256. From sm_90 on, tensors whose rows are not aligned to 16 bytes may be copied.
    kv_heads divides heads; query head h reads key head h // (heads // kv_heads).

    Scores are scaled, then capped (softcap * tanh(score / softcap), 0 is off), then biased, then masked:
      causal         query i sees key j if j <= i + seqlen_k - seqlen_q (bottom right). For 3 queries and 5 keys, and for 5 and 3:
                         1 1 1 0 0        0 0 0
                         1 1 1 1 0        0 0 0
                         1 1 1 1 1        1 0 0
                                          1 1 0
                                          1 1 1
      window_size    (left, right), inclusive around i + seqlen_k - seqlen_q, -1 is unlimited; causal sets right to 0.
      alibi_slopes   float32 (heads,) or (batch, heads): adds -slope * |i + seqlen_k - seqlen_q - j| (Press et al. 2022). No gradient.
      sinks          float32 (heads,): a learned logit that is added to the denominator and the LSE, unscaled. With gradient.
      dropout_p      in [0, 1): attention weights are zeroed with this probability, and the others divided by 1 - dropout_p. The mask
                     is a function of (seed, offset, batch, head, i, j); seed and offset are drawn from torch's generator.
                     `attnzoo_kernels.dropout` computes it.
      dropout_state  int64 (2,): the seed and offset, instead of drawn ones. Where q is a part of each sequence's queries, one entry for
                     each sequence follows: the place of its first query, int64 (2 + batch,) or (2 + sequences,). k and v must then begin
                     with the sequence's first key. Batch and heads must be whole: a part of them has other masks. Places are not
                     checked. Unused if dropout_p is 0.
    A query that sees no key gives zeros and LSE -inf (the sink with sinks), and finite gradients.

    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q) or (heads, total), differentiable.
    deterministic: True: repeated runs give the same bits in the backward too; False: Gluon's backward adds up dQ in any order where that is
        faster; None follows torch.are_deterministic_algorithms_enabled(). The forward repeats bit by bit always, and so does plain
        Triton's backward.
    impl: "gluon" (Hopper: 16 bits, head_dim 33 to 128, or to 192 without a window and ranges, value_dim 33 to 128, no softcap, ALiBi or
        dropout) | "triton" | "cpu" | "reference". Plain Triton's backward takes the calls that gluon's does not, such as a gradient of
        sinks over ranges, or deterministic above head_dim 128. On CUDA tensors None takes gluon if it supports the call (`why_not_gluon`),
        else triton. It also takes triton where that is faster: for sinks with a window below 256 keys, and for the forward over ranges
        with a window, up to head_dim 64. On CPU tensors None takes cpu if it supports the call (`why_not_cpu`: no gradient for
        alibi_slopes), else the reference. "cpu" is PyTorch's fused attention for 16 bits, whole or by tiles of queries, and matrix products
        by tiles for float32, softcap and dropout_p; it gives first derivatives only. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    packed = checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, by_ranges=ranges is not None)
    heads, head_dim = q.shape[-2:]
    checks.probability("dropout_p", dropout_p)
    checks.non_negative("softcap", softcap)
    left, right = checks.window(window_size, causal)
    checks.flag("return_lse", return_lse)
    if ranges is not None:
        ranges = _checked_ranges(ranges, q, k, causal, alibi_slopes, dropout_p)
    if alibi_slopes is not None:
        batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
        checks.per_head("alibi_slopes", alibi_slopes, q, heads, batch)
    if sinks is not None:
        checks.per_head("sinks", sinks, q, heads)
    softmax_scale = checks.softmax_scale(softmax_scale, head_dim)
    deterministic = checks.deterministic(deterministic)
    if dropout_state is not None:
        check_state("dropout_state", dropout_state, q, cu_seqlens_q.shape[0] - 1 if packed and ranges is None else q.shape[0])
    rng_state = None if dropout_p == 0 or dispatch.asking() else new_rng_state(q.device) if dropout_state is None else dropout_state

    differentiable_slopes = torch.is_grad_enabled() and alibi_slopes is not None and alibi_slopes.requires_grad
    why_not = "it has no ranges" if ranges is not None else "alibi_slopes require a gradient" if differentiable_slopes else None
    if dispatch.takes_cpu(impl, "q", q, why_not):
        out, lse = flash_attention_cpu(
            q, k, v, window_size=(left, right), softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=dropout_p, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_lse=return_lse)
    elif dispatch.takes_reference("flash", impl, "q", q):
        out, lse = flash_attention_reference(
            q, k, v, window_size=(left, right), softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=dropout_p, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, ranges=None if ranges is None else ranges.ranges)
    else:
        checks.no_gradient(alibi_slopes=alibi_slopes)
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        if ranges is not None:
            cu_seqlens_q, cu_seqlens_k = make_tables(ranges.ranges) if ranges.tables is None else ranges.tables
        wanted = ops.wants_residual(q, v, sinks, alibi_slopes, ranges is not None, impl, softcap, dropout_p)
        out, lse, *_ = ops.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng_state, wanted, impl, deterministic,
                                   softmax_scale, left, right, softcap, dropout_p)
    return (out, lse) if return_lse else out


def _checked_ranges(ranges: Tensor | KeyRanges, q: Tensor, k: Tensor, causal: bool, alibi_slopes: Tensor | None,
                    dropout_p: float) -> KeyRanges:
    ranges = ranges if isinstance(ranges, KeyRanges) else KeyRanges(ranges)
    check_form("ranges", ranges.ranges)
    if ranges.ranges.device != q.device:
        raise ValueError(f"ranges: must be on q's device {q.device}, got {ranges.ranges.device}")
    if causal:
        raise ValueError("causal: must be False with ranges, of which each says whether it is, got True")
    if alibi_slopes is not None or dropout_p > 0:
        raise NotImplementedError("ranges: go with no alibi_slopes and no dropout_p")
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_values(ranges.ranges, q.shape[0], k.shape[0])
    return ranges


def why_not_cpu(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="cpu" does not take a call with these arguments of flash_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not("cpu", flash_attention, q, k, v, **options)


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of flash_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(flash_attention, q, k, v, **options)
