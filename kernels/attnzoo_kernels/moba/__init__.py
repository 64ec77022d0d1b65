"""Mixture of block attention: each query and head reads its own block of keys and the best-scored earlier blocks (Lu et al. 2025,
arXiv:2502.13189)."""

import functools
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.moba import ops
from attnzoo_kernels.moba.cpu import choose_on_cpu
from attnzoo_kernels.moba.reference import moba_blocks_reference
from attnzoo_kernels.routed import attend, choose_blocks
from attnzoo_kernels.routed.routes import Blocks


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    top_k: int,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_means: Tensor | None = None,
    block_starts: Tensor | None = None,
    return_lse: bool = False,
    return_blocks: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`routed_attention` over the blocks that `moba_blocks` chooses: softmax(softmax_scale * q kᵀ) v, causal, over top_k blocks of keys.

    block_size, top_k, block_means, block_starts, and which blocks are chosen: as in `moba_blocks`. Gradients reach q, k and v through the
    attention only, as in the paper: the choice has none. return_blocks: also return the blocks, after the LSE. Everything else is as in
    `routed_attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, v, **lengths)
    _check_sizes(block_size, top_k)
    means = _means(block_means, block_starts, k, cu_seqlens_k)
    checks.flag("return_lse", return_lse)
    checks.flag("return_blocks", return_blocks)
    # which implementation takes the call does not depend on the blocks
    blocks, layout = (q.new_empty(*q.shape[:-1], 0, dtype=torch.int32), None) if dispatch.asking() else _choose(
        q, k, block_size, top_k, impl, means, **lengths)
    out, lse = attend(q, k, v, blocks, layout, block_size=block_size, softmax_scale=softmax_scale, deterministic=deterministic, impl=impl,
                      **lengths)
    results = out, *[lse] * return_lse, *[blocks] * return_blocks
    return results if len(results) > 1 else out


def moba_blocks(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int,
    top_k: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_means: Tensor | None = None,
    block_starts: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The blocks that each query reads beside its own, int32 (batch, seqlen_q, heads, top_k - 1), packed (total, heads, top_k - 1).

    q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k: as `flash_attention` has them.
    block_size: tokens of a block, any number from 1 on. top_k: blocks that a query reads, its own included, from 1 on.
    A block's score is q times the mean of its keys, in float32, for each query head, even if heads share keys, as in the paper's code. Of
    the blocks before the query's own, the top_k - 1 with the best scores are chosen, in no particular order. Of equal scores the earlier
    block is chosen; one whose score is NaN never is. If there are fewer blocks, the rest is -1. The result has no gradient.
    block_means: the means of the blocks' keys, if they are known, as of a cache. They are not computed then. float32 (float64 for k in
        float64), (batch, blocks, kv_heads, head_dim) or packed (total_blocks, kv_heads, head_dim), at least of the blocks before each
        query's own. block_starts: packed only, int32 (sequences,): the index of each sequence's first block in block_means. Values are not
        checked.
    impl: "gluon" | "triton" | "cpu" | "reference". The first two share one kernel; "cpu" works by tiles of queries. Paths may order scores
        differently that differ by less than rounding.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, k, **lengths)
    _check_sizes(block_size, top_k)
    return _choose(q, k, block_size, top_k, impl, _means(block_means, block_starts, k, cu_seqlens_k), **lengths)[0]


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of moba_attention; None where it does."""
    return dispatch.why_not_gluon(moba_attention, q, k, v, **options)


def _check_sizes(block_size: int, top_k: int) -> None:
    checks.integer("block_size", block_size, 1)
    checks.integer("top_k", top_k, 1)


def _means(means: Tensor | None, starts: Tensor | None, k: Tensor, cu_seqlens_k: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """block_means as (blocks of all sequences, kv_heads, head_dim), and block_starts, also of dense sequences; None if not given."""
    if means is None:
        if starts is not None:
            raise ValueError(f"block_starts: must be None without block_means, got a tensor of shape {tuple(starts.shape)}")
        return None, None
    checks.tensor("block_means", means)
    wide = torch.promote_types(k.dtype, torch.float32)
    if means.dtype != wide or means.device != k.device:
        raise TypeError(f"block_means: must be {wide} on {k.device}, got {means.dtype} on {means.device}")
    if means.dim() != k.dim() or means.shape[-2:] != k.shape[-2:] or means.dim() == 4 and means.shape[0] != k.shape[0]:
        raise ValueError(f"block_means: must be as k, {tuple(k.shape)}, but with blocks in place of tokens, got {tuple(means.shape)}")
    if means.dim() == 4:
        if starts is not None:
            raise ValueError(f"block_starts: must be None for dense sequences, got a tensor of shape {tuple(starts.shape)}")
        starts = torch.arange(means.shape[0], dtype=torch.int32, device=means.device) * means.shape[1]
    elif starts is None:
        raise ValueError("block_starts: must be a tensor for packed sequences with block_means, got None")
    else:
        checks.whole_numbers("block_starts", starts, k, (cu_seqlens_k.shape[0] - 1,), "k")
    return means.detach().flatten(0, -3), starts


def _choose(q: Tensor, k: Tensor, block_size: int, top_k: int, impl: str | None, means: tuple[Tensor | None, Tensor | None],
            **lengths: Any) -> tuple[Tensor, Blocks | None]:
    """The blocks that moba_blocks chooses, and, for the kernels, the layout of all blocks."""
    given, starts = means

    def launch(q: Tensor, k: Tensor, layout: Blocks) -> Tensor:
        return ops.choose(q, k, layout.cu_seqlens_q, layout.cu_seqlens_k, layout.first if starts is None else starts, layout.bounds_k,
                          block_size, top_k - 1, given)

    def on_cpus(*inputs: Any) -> Tensor:
        return choose_on_cpu(*inputs, given, starts)

    reference = functools.partial(moba_blocks_reference, means=given, starts=starts)
    return choose_blocks("moba_blocks", q, k, block_size, top_k - 1, impl, reference, on_cpus, launch, **lengths)
