"""FP8 attention as plain functions in eager mode and custom operators under torch.compile. Triton is imported behind both."""

import torch
from torch import Tensor

from attnzoo_kernels import taken
from attnzoo_kernels.flash_fp8.layout import BLOCK, quantized_like


def forward_reason(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype) -> str | None:
    """Why the Gluon path does not take CUDA tensors; None if it does."""
    from attnzoo_kernels.flash.paths import gluon_loads

    if not gluon_loads():
        return "it does not work with the Triton that is installed"
    from attnzoo_kernels.flash_fp8 import forward

    return forward.forward_reason(q, k, v, softmax_scale, out_dtype)


def _forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype):
    reason = forward_reason(q, k, v, softmax_scale, out_dtype)
    if reason is not None:
        raise NotImplementedError(f'impl="gluon" does not take this call: {reason}; impl="reference" does')
    from attnzoo_kernels.flash_fp8.forward import launch_forward

    taken.note("flash_fp8 forward", "gluon")
    return launch_forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype)


@torch.library.custom_op("attnzoo::flash_fp8_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None, causal: bool,
    softmax_scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype)


@forward_op.register_fake
def _(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype):
    batch, seqlen_q, heads, _ = q.shape
    out = torch.empty(batch, seqlen_q, heads, v.shape[-1], dtype=out_dtype, device=q.device)
    return out, torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)


def forward(*inputs):
    """(out, lse) of `forward_op`'s arguments."""
    return forward_op(*inputs) if torch.compiler.is_compiling() else _forward(*inputs)


def _quantize(*inputs):
    from attnzoo_kernels.flash_fp8.quantize import launch_quantize

    return launch_quantize(*inputs)


@torch.library.custom_op("attnzoo::quantize_fp8", mutates_args=())
def quantize_op(x: Tensor, kv_heads: int, by_block: bool, rotate: bool, by_column: bool) -> tuple[Tensor, Tensor]:
    return _quantize(x, kv_heads, by_block, rotate, by_column)


@quantize_op.register_fake
def _(x, kv_heads, by_block, rotate, by_column):
    blocks = ((x.shape[1] + BLOCK - 1) // BLOCK,) if by_block else ()
    return quantized_like(x, by_column), torch.empty(x.shape[0], kv_heads, *blocks, dtype=torch.float32, device=x.device)


def quantize(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, by_block: bool, hadamard: bool) -> list[tuple[Tensor, Tensor]]:
    """(e4m3 values, scales) of queries, keys and values."""
    quantized = quantize_op if torch.compiler.is_compiling() else _quantize
    return [quantized(x, kv_heads, by_block, rotate, by_column)
            for x, rotate, by_column in ((q, hadamard, False), (k, hadamard, False), (v, False, True))]
