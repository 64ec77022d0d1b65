"""FlashAttention in FP8 (Shah et al. 2024, arXiv:2407.08608): a forward for inference on Hopper, at twice the matrix rate of bfloat16."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.flash_fp8 import ops
from attnzoo_kernels.flash_fp8.layout import BLOCK
from attnzoo_kernels.flash_fp8.reference import flash_fp8_reference, quantize_reference

__all__ = ["BLOCK", "Fp8Inputs", "flash_attention_fp8", "quantize_fp8", "why_not_gluon"]

IMPLEMENTATIONS = ("gluon", "reference")
FP8 = torch.float8_e4m3fn
NAMES = ("q", "k", "v")


class Fp8Inputs(NamedTuple):
    """What `quantize_fp8` makes, and `flash_attention_fp8(**inputs._asdict())` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def quantize_fp8(q: Tensor, k: Tensor, v: Tensor, *, block: int | None = None, hadamard: bool = False,
                 impl: str | None = None) -> Fp8Inputs:
    """Queries, keys and values in float8_e4m3fn, each scaled so that its largest magnitude becomes 448, e4m3's largest number.

    q: (batch, seqlen_q, heads, head_dim), k: (batch, seqlen_k, kv_heads, head_dim), v: (batch, seqlen_k, kv_heads, value_dim), of one dtype
    (float16, bfloat16 or float32), last dimension contiguous; kv_heads divides heads.
    block: None: one scale for each sequence and key head, which all query heads of the group share, float32 (batch, kv_heads).
        128: one scale for each 128 tokens of these, (batch, kv_heads, ceil(seqlen / 128)), so that an outlier does not reduce the precision
        of other blocks. Where all numbers that share a scale are below 2**-117, they become zeros with a scale of 1.
    hadamard: rotate q and k by one orthonormal matrix, a Hadamard matrix with random but fixed signs, which leaves q kᵀ as it is and
        spreads outliers over all columns; head_dim must be a power of two.

    Returns Fp8Inputs, for `flash_attention_fp8(**inputs._asdict())`: q, k, v with their shapes, and q_descale, k_descale, v_descale.
    A number is approximated by its e4m3 value times its scale. The Triton path stores the tokens of v one after the other (stride 1 along
    seqlen), as Hopper's matrix instructions need it, and gives q, k and v room for a multiple of 16 tokens. Inputs that are not finite give
    undefined results. Without gradients.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what is not supported.
    """
    _refuse_packed(q, k, v)
    checks.attention_inputs(q, k, v, None, None, None, None)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"q: must be float16, bfloat16 or float32, got {q.dtype}")
    if block not in (None, BLOCK):
        raise NotImplementedError(f"block: must be None (a scale for each key head) or {BLOCK} tokens, got {block!r}")
    checks.flag("hadamard", hadamard)
    head_dim = q.shape[-1]
    if hadamard and not 16 <= head_dim == 1 << head_dim.bit_length() - 1 <= 256:
        raise NotImplementedError(f"hadamard: needs a head_dim that is a power of two of 16 to 256, got {head_dim}")
    _refuse_empty(q, k, v)
    autograd.refuse_derivatives("FP8 attention", "use flash_attention", q=q, k=k, v=v)
    kv_heads, by_block = k.shape[2], block is not None
    if dispatch.takes_reference("quantize_fp8", impl, "q", q, ("triton", "reference")):
        quantized = [quantize_reference(x, kv_heads, by_block, rotate) for x, rotate in ((q, hadamard), (k, hadamard), (v, False))]
    else:
        quantized = ops.quantize(q, k, v, kv_heads, by_block, hadamard)
    return Fp8Inputs(*(x for x, _ in quantized), *(descale for _, descale in quantized))


