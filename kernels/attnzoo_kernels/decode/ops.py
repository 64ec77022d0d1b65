"""Decoding's launches. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, softmax_scale: float, window_left: int, window_right: int, softcap: float,
    k_scale: Tensor | None, v_scale: Tensor | None, share_prefixes: bool, segments: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.decode import prefixes
    from attnzoo_kernels.decode.forward import launch_forward

    dispatch.choose("decode forward", "triton")
    if share_prefixes:
        return prefixes.launch_forward(q, k_cache, v_cache, cache_seqlens, block_table, sinks, softmax_scale, window_right, softcap,
                                       k_scale, v_scale, out_dtype)
    return launch_forward(q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks, softmax_scale, window_left, window_right,
                          softcap, k_scale, v_scale, out_dtype, segments=segments)


def _fake_forward(q, k_cache, v_cache, *rest):
    *_, segments, out_dtype = rest
    batch, queries, heads = q.shape[0], q.shape[1] if segments is None else 1, q.shape[2]
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    return q.new_empty(batch, queries, heads, v_cache.shape[-1], dtype=out_dtype or q.dtype), lse


forward = autograd.forward_only("decode_forward", _forward, _fake_forward)


def _latent_forward(q: Tensor, cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, value_dim: int, softmax_scale: float,
                    causal: bool) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.decode.latent import launch_forward

    dispatch.choose("latent_decode forward", "triton")
    return launch_forward(q, cache, cache_seqlens, block_table, value_dim, softmax_scale, causal)


def _fake_latent_forward(q, cache, cache_seqlens, block_table, value_dim, *_):
    return q.new_empty(*q.shape[:-1], value_dim), q.new_empty(q.shape[:3], dtype=torch.float32).mT


latent_forward = autograd.forward_only("latent_decode_forward", _latent_forward, _fake_latent_forward)
