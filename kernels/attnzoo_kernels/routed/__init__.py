"""Routed attention: each query reads its own block of keys and other blocks that were chosen for it (MoBA, arXiv:2502.13189; NSA,
2502.11089)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.routed import ops
from attnzoo_kernels.routed.cpu import routed_attention_cpu
from attnzoo_kernels.routed.reference import routed_attention_reference
from attnzoo_kernels.routed.routes import Blocks, Routes, even_bounds, routes

MOST_PARTS = 2**31  # of the output; the kernels number them in 32 bits


def routed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    block_size: int,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ) v, causal, over the keys of a query's own block and of the earlier blocks chosen for it.

    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, and grouped heads: as `flash_attention` has them. Query i's own
    key is i + seqlen_k - seqlen_q (bottom right).

    block_size: tokens of a block, at least 1. Block b of a sequence has the sequence's keys b * block_size .. (b + 1) * block_size.
    blocks: int32 (batch, seqlen_q, choosers, slots), packed (total, choosers, slots): numbers of blocks in each query's sequence. choosers
        is the number of query heads or of key heads; in the second case all query heads of a key head share their blocks. A number below
        0, or not below that of the query's own block, stands for no block. No block may be listed twice for a query; this is not checked.
        slots may be 0.
    Causal, blocks of 2, with the chosen block of each query on the left:
        -      1 . . . . .
        -      1 1 . . . .
        -      . . 1 . . .
        0      1 1 1 1 . .
        1      . . 1 1 1 .
        0      1 1 . . 1 1
    A query that sees no key gives zeros and LSE -inf, and finite gradients. blocks have no gradient.

    The kernels compute at most seqlen * (slots + 1) * block_size scores, whichever blocks are chosen. Their scratch memory grows with
    seqlen * slots: queries are gathered block by block (arXiv:2508.18224), and the partial results are merged by their LSE. For the
    backward no more is kept than by flash_attention. The host does not wait for the device.
    Calls without gradients, outside of torch.compile, with at most 16 queries a sequence (max_seqlen_q where packed) take the kernels of
    decode_attention, unless impl="gluon", and unless k and v are laid out otherwise than each other: these read a query's blocks in place.

    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q) or (heads, total), differentiable.
    deterministic: as in flash_attention.
    impl: "gluon" | "triton" | "cpu" | "reference". The first two name the kernels of the products. Own blocks are packed sequences for
        flash_attention's kernels. Chosen blocks have kernels of their own in 16 bits, where block_size and both widths are at most 128 (on
        GPUs other than Hopper's and sm_100's, also block_size or both widths at most 64). These are Hopper's for widths of 64 and 128 and a
        block_size of 64, or of 128 in the forward, and else plain Triton's, for "gluon", too. Other chosen blocks are packed sequences as
        well. Gathering for these and merging are always plain Triton. None takes what flash_attention takes on CUDA tensors, but triton
        for the backward of own blocks where chosen ones have kernels of their own, and cpu on CPU tensors. "cpu" is PyTorch's attention by
        blocks, in linear memory, with first derivatives only; in float32 it computes the scores of all keys before a query.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, v, **lengths)
    checks.integer("block_size", block_size, 1)
    check_blocks(blocks, q, k)
    checks.flag("return_lse", return_lse)
    out, lse = attend(q, k, v, blocks, None, block_size=block_size, softmax_scale=softmax_scale, deterministic=deterministic, impl=impl,
                      **lengths)
    return (out, lse) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, layout: Blocks | None, kept: dict[tuple[int, int], Routes] | None = None, *,
           block_size: int, softmax_scale: float | None, deterministic: bool | None, impl: str | None,
           **lengths: Any) -> tuple[Tensor, Tensor]:
    """routed_attention's output and LSE. layout: the call's Blocks, if they were made already. kept: where to keep the routes of these
    blocks, by (heads, key heads), for other calls with the same blocks."""
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    if dispatch.takes_cpu(impl, "q", q):
        return routed_attention_cpu(q, k, v, blocks, block_size=block_size, softmax_scale=softmax_scale,
                                    cu_seqlens_q=lengths["cu_seqlens_q"], cu_seqlens_k=lengths["cu_seqlens_k"])
    if dispatch.takes_reference("routed", impl, "q", q) or q.numel() == 0:
        return routed_attention_reference(q, k, v, blocks, block_size=block_size, softmax_scale=softmax_scale, **lengths)

    autograd.refuse_wrapped("routed_attention", q, k, v, blocks)
    softmax_scale, q = checks.positive_scale(softmax_scale, q)
    queries = q.shape[1] if lengths["cu_seqlens_q"] is None else lengths["max_seqlen_q"]
    if are_newest(q, k, v, blocks.shape[-1], block_size, queries, impl):
        from attnzoo_kernels.routed import decode

        return decode.attend(q, k, v, blocks, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], block_size, softmax_scale)
    shape = q.shape[:-2]
    if shape.numel() * q.shape[-2] * blocks.shape[-1] >= MOST_PARTS:
        raise NotImplementedError(f"blocks: queries times heads times slots must be less than {MOST_PARTS} for the kernels, got "
                                  f"{shape.numel()} times {q.shape[-2]} times {blocks.shape[-1]}")
    layout = layout or Blocks.of(q, k, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], block_size)
    q, k, v, blocks = (x.flatten(0, -3) for x in (q, k, v, blocks))
    if blocks.shape[-1]:
        kept, heads = {} if kept is None else kept, (q.shape[1], k.shape[1])
        if heads not in kept:
            kept[heads] = routes(blocks, layout, *heads, k.shape[0])
        route = kept[heads]
        out, lse, _ = ops.forward(q, k, v, route.place, route.pair, layout.bounds_q, layout.bounds_k, route.cu_seqlens_q,
                                  route.cu_seqlens_k, route.rows, layout.size, impl, deterministic, softmax_scale)
    else:
        out, lse = flash_attention(q, k, v, causal=True, softmax_scale=softmax_scale, cu_seqlens_q=layout.bounds_q,
                                   cu_seqlens_k=layout.bounds_k, return_lse=True, deterministic=deterministic, impl=impl)
    if len(shape) == 2:
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return out, lse


def are_newest(q: Tensor, k: Tensor, v: Tensor, slots: int, block_size: int, queries: int | None, impl: str | None) -> bool:
    """Whether decode's kernels compute a call: the kernels' path, with few queries a sequence and without gradients."""
    if impl == "gluon" or autograd.compiling():
        return False
    from attnzoo_kernels.routed import decode

    return decode.takes(q, k, v, slots, block_size, queries)


def choose_blocks(name: str, q: Tensor, k: Tensor, block_size: int, slots: int, impl: str | None, reference: Callable[..., Tensor],
                  on_cpus: Callable[..., Tensor], launch: Callable[[Tensor, Tensor, Blocks], Tensor], names: tuple[str, str] = ("q", "k"),
                  **lengths: Any) -> tuple[Tensor, Blocks | None]:
    """The blocks that the operator `name` chooses from its q and k, which it calls `names`, and, for the kernels, the layout of all blocks.
    on_cpus and launch take all sequences packed."""
    on_cpu = dispatch.takes_cpu(impl, names[0], q)
    if not on_cpu and dispatch.takes_reference(name, impl, names[0], q) or q.numel() == 0:
        return reference(q, k, block_size=block_size, slots=slots, **lengths), None
    autograd.refuse_tangents(name, 'impl="reference" takes it', **dict(zip(names, (q, k), strict=True)))
    rows, layout = [x.detach().flatten(0, -3) for x in (q, k)], None
    if on_cpu:
        bounds = (even_bounds(x) if own is None else own for x, own in ((q, lengths["cu_seqlens_q"]), (k, lengths["cu_seqlens_k"])))
        blocks = on_cpus(*rows, *bounds, block_size, slots)
    else:
        autograd.refuse_wrapped(name, q, k)
        layout = Blocks.of(q, k, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], block_size)
        blocks = launch(*rows, layout)
    return blocks.unflatten(0, q.shape[:-2]), layout


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of routed_attention; None where it does."""
    return dispatch.why_not_gluon(routed_attention, q, k, v, blocks, **options)


def check_blocks(blocks: Tensor, q: Tensor, k: Tensor) -> None:
    checks.tensor("blocks", blocks, "an int32 tensor")
    shapes = [(*q.shape[:-2], choosers) for choosers in sorted({q.shape[-2], k.shape[-2]})]
    if blocks.dim() != q.dim() or tuple(blocks.shape[:-1]) not in shapes:
        raise ValueError(f"blocks: must have shape {' or '.join(map(str, shapes))} and slots, got {tuple(blocks.shape)}")
    if blocks.dtype != torch.int32:
        raise TypeError(f"blocks: must be int32, got {blocks.dtype}")
    if blocks.device != q.device:
        raise ValueError(f"blocks: must be on q's device {q.device}, got {blocks.device}")
