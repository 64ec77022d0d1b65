"""Attention over trees of shared prefixes: many sequences that begin alike, with every shared token once."""

from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.packing import token_positions
from attnzoo_kernels.ranges import KeyRanges
from attnzoo_kernels.tree.segments import check_tree, make_ranges, reference_ranges

IMPLEMENTATIONS = ("triton", "reference")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Tensor,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of packed segments that form trees: a token sees its own segment up to itself, and all tokens of the segments above.

    A segment continues its parent, as answers continue a prompt. Every path from a root to a leaf is a sequence; a token's output is what
    causal attention gives it in each sequence that it belongs to, and gradients are the sums over these sequences.

        segments, parents       mask, a letter for each token's segment
        a 2   -1                a  1
        b 2    0                a  1 1
        c 1    1                b  1 1 1
        d 2    0                b  1 1 1 1
                                c  1 1 1 1 1
                                d  1 1       1
                                d  1 1       1 1

    q (total, heads, head_dim), k (total, kv_heads, head_dim), v (total, kv_heads, value_dim): as flash_attention has packed tensors.
    parents: int32 (segments,), the number of each segment's parent, -1 for a root. Segments are in depth-first order: a segment's parent
        is the segment before it or an ancestor of that. On a GPU this is not checked; `tree_ranges` can check it.
    cu_seqlens: int32 (segments + 1,), where segments begin and end; a segment may be empty. Tokens after the last segment give zeros.
    softmax_scale, return_lse, deterministic, impl: as in flash_attention.

    It is flash_attention over `tree_ranges`, which calls for one tree can share: flash_attention(q, k, v, ranges=tree_ranges(...)). Rotary
    embeddings need the tokens' positions in their sequences, which `tree_positions` gives.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    for name, x in (("q", q), ("k", k)):
        checks.tensor(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name}: must be (total, {'kv_' * (name == 'k')}heads, head_dim), got shape {tuple(x.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: must have q's {q.shape[0]} tokens, got {k.shape[0]}")
    _check_places(parents, cu_seqlens, q.shape[0])
    if parents.device != q.device:
        raise ValueError(f"parents: must be on q's device {q.device}, got {parents.device}")
    by_kernel = impl != "reference" and (parents.is_cuda or impl == "triton")
    ranges = KeyRanges(make_ranges(parents, cu_seqlens) if by_kernel else reference_ranges(parents, cu_seqlens))
    return flash_attention(q, k, v, softmax_scale=softmax_scale, ranges=ranges, return_lse=return_lse, deterministic=deterministic,
                           impl=impl)


def tree_ranges(parents: Tensor, cu_seqlens: Tensor, *, check: bool = False, impl: str | None = None) -> KeyRanges:
    """What tree_attention's queries see, for flash_attention's `ranges`. Each segment has one range, whose queries are its own tokens and
    those of all segments below it, which follow it. The host does not wait for the device, unless `check`, which also checks the tree.

    impl: "triton" | "reference". None takes triton on CUDA tensors and the reference on CPU ones.
    """
    _check_places(parents, cu_seqlens)
    checks.flag("check", check)
    if check:
        check_tree(parents)
    if dispatch.takes_reference("tree ranges", impl, "parents", parents, IMPLEMENTATIONS, dtypes=None):
        return KeyRanges.of(reference_ranges(parents, cu_seqlens))
    return KeyRanges.of(make_ranges(parents, cu_seqlens))


def tree_positions(parents: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each of `total` tokens in the sequences that it belongs to, int64 (total,): how many tokens stand before it there."""
    checks.integer("total", total, 0)
    _check_places(parents, cu_seqlens, total)
    _, below, begin, end, _ = reference_ranges(parents, cu_seqlens).long().T
    # a segment's length is added to positions from its end on, up to the end of the last segment below it
    added = torch.zeros(total + 1, dtype=torch.int64, device=parents.device)
    added.index_add_(0, end, end - begin).index_add_(0, below, begin - end)
    return token_positions(cu_seqlens, total) + added.cumsum(0)[:total]


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, parents: Tensor, cu_seqlens: Tensor, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call with these arguments of tree_attention; None where it does, and impl=None takes it."""
    return dispatch.why_not_gluon(tree_attention, q, k, v, parents, cu_seqlens, **options)


def _check_places(parents: Tensor, cu_seqlens: Tensor, total: int | None = None) -> None:
    checks.tensor("parents", parents, "an int32 tensor of shape (segments,)")
    if parents.dtype != torch.int32:
        raise TypeError(f"parents: must be int32, got {parents.dtype}")
    checks.cu_seqlens("cu_seqlens", cu_seqlens, parents)
    if parents.shape != (cu_seqlens.shape[0] - 1,) or parents.stride() != (1,):
        raise ValueError(f"parents: must be contiguous and have shape {(cu_seqlens.shape[0] - 1,)}, one entry for each segment of "
                         f"cu_seqlens, got shape {tuple(parents.shape)} with strides {parents.stride()}")
    checks.rising("cu_seqlens", cu_seqlens, total)
    if parents.device.type == "cpu" and not torch.compiler.is_compiling():
        check_tree(parents)
