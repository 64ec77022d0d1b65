"""Mixture of block attention: each query and head reads its own block of keys and the best-scored earlier blocks (Lu et al. 2025,
arXiv:2502.13189)."""

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
    return_lse: bool = False,
    return_blocks: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`routed_attention` over the blocks that `moba_blocks` chooses: softmax(softmax_scale * q kᵀ) v, causal, over top_k blocks of keys.

    block_size, top_k, and which blocks are chosen: as in `moba_blocks`. Gradients reach q, k and v through the attention only, as in the
    paper: the choice has none. return_blocks: also return the blocks, after the LSE. Everything else is as in `routed_attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, v, **lengths)
    _check_sizes(block_size, top_k)
    checks.flag("return_lse", return_lse)
    checks.flag("return_blocks", return_blocks)
    # which implementation takes the call does not depend on the blocks
    blocks, layout = (q.new_empty(*q.shape[:-1], 0, dtype=torch.int32), None) if dispatch.asking() else _choose(
        q, k, block_size, top_k, impl, **lengths)
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
    impl: str | None = None,
) -> Tensor:
    """The blocks that each query reads beside its own, int32 (batch, seqlen_q, heads, top_k - 1), packed (total, heads, top_k - 1).

    q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k: as `flash_attention` has them.
    block_size: tokens of a block, any number from 1 on. top_k: blocks that a query reads, its own included, from 1 on.
    A block's score is q times the mean of its keys, in float32, for each query head, even if heads share keys, as in the paper's code. Of
    the blocks before the query's own, the top_k - 1 with the best scores are chosen, in no particular order. Of equal scores the earlier
    block is chosen; one whose score is NaN never is. If there are fewer blocks, the rest is -1. The result has no gradient.
    impl: "gluon" | "triton" | "cpu" | "reference". The first two share one kernel; "cpu" works by tiles of queries. Paths may order scores
        differently that differ by less than rounding.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, k, **lengths)
    _check_sizes(block_size, top_k)
    return _choose(q, k, block_size, top_k, impl, **lengths)[0]


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of moba_attention; None where it does."""
    return dispatch.why_not_gluon(moba_attention, q, k, v, **options)


def _check_sizes(block_size: int, top_k: int) -> None:
    checks.integer("block_size", block_size, 1)
    checks.integer("top_k", top_k, 1)


def _choose(q: Tensor, k: Tensor, block_size: int, top_k: int, impl: str | None, **lengths: Any) -> tuple[Tensor, Blocks | None]:
    """The blocks that moba_blocks chooses, and, for the kernels, the layout of all blocks."""
    def launch(q: Tensor, k: Tensor, layout: Blocks) -> Tensor:
        return ops.choose(q, k, layout.cu_seqlens_q, layout.cu_seqlens_k, layout.first, layout.bounds_k,
                          block_size, top_k - 1)

    return choose_blocks("moba_blocks", q, k, block_size, top_k - 1, impl, moba_blocks_reference, choose_on_cpu, launch, **lengths)
