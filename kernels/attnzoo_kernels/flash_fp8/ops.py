"""FP8 attention's launches. Triton is imported in them."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.flash_fp8.layout import BLOCK, quantized_like


def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, causal: bool,
    softmax_scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    def why_not_gluon() -> str | None:
        from attnzoo_kernels.flash_fp8 import forward

        return forward.forward_reason(q, k, v, out_dtype)

    dispatch.choose("flash_fp8 forward", "gluon", why_not_gluon, 'impl="reference"')
    from attnzoo_kernels.flash_fp8.forward import launch_forward

    return launch_forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype)


def _fake_forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype):
    lse = q.new_empty(autograd.lse_shape(q, False), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype), lse


forward = autograd.forward_only("flash_fp8_forward", _forward, _fake_forward)


def _quantize(x: Tensor, kv_heads: int, by_block: bool, rotate: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    from attnzoo_kernels.flash_fp8.quantize import launch_quantize

    dispatch.note("quantize_fp8 forward", "triton")
    return launch_quantize(x, kv_heads, by_block, rotate, by_column)


def _fake_quantize(x, kv_heads, by_block, rotate, by_column):
    blocks = ((x.shape[1] + BLOCK - 1) // BLOCK,) if by_block else ()
    return quantized_like(x, by_column), torch.empty(x.shape[0], kv_heads, *blocks, dtype=torch.float32, device=x.device)


_quantized = autograd.forward_only("quantize_fp8", _quantize, _fake_quantize)


def quantize(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, by_block: bool, hadamard: bool) -> list[tuple[Tensor, Tensor]]:
    """(e4m3 values, scales) of queries, keys and values."""
    return [_quantized(x, kv_heads, by_block, rotate, by_column)
            for x, rotate, by_column in ((q, hadamard, False), (k, hadamard, False), (v, False, True))]
