"""Native sparse attention: the gated sum of attention over compressed keys, over blocks that these select, and over a window (Yuan et al.
2025, arXiv:2502.11089)."""

from typing import Any

from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.nsa import ops
from attnzoo_kernels.nsa.bounds import compressed_bounds
from attnzoo_kernels.nsa.cpu import attend_compressed_on_cpu, choose_on_cpu
from attnzoo_kernels.nsa.fold import Fold
from attnzoo_kernels.nsa.reference import nsa_attention_reference
from attnzoo_kernels.routed import are_newest, check_blocks, routed_attention
from attnzoo_kernels.routed.routes import even_bounds

__all__ = ["compressed_bounds", "nsa_attention", "why_not_gluon"]

LONGEST = 2**30  # keys of a page that holds all compressed keys of a sequence


def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    gates: Tensor,
    *,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    block_count: int = 16,
    window: int = 512,
    blocks: Tensor | None = None,
    return_blocks: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """gates[..., 0] * compressed + gates[..., 1] * selected + gates[..., 2] * window, three causal softmax attentions of the same queries.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, and grouped heads of any size: as `flash_attention` has them.
    Query i stands at position t = i + seqlen_k - seqlen_q.

    compressed: over k_cmp and v_cmp (batch, compressed, kv_heads, width), packed (total_k // compress_stride, kv_heads, width), whose
        cu_seqlens `compressed_bounds` gives. Compressed key c stands for the tokens c * compress_stride .. + compress_size of its sequence.
        A query sees it if the last of these tokens is at most t. compressed = max(0, (seqlen_k - compress_size) // compress_stride + 1).
        compress_stride divides compress_size and block_size.
    selected: over k and v, by `routed_attention`, in block_count blocks of block_size tokens: the query's own, the sequence's first, the
        one before its own, and of the others those with the largest weights, in this order. A block's weight is the sum of the attention
        weights of the compressed keys, over all query heads of a key head, each times the tokens that it shares with the block. Of equal
        blocks the earlier is taken; one whose weight is NaN never is. The choice has no gradient.
    window: over the last `window` tokens of k_window and v_window, t's own included. If these are None, k and v are used.
    gates: (..., heads, 3), with the leading dimensions and the dtype of q; with gradient.
    A branch without a key gives zeros.

    blocks: blocks to read in place of chosen ones, as in `routed_attention`, for each key or query head. return_blocks: also return those
        that were read, int32 (batch, seqlen_q, kv_heads, block_count - 1) or (total, kv_heads, block_count - 1).
    softmax_scale: any finite number; default head_dim ** -0.5.
    deterministic: as in `flash_attention`.
    impl: "gluon" | "triton" | "cpu" | "reference", of the products. None takes what flash_attention takes on CUDA tensors, and cpu on
        CPU ones.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    packed = checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_sizes(compress_size, compress_stride, block_size, block_count, window)
    kept = max(0, (k.shape[1] - compress_size) // compress_stride + 1) if not packed else k.shape[0] // compress_stride
    rows = (kept,) if packed else (k.shape[0], kept)
    for name, x, like in (("k_cmp", k_cmp, k), ("v_cmp", v_cmp, v)):
        checks.alike(name, x, "q", q, (*rows, *like.shape[-2:]))
    checks.alike("gates", gates, "q", q, (*q.shape[:-1], 3), contiguous=False)
    k_window, v_window = k if k_window is None else k_window, v if v_window is None else v_window
    checks.alike("k_window", k_window, "k", k)
    checks.alike("v_window", v_window, "v", v)
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_blocks", return_blocks)
    if blocks is not None:
        check_blocks(blocks, q, k)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    sizes = {"compress_size": compress_size, "compress_stride": compress_stride, "block_size": block_size}
    on_cpu = dispatch.takes_cpu(impl, "q", q)
    if not on_cpu and dispatch.takes_reference("nsa", impl, "q", q) or q.numel() == 0:
        out, blocks = nsa_attention_reference(
            q, k, v, k_cmp, v_cmp, gates, blocks, k_window=k_window, v_window=v_window, block_count=block_count, window=window,
            softmax_scale=softmax_scale, **sizes, **lengths)
        return (out, blocks) if return_blocks else out

    softmax_scale, q = checks.positive_scale(softmax_scale, q)
    options = {"softmax_scale": softmax_scale, "deterministic": deterministic, "impl": impl}
    near = flash_attention(q, k_window, v_window, causal=True, window_size=(window - 1, 0), **options, **lengths)
    shape = q.shape[:-2]
    if not packed:
        cu_seqlens_q, cu_seqlens_k = even_bounds(q), even_bounds(k)
    q_rows, k_cmp, v_cmp = (x if packed else x.flatten(0, 1) for x in (q, k_cmp, v_cmp))
    kv_heads = k.shape[-2]
    if on_cpu:
        bounds = compressed_bounds(cu_seqlens_k, compress_size, compress_stride)
        compressed = attend_compressed_on_cpu(q_rows, k_cmp, v_cmp, cu_seqlens_q, cu_seqlens_k, bounds, compress_size, compress_stride,
                                              softmax_scale)
    else:
        fold = Fold.of(cu_seqlens_q, cu_seqlens_k, q_rows.shape[0], compress_size, compress_stride)
        bounds = fold.bounds
        if are_newest(q_rows, k_cmp, v_cmp, 0, LONGEST, max_seqlen_q if packed else q.shape[1], impl):
            from attnzoo_kernels.routed import decode

            compressed, lse = decode.attend(q_rows, k_cmp, v_cmp, None, cu_seqlens_q, cu_seqlens_k, LONGEST, softmax_scale, bounds,
                                            compress_size, compress_stride)
            fold = fold.unfolded()
        else:
            compressed, lse = flash_attention(fold.fold(q_rows, kv_heads), k_cmp, v_cmp, causal=True, cu_seqlens_q=fold.cu_seqlens_q,
                                              cu_seqlens_k=bounds, return_lse=True, **options)
            lse = fold.unfold_lse(lse.detach(), kv_heads) if blocks is None else None
    if blocks is None:
        autograd.refuse_tangents("nsa_attention", 'impl="reference" takes it', q=q, k_cmp=k_cmp)
        given = cu_seqlens_q, cu_seqlens_k, bounds, *sizes.values(), block_count - 1, softmax_scale
        if on_cpu:
            blocks = choose_on_cpu(q_rows.detach(), k_cmp.detach(), *given)
        else:
            blocks = ops.choose(q_rows.detach(), k_cmp.detach(), lse, *given)
        blocks = blocks.unflatten(0, shape)
    selected = routed_attention(q, k, v, blocks, block_size=block_size, **options, **lengths)
    if on_cpu:
        out = gates[..., :1] * compressed.unflatten(0, shape) + gates[..., 1:2] * selected + gates[..., 2:] * near
    else:
        selected, near, gates = (x.flatten(0, -3) for x in (selected, near, gates))
        out = fold.combine(compressed, selected, near, gates, kv_heads).unflatten(0, shape)
    return (out, blocks) if return_blocks else out


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of nsa_attention; None where it does."""
    return dispatch.why_not_gluon(nsa_attention, q, k, v, k_cmp, v_cmp, gates, **options)


def _check_sizes(compress_size: int, compress_stride: int, block_size: int, block_count: int, window: int) -> None:
    for name, value in (("compress_size", compress_size), ("compress_stride", compress_stride), ("block_size", block_size),
                        ("block_count", block_count), ("window", window)):
        checks.integer(name, value, 1)
    for name, value in (("compress_size", compress_size), ("block_size", block_size)):
        if value % compress_stride:
            raise ValueError(f"{name}: must be a multiple of compress_stride={compress_stride}, got {value}")
