"""MiniMax sparse attention: an indexer chooses blocks of keys for each key head, and learns from the attention over them (Lai et al. 2026,
arXiv:2606.13392)."""

import functools
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.msa import ops
from attnzoo_kernels.msa.cpu import choose_on_cpu
from attnzoo_kernels.msa.reference import msa_blocks_reference, msa_loss_reference
from attnzoo_kernels.routed import attend, choose_blocks
from attnzoo_kernels.routed.routes import Blocks, Routes


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    *,
    block_size: int,
    top_k: int | None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    return_blocks: bool = False,
    return_loss: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`routed_attention` over the blocks that `msa_blocks` chooses: softmax(softmax_scale * q kᵀ) v, causal, over top_k blocks of keys.

    index_q, index_k, block_size, top_k, and which blocks are chosen: as in `msa_blocks`. top_k=None: all keys before a query are read, as
    in the paper's warm-up, and nothing is chosen. Gradients of the output reach q, k and v; the choice has none.
    return_lse, and everything else: as in `routed_attention`. return_blocks: also return the blocks; for top_k=None there are 0 slots.
    return_loss: also return, behind these, the indexer's loss for each query and key head, float32 (batch, seqlen_q, kv_heads) or
        (total, kv_heads). With J the keys that a query reads, P_j the mean over the heads of a key head of their attention weights, and
        S = softmax(index_q · index_k / sqrt(width)) over J, it is the cross-entropy -sum_j P_j log S_j in nats. That is the paper's
        divergence KL(P || S) plus the entropy of P, which has no gradient, since P is held fixed. Gradients of the loss reach only index_q
        and index_k. The loss is 0 for a query that sees no key. It takes about as long as another attention. impl="gluon" names the kernels
        of the output alone: the loss has heads of other widths, and takes the kernels that None takes.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    checks.attention_inputs(q, k, v, **lengths)
    _check_index(index_q, index_k, block_size, 1 if top_k is None else top_k, lengths)
    checks.alike("index_q", index_q, "q", q, (*q.shape[:-2], k.shape[-2], index_q.shape[-1]))
    checks.alike("index_k", index_k, "k", k, (*k.shape[:-2], 1, index_q.shape[-1]))
    for name, flag in (("return_lse", return_lse), ("return_blocks", return_blocks), ("return_loss", return_loss)):
        checks.flag(name, flag)
    by_reference = impl == "reference" or impl is None and not q.is_cuda and q.dtype == torch.float64
    if not by_reference:
        autograd.refuse_tangents("msa_attention", 'impl="reference" takes it', q=q, k=k, v=v)
    # which implementation takes the call does not depend on the blocks
    blocks, layout = index_q.new_empty(*index_q.shape[:-1], 0, dtype=torch.int32), None
    if top_k is not None and not dispatch.asking():
        blocks, layout = _choose(index_q, index_k, block_size, top_k, impl, **lengths)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    kept: dict[tuple[int, int], Routes] = {}

    def read(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, impl: str | None = impl) -> tuple[Tensor, Tensor]:
        options = {"softmax_scale": softmax_scale, "deterministic": deterministic, "impl": impl, **lengths}
        if top_k is None:
            return flash_attention(q, k, v, causal=True, return_lse=True, **options)
        return attend(q, k, v, blocks, layout, kept, block_size=block_size, **options)

    out, lse = read(q, k, v, softmax_scale)
    results = [out, *[lse] * return_lse, *[blocks] * return_blocks]
    if return_loss:
        read_for_loss = functools.partial(read, impl=None if impl == "gluon" else impl)
        results.append(msa_loss_reference(q, k, index_q, index_k, None if top_k is None else blocks, block_size=block_size,
                                          softmax_scale=softmax_scale, **lengths) if by_reference or q.numel() == 0 else
                       _loss(q, k, index_q, index_k, softmax_scale, read_for_loss))
    return tuple(results) if len(results) > 1 else out


def msa_blocks(
    index_q: Tensor,
    index_k: Tensor,
    *,
    block_size: int,
    top_k: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """The blocks that each query reads beside its own, int32 (batch, seqlen_q, kv_heads, top_k - 1), packed (total, kv_heads, top_k - 1).

    index_q: (batch, seqlen_q, kv_heads, width) or (total, kv_heads, width), the indexer's queries. All query heads of a key head read the
        blocks that its index query chooses. index_k: (batch, seqlen_k, 1, width) or (total, 1, width), the indexer's keys, which all heads
        share. These, and cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k: as q, k and their lengths in `flash_attention`.
    block_size: tokens of a block, any number from 1 on. top_k: blocks that a query reads, its own included, from 1 on.
    A block's score is the largest index_q · index_k over its keys, in float32. Of the blocks before the query's own, the top_k - 1 with
    the best scores are chosen, in no particular order. Of equal scores the earlier block is chosen; a block in which any score is NaN never
    is. If there are fewer blocks, the rest is -1. The result has no gradient.
    impl: "gluon" | "triton" | "cpu" | "reference". The first two share one kernel, which stores no score; "cpu" works by tiles of queries.
        Paths may order scores differently that differ by less than rounding.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    _check_index(index_q, index_k, block_size, top_k, lengths)
    return _choose(index_q, index_k, block_size, top_k, impl, **lengths)[0]


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of msa_attention; None where it does."""
    return dispatch.why_not_gluon(msa_attention, q, k, v, index_q, index_k, **options)


def _check_index(index_q: Tensor, index_k: Tensor, block_size: int, top_k: int, lengths: dict[str, Any]) -> None:
    checks.attention_inputs(index_q, index_k, index_k, **lengths, names=("index_q", "index_k", "index_k"))
    if index_k.shape[-2] != 1:
        raise ValueError(f"index_k: must have one head, got {index_k.shape[-2]}")
    checks.integer("block_size", block_size, 1)
    checks.integer("top_k", top_k, 1)


def _choose(q: Tensor, k: Tensor, block_size: int, top_k: int, impl: str | None, **lengths: Any) -> tuple[Tensor, Blocks | None]:
    """The blocks that msa_blocks chooses, and, for the kernels, the layout of all blocks."""
    def launch(q: Tensor, k: Tensor, layout: Blocks) -> Tensor:
        return ops.choose(q, k, layout.cu_seqlens_q, layout.cu_seqlens_k, block_size, top_k - 1)

    return choose_blocks("msa_blocks", q, k, block_size, top_k - 1, impl, msa_blocks_reference, choose_on_cpu, launch,
                         names=("index_q", "index_k"), **lengths)


def _loss(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, softmax_scale: float, read: Any) -> Tensor:
    """The cross-entropy -sum_j P_j log S_j, from two attentions over the same keys. The first is the indexer's; only its log-sum-exp is
    used. The second is the main attention, held fixed, with the indexer's keys as values. The result is the first one's log-sum-exp minus
    the index query times the second one's output."""
    kv_heads, width = index_q.shape[-2:]
    _, lse = read(index_q, index_k, index_k[..., :1].detach(), width**-0.5)
    values = index_k.expand(*index_k.shape[:-2], kv_heads, width).contiguous()
    expected, _ = read(q.detach(), k.detach(), values, softmax_scale)
    wide = torch.promote_types(index_q.dtype, torch.float32)
    expected = expected.to(wide).unflatten(-2, (kv_heads, -1)).mean(-2)
    lse = lse.mT
    return torch.where(lse > -torch.inf, lse - width**-0.5 * (index_q.to(wide) * expected).sum(-1), 0.0)
