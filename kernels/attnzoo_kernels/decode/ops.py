"""Decoding's launch. Triton is imported in it."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch


def _forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, softmax_scale: float, window_left: int, window_right: int, softcap: float,
    k_scale: Tensor | None, v_scale: Tensor | None, share_prefixes: bool,
) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.decode import prefixes
    from attnzoo_kernels.decode.forward import launch_forward

    dispatch.choose("decode forward", "triton")
    if share_prefixes:
        return prefixes.launch_forward(q, k_cache, v_cache, cache_seqlens, block_table, sinks, softmax_scale, window_right, softcap,
                                       k_scale, v_scale)
    return launch_forward(q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks, softmax_scale, window_left, window_right,
                          softcap, k_scale, v_scale)


def _fake_forward(q, k_cache, v_cache, *_):
    lse = q.new_empty(autograd.lse_shape(q, False), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v_cache.shape[-1]), lse


forward = autograd.forward_only("decode_forward", _forward, _fake_forward)
