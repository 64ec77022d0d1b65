"""ring-flash-attention's zigzag (Zhu 2024, github.com/zhuzilin/ring-flash-attention) over the FlashAttention-2 that PyTorch brings.

The package imports flash_attn, which has no wheel for every PyTorch. `zigzag` gives it a stand-in of flash_attn.flash_attn_interface with
the two functions that it calls, of the signatures of flash_attn 2.7 and later.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import Unsupported


def _flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
                        window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
                        return_softmax: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (batch, tokens, heads, width); returns the output, lse (batch, heads, queries) in float32, and two that are not looked at."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, return_softmax, scale=softmax_scale)
    return out, lse, unused, rng_state


def _flash_attn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
                         dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
                         softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None) -> None:
    """Writes dq, dk and dv. The operator makes its own, so that they are copied."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    state = torch.empty(0, dtype=torch.uint64, device=q.device)  # read with dropout only
    found = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], dropout_p, causal, state, state, scale=softmax_scale)
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        target.copy_(gradient)


def _refuse(dropout_p: float, window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or window_size != (-1, -1) or softcap or alibi_slopes is not None:
        raise Unsupported(f"cannot do: dropout, window, softcap or alibi, got {dropout_p}, {window_size}, {softcap}, {alibi_slopes}")


@functools.cache
def zigzag() -> Callable[..., Tensor]:
    """zigzag_ring_flash_attn_func(q, k, v, causal=True) of (batch, the rank's tokens, heads, width), float16 or bfloat16.

    In float32 its gradients would be wrong, because its sums then share memory with its buffers.
    """
    if (spec := importlib.util.find_spec("ring_flash_attn")) is None:
        raise Unsupported("the package ring-flash-attn is not installed")
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    # without its __init__, which imports adapters to other packages
    package = types.ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations)
    stand_ins = {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.flash_attn_interface": interface, "ring_flash_attn": package}
    with mock.patch.dict(sys.modules, stand_ins):
        from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func
    return zigzag_ring_flash_attn_func
