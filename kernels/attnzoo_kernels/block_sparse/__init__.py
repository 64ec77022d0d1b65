"""Block-sparse FlashAttention: exact attention over the kept blocks of a layout (Dao et al. 2022, arXiv:2205.14135, section 3.3)."""

import functools
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.block_sparse import last_queries, ops
from attnzoo_kernels.block_sparse.cpu import block_sparse_attention_cpu
from attnzoo_kernels.block_sparse.layout import BlockLayout
from attnzoo_kernels.block_sparse.patterns import Pattern
from attnzoo_kernels.block_sparse.reference import block_sparse_attention_reference


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | Pattern,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ) v over the blocks that the layout keeps. Time and memory traffic grow with their number.

    Dense: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, kv_heads, head_dim), v (batch, seqlen_k, kv_heads, value_dim).
    Packed: the same without batch, (total, heads, head_dim), with cu_seqlens_q, cu_seqlens_k (int32, sequences + 1, may repeat the last
    value as padding; tokens behind it give zeros) and max_seqlen_q, max_seqlen_k (ints, at least the longest sequence: they determine
    the layout's size).
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free.
    head_dim and value_dim up to 256. kv_heads divides heads; query head h reads key head h // (heads // kv_heads).

    layout: a BlockLayout of ceil(seqlen / block) blocks on each side, one for all sequences and (query) heads or one for each of them.
        Where packed, it covers max_seqlen, and blocks count from each sequence's first token. It is on q's device and can be used in many
        calls; what the kernels need of it is made in the first call. Or a Pattern, which stands for its layout for seqlen_k tokens. With a
        Pattern, fewer queries than keys are the last tokens, as with a cache. Packed, only the first sequence that has queries may have
        fewer queries than keys, as in `context_parallel`. On a GPU this is not checked, because the host would have to wait.
    Query i sees key j if the layout keeps block (i // block_q, j // block_k) and the element masks do not forbid it:
      causal         j <= i + seqlen_k - seqlen_q (bottom right). Blocks above this diagonal may be kept or not: they change nothing.
      window_size    (left, right), inclusive around i + seqlen_k - seqlen_q, -1 is unlimited; causal sets right to 0.
    Causal, blocks of 2, kept blocks x and dropped blocks o:
        x o o      1 . . . . .
                   1 1 . . . .
        o x o      . . 1 . . .
                   . . 1 1 . .
        x o x      1 1 . . 1 .
                   1 1 . . 1 1
    A query that sees no key gives zeros and LSE -inf, and finite gradients.

    softmax_scale: any finite number; default head_dim ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q) or (heads, total), differentiable.
    deterministic: True: repeated runs give the same bits. False: the Gluon backward adds up dQ in any order. None follows
        torch.are_deterministic_algorithms_enabled(). The forward, and both passes of plain Triton, always repeat bit by bit.
    impl: "gluon" | "triton" | "cpu" | "reference". "gluon" (Hopper: 16 bits, not packed, head_dim and value_dim 33 to 128, blocks of at
        least 64 tokens). What its backward does not take, such as deterministic=True and blocks of 64 keys, plain Triton's does. None
        takes, on CUDA tensors, gluon if it supports the call, else triton; on CPU ones cpu. "cpu" is PyTorch's attention (fused in 16
        bits) over the keys that a tile of queries keeps, in linear memory, with first derivatives only. A named path runs, or the call
        raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    packed = checks.attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    on_cpu = dispatch.takes_cpu(impl, "q", q)
    by_reference = not on_cpu and dispatch.takes_reference("block_sparse", impl, "q", q)
    window = checks.window(window_size, causal)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])
    deterministic = checks.deterministic(deterministic)
    checks.flag("return_lse", return_lse)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)) if packed else ():
        if value is None:
            raise ValueError(f"{name}: must be an int of at least the longest sequence, which tells the layout's size, got None")

    call = functools.partial(_call, impl=impl, on_cpu=on_cpu, by_reference=by_reference, deterministic=deterministic,
                             softmax_scale=softmax_scale, window=window)
    ahead = 0
    if not isinstance(layout, Pattern):
        batch, len_q, len_k = (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k) if packed else (q.shape[0], q.shape[1], k.shape[1])
        _check_layout(layout, q, batch, len_q, len_k, packed)
    elif layout.heads not in (1, q.shape[-2]):
        raise ValueError(f"layout: its heads must be 1 or q's {q.shape[-2]}, got {layout.heads}")
    elif packed and cu_seqlens_q is not cu_seqlens_k and cu_seqlens_q.shape[0] > 1:
        call = functools.partial(last_queries.attend, call)
    elif not packed:
        ahead = _queries_before(q, k, layout)
        if ahead:
            # pad q at the front, so that the queries begin at a block's first token
            q = torch.nn.functional.pad(q, (0, 0, 0, 0, ahead, 0))
    out, lse = call(q, k, v, layout, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if ahead:
        out, lse = out[:, ahead:], lse[..., ahead:]
    return (out, lse) if return_lse else out


def _call(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | Pattern, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
          max_seqlen_q: int | None, max_seqlen_k: int | None, *, impl: str | None, on_cpu: bool, by_reference: bool, deterministic: bool,
          softmax_scale: float, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Output and LSE of checked arguments."""
    len_q, len_k = (q.shape[1], k.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, max_seqlen_k)
    if isinstance(layout, Pattern):
        if cu_seqlens_q is not None:
            len_q = len_k = max(len_q, len_k)  # both are bounds on the lengths of the same sequences
        block_q = block_k = layout.block
        q_blocks, k_blocks = -(-len_q // block_q), -(-len_k // block_k)
        mask, pattern = None, layout.key
    else:
        mask, pattern, block_q, block_k = layout.mask, "", layout.block_q, layout.block_k
        q_blocks, k_blocks = layout.blocks
    if mask is None and (on_cpu or by_reference):
        mask = ops.pattern_mask(pattern, layout.heads, q_blocks, k_blocks, q.device)
    if on_cpu:
        return block_sparse_attention_cpu(
            q, k, v, mask, block_q=block_q, block_k=block_k, window_size=window, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k)
    if by_reference:
        return block_sparse_attention_reference(
            q, k, v, mask, block_q=block_q, block_k=block_k, window_size=window, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    softmax_scale, q = checks.positive_scale(softmax_scale, q)
    return ops.forward(q, k, v, mask, cu_seqlens_q, cu_seqlens_k, pattern, impl, deterministic, q_blocks, k_blocks, block_q, block_k,
                       softmax_scale, *window)[:2]


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | Pattern, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of block_sparse_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(block_sparse_attention, q, k, v, layout, **options)


def _queries_before(q: Tensor, k: Tensor, pattern: Pattern) -> int:
    """How many tokens lie between the beginning of the first query's block and the first query."""
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"q: a Pattern's queries are the last of the {k.shape[1]} keys' tokens, got {q.shape[1]}")
    return (k.shape[1] - q.shape[1]) % pattern.block


def _check_layout(layout: BlockLayout, q: Tensor, batch: int, len_q: int, len_k: int, packed: bool) -> None:
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout: must be a BlockLayout or a Pattern, got {type(layout).__name__}; see BlockLayout.from_mask")
    if layout.device != q.device:
        raise ValueError(f"layout: must be on q's device {q.device}, got {layout.device}; see layout.to")
    for name, own, given in (("sequences", layout.batch, batch), ("heads", layout.heads, q.shape[-2])):
        if own not in (1, given):
            raise ValueError(f"layout: must be for 1 or q's {given} {name}, got {own}")
    needed = (-(-len_q // layout.block_q), -(-len_k // layout.block_k))
    fits = all(have >= need for have, need in zip(layout.blocks, needed, strict=True)) if packed else layout.blocks == needed
    if not fits:
        raise ValueError(f"layout: {len_q} queries and {len_k} keys take {needed[0]} x {needed[1]} blocks of {layout.block_q} x "
                         f"{layout.block_k} tokens, got {layout.blocks[0]} x {layout.blocks[1]}")