def flash_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ) v of float8_e4m3fn queries, keys and values times their scales: `flash_attention` without gradients.

    q: (batch, seqlen_q, heads, head_dim), k: (batch, seqlen_k, kv_heads, head_dim), v: (batch, seqlen_k, kv_heads, value_dim), as
    `quantize_fp8` makes them; kv_heads divides heads, and query head h reads key head h // (heads // kv_heads).
    q_descale, k_descale, v_descale: float32, None for 1: (batch, kv_heads), or by blocks of 128 tokens (batch, kv_heads,
        ceil(seqlen / 128)); all of one kind. A scale that is not positive and finite makes its numbers NaN.
    causal: key j is seen by query i if j <= i + seqlen_k - seqlen_q (bottom right). A query that sees no key gives zeros and LSE -inf.
    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q).
    out_dtype: of the output: bfloat16 or float16 (the reference also gives float32).
    impl: "gluon" (Hopper: head_dim and value_dim equal, 48 to 128, multiples of 16) | "reference"; None takes gluon on CUDA tensors and the
        reference on CPU ones. A named path runs, or the call raises.

    The Gluon path rounds attention weights to e4m3 before the product with v. Its matrix instructions add up less exactly than float32
    does: over the head_dim products of q and k, and over 128 tokens of v at a time (docs/performance/flash_fp8.md has the errors). It
    copies v if its tokens do not follow each other in memory, and k if its memory ends before a multiple of 4 tokens.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks. No path
    has packed sequences, windows, softcap, ALiBi, sinks, dropout or gradients.
    """
    _refuse_packed(q, k, v)
    _check_shapes(q, k, v)
    descales = dict(zip(NAMES, (q_descale, k_descale, v_descale), strict=True))
    _check_descales(descales, dict(zip(NAMES, (q, k, v), strict=True)))
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"out_dtype: must be torch.bfloat16, torch.float16 or torch.float32, got {out_dtype}")
    autograd.refuse_derivatives("FP8 attention", "use flash_attention", q=q, k=k, v=v,
                                **{f"{name}_descale": x for name, x in descales.items()})
    checks.flag("causal", causal)
    checks.flag("return_lse", return_lse)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    if dispatch.takes_reference("flash_fp8", impl, "q", q, IMPLEMENTATIONS, dtypes=(FP8,)):
        out, lse = flash_fp8_reference(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, causal=causal,
                                       softmax_scale=softmax_scale)
        out = out.to(out_dtype)
    else:
        if softmax_scale <= 0:
            softmax_scale, wide = checks.positive_scale(softmax_scale, q.float())
            q = wide.to(FP8)
        out, lse = ops.forward(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, out_dtype)
    return (out, lse) if return_lse else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of flash_attention_fp8; None where it does."""
    return dispatch.why_not_gluon(flash_attention_fp8, q, k, v, **options)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in zip(NAMES, (q, k, v), strict=True):
        checks.tensor(name, x)
        if x.dtype != FP8:
            raise TypeError(f"{name}: must be float8_e4m3fn, got {x.dtype}; quantize_fp8 makes it")
        if x.dim() != 4:
            raise ValueError(f"{name}: must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")
        if name != "v" and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: last dimension must be contiguous, got stride {x.stride(-1)}; call .contiguous()")
    batch, seqlen_k, kv_heads, head_dim = k.shape
    if (batch, head_dim) != (q.shape[0], q.shape[-1]):
        raise ValueError(f"k: must have q's batch and head_dim {(q.shape[0], q.shape[-1])}, got {(batch, head_dim)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: must have k's batch, seqlen and heads {tuple(k.shape[:3])}, got {tuple(v.shape[:3])}")
    if kv_heads == 0 or q.shape[2] % kv_heads:
        raise ValueError(f"k: its {kv_heads} heads must divide q's {q.shape[2]}")
    _refuse_empty(q, k, v)


def _check_descales(descales: dict[str, Tensor | None], tensors: dict[str, Tensor]) -> None:
    kinds = {x.dim() for x in descales.values() if isinstance(x, Tensor)}
    if len(kinds) > 1:
        raise ValueError(f"q_descale, k_descale, v_descale: must be all by head or all by block, got {sorted(kinds)} dimensions")
    batch, _, kv_heads, _ = tensors["k"].shape
    for name, descale in descales.items():
        if descale is None:
            continue
        if not isinstance(descale, Tensor) or descale.dtype != torch.float32:
            raise TypeError(f"{name}_descale: must be a float32 tensor, got {getattr(descale, 'dtype', type(descale).__name__)}")
        shapes = [(batch, kv_heads), (batch, kv_heads, -(-tensors[name].shape[1] // BLOCK))]
        if tuple(descale.shape) not in shapes:
            raise ValueError(f"{name}_descale: must have shape {shapes[0]} or {shapes[1]}, got {tuple(descale.shape)}")
        if descale.device != tensors["q"].device or not descale.is_contiguous():
            raise ValueError(f"{name}_descale: must be contiguous and on q's device {tensors['q'].device}, got strides {descale.stride()} "
                             f"on {descale.device}")


def _refuse_packed(*tensors: Tensor) -> None:
    for name, x in zip(NAMES, tensors, strict=True):
        if isinstance(x, Tensor) and x.dim() == 3:
            raise NotImplementedError(f"{name}: FP8 has no packed sequences (total, heads, head_dim), got shape {tuple(x.shape)}; "
                                      "it must be (batch, seqlen, heads, head_dim)")


def _refuse_empty(*tensors: Tensor) -> None:
    for name, x in zip(NAMES, tensors, strict=True):
        if x.numel() == 0:
            raise ValueError(f"{name}: must have no empty dimension, got shape {tuple(x.shape)}")
