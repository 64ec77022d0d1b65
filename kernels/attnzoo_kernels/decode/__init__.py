"""Decoding: a few queries against a long cache of keys, which all multiprocessors read together (Flash-Decoding, Dao et al. 2023)."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.decode import ops
from attnzoo_kernels.decode.reference import decode_attention_reference

IMPLEMENTATIONS = ("triton", "reference")


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ + bias) v of the newest tokens over a cache: `flash_attention` for few queries, without gradients.

    q: (batch, seqlen_q, heads, head_dim): one new token of each sequence, or a few.
    k_cache: (batch, max_len, kv_heads, head_dim), v_cache: (batch, max_len, kv_heads, value_dim): the new tokens are in it.
    cache_seqlens: int32 (batch,), on q's device: how many tokens of each row are there, the new ones included; what lies behind is never
        used, whatever it is. Values are not looked at on a GPU: more than max_len reads max_len. Zero makes an empty row.
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free.
    head_dim and value_dim up to 256. kv_heads divides heads; query head h reads key head h // (heads // kv_heads).

    Query i is the token cache_seqlens - seqlen_q + i of its sequence. Scores are scaled, then capped, then biased, then masked, in the
    meaning of `flash_attention`: causal (with one query it says nothing), window_size (left, right), softcap,
    alibi_slopes float32 (heads,) or (batch, heads), sinks float32 (heads,). With 2 queries and 5 tokens, causal:
        1 1 1 1 0
        1 1 1 1 1
    A query that sees no key gives zeros and LSE -inf (the sink with sinks).

    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q).
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A path named runs or raises.

    The Triton path shares out the tiles of all sequences evenly among as many programs as the GPU runs at once, whatever the lengths, and
    adds the parts in a fixed order: repeated calls give the same bits. Lengths are read on the device: nothing waits, nothing is compiled
    again, and a CUDA graph follows lengths that are changed in place.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.attention_inputs(q, k_cache, v_cache, None, None, None, None, names=("q", "k_cache", "v_cache"),
                            unpacked="; it takes no packed input, and one token of each sequence is q[:, None]")
    batch, _, heads, head_dim = q.shape
    _check_lengths(cache_seqlens, q, k_cache.shape[1])
    checks.non_negative("softcap", softcap)
    left, right = checks.window(window_size, causal)
    if alibi_slopes is not None:
        checks.per_head("alibi_slopes", alibi_slopes, q, heads, batch)
    if sinks is not None:
        checks.per_head("sinks", sinks, q, heads)
    softmax_scale = checks.softmax_scale(softmax_scale, head_dim)

    if dispatch.takes_reference("decode", impl, "q", q, IMPLEMENTATIONS):
        out, lse = decode_attention_reference(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, window_size=(left, right), softmax_scale=softmax_scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks)
    else:
        checks.no_gradient(alibi_slopes=alibi_slopes)
        autograd.refuse_derivatives('impl="triton"', "use flash_attention", q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        out, lse = ops.forward(q, k_cache, v_cache, cache_seqlens, alibi_slopes, sinks, softmax_scale, left, right, softcap)
    return (out, lse) if return_lse else out


def _check_lengths(cache_seqlens: Tensor, q: Tensor, max_len: int) -> None:
    checks.tensor("cache_seqlens", cache_seqlens, way_out="; torch.full((batch,), length, dtype=torch.int32, device=q.device) makes one")
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        raise ValueError(f"cache_seqlens: must have shape (batch,) = ({q.shape[0]},), got {tuple(cache_seqlens.shape)}")
    if cache_seqlens.dtype != torch.int32:
        raise TypeError(f"cache_seqlens: must be int32, got {cache_seqlens.dtype}")
    if cache_seqlens.device != q.device:
        raise ValueError(f"cache_seqlens: must be on q's device {q.device}, got {cache_seqlens.device}")
    if cache_seqlens.shape[0] > 1 and cache_seqlens.stride(0) != 1:
        raise ValueError(f"cache_seqlens: must be contiguous, got stride {cache_seqlens.stride(0)}; call .contiguous()")
    if cache_seqlens.device.type == "cpu" and not torch.compiler.is_compiling() and cache_seqlens.numel():
        low, high = cache_seqlens.aminmax()
        if low < 0 or high > max_len:
            raise ValueError(f"cache_seqlens: must lie between 0 and the cache's {max_len} tokens, got {cache_seqlens.tolist()}")
