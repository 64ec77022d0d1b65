"""Attention in two frames of positions: near and far keys see other rotations of the same queries, under one softmax."""

from typing import Any

from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.two_frame import ops
from attnzoo_kernels.two_frame.cpu import two_frame_attention_cpu
from attnzoo_kernels.two_frame.reference import two_frame_attention_reference


def two_frame_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    near_keys: int,
    far_keys: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * s) v, where a score s is the product of query and key in the near or in the far frame, depending on their
    distance. Forward and backward by online softmax, in linear memory.

    Dense: q (batch, seqlen_q, heads, 2, head_dim), k (batch, seqlen_k, kv_heads, 2, head_dim), v (batch, seqlen_k, kv_heads, value_dim).
    Packed: the same without batch, (total, heads, 2, head_dim), with cu_seqlens_q, cu_seqlens_k (int32, sequences + 1, may repeat the last
    value as padding; tokens behind it give zeros). max_seqlen_q, max_seqlen_k (ints, at least the longest sequence) spare the reference a
    wait for the device; kernels do not read them.
    q[..., 0, :] and k[..., 0, :] are queries and keys at their positions in the near frame, q[..., 1, :] and k[..., 1, :] the same queries
    and keys in the far one. The caller rotates them and passes both copies; both have gradients.
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, each head's two frames
    side by side as the heads are, other strides free. head_dim and value_dim up to 256. From sm_90 on, tensors whose rows are not
    aligned to 16 bytes may be copied. kv_heads divides heads; query head h reads key head h // (heads // kv_heads).

    Query i's own key is p = i + seqlen_k - seqlen_q (bottom right). It sees key j
        near  (n)  if 0 <= p - j < near_keys,
        far   (f)  if near_keys <= p - j and j < far_keys. far_keys=None: no limit on j.
    The mask is causal, drawn for 6 queries and keys and near_keys=2, without far_keys and with far_keys=1:
                         n . . . . .      n . . . . .
                         n n . . . .      n n . . . .
                         f n n . . .      f n n . . .
                         f f n n . .      f . n n . .
                         f f f n n .      f . . n n .
                         f f f f n n      f . . . n n
    ReRoPE (https://kexue.fm/archives/9708), Leaky ReRoPE, SelfExtend (Jin et al. 2024, arXiv:2401.01325), LM-Infinite (Han et al. 2023,
    arXiv:2308.16137) and StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) are such masks and positions; `attnzoo.attention.two_frame`
    has those of each.
    softmax_scale: any finite number; default head_dim ** -0.5.
    A query that sees no key gives zeros and LSE -inf, and finite gradients.

    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q) or (heads, total), differentiable.
    deterministic: as in flash_attention; plain Triton's results repeat bit by bit in any case.
    impl: "triton" | "gluon" | "cpu" | "reference". On CUDA tensors None takes gluon if it supports the call (Hopper, 16 bits, widths of 33
        to 128), else triton; on CPU ones cpu. "cpu" is PyTorch's attention by tiles of queries, in linear memory, with first derivatives
        only. A named path runs, or the call raises. What gluon's backward does not take (packed sequences with far_keys) triton's does.
        None also takes triton's backward for fewer than 128 far keys, where it is faster.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    layout = "(batch, seqlen, heads, 2, head_dim)" if cu_seqlens_q is cu_seqlens_k is None else "(total, heads, 2, head_dim)"
    q, k = (_frames_as_heads(name, x, layout) for name, x in (("q", q), ("k", k)))
    checks.attention_inputs(q[..., ::2, :], k[..., ::2, :], v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    checks.integer("near_keys", near_keys, 1)
    if far_keys is not None:
        checks.integer("far_keys", far_keys, 0)
    near, far = (min(int(n), checks.UNLIMITED) for n in (near_keys, checks.UNLIMITED if far_keys is None else far_keys))
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)

    if dispatch.takes_cpu(impl, "q", q):
        out, lse = two_frame_attention_cpu(q, k, v, near_keys=near, far_keys=far, softmax_scale=softmax_scale,
                                           cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    elif dispatch.takes_reference("two_frame", impl, "q", q):
        out, lse = two_frame_attention_reference(
            q, k, v, near_keys=near, far_keys=far, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    else:
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        out, lse, _ = ops.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, impl, deterministic, softmax_scale, near, far)
    return (out, lse) if return_lse else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of two_frame_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(two_frame_attention, q, k, v, **options)


def _frames_as_heads(name: str, x: Tensor, layout: str) -> Tensor:
    """A view (..., 2 heads, head_dim): head h has its frames as heads 2 h (near) and 2 h + 1 (far)."""
    checks.tensor(name, x)
    if x.dim() != layout.count(",") + 1 or x.shape[-2] != 2:
        raise ValueError(f"{name}: must be {layout}, got shape {tuple(x.shape)}")
    if x.shape[-3] > 1 and x.stride(-3) != 2 * x.stride(-2):
        raise ValueError(f"{name}: heads must lie two frames apart, got strides {x.stride()}; call .contiguous()")
    return x.flatten(-3, -2)
