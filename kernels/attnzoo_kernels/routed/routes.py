"""Turns chosen blocks into packed sequences: for every block, the queries that read it. All are integers on the device; the host does not
wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import autograd

FEW = 16  # queries of a sequence; more occupy a GPU without dividing the keys


class Blocks(NamedTuple):
    """The blocks of all sequences, numbered one sequence after the other. All tensors are int32.

    There are `count` of them, a bound that does not depend on the lengths; the blocks after the last real one are empty, and there is at
    least one such block. Block b has the keys bounds_k[b] .. bounds_k[b + 1]. The queries whose own block it is are bounds_q[b] ..
    bounds_q[b + 1]; the last of them has the block's last key as its own key.
    """

    size: int
    count: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    first: Tensor  # (sequences,), each sequence's first block
    bounds_q: Tensor  # (count + 1,)
    bounds_k: Tensor  # (count + 1,)
    sequence: Tensor  # (total_q,), each query's sequence; queries after the last sequence count as part of it
    own: Tensor  # (total_q,), each query's own block, counted from its sequence's first; -1 where it sees no key

    @classmethod
    def of(cls, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, size: int) -> "Blocks":
        """The Blocks of packed q and k, or of dense ones, whose sequences are then taken one after the other."""
        if cu_seqlens_q is None:
            cu_seqlens_q, cu_seqlens_k = even_bounds(q), even_bounds(k)
        total_q, total_k = (x.shape[:-2].numel() for x in (q, k))
        count = total_k // size + cu_seqlens_q.shape[0]
        return cls(size, count, cu_seqlens_q, cu_seqlens_k, *_layout(cu_seqlens_q, cu_seqlens_k, total_q, total_k, size, count))


def even_bounds(x: Tensor) -> Tensor:
    """cu_seqlens for the sequences of a dense tensor (batch, seqlen, heads, width), packed one after the other."""
    batch, seqlen = x.shape[:2]
    if seqlen == 0:
        return torch.zeros(batch + 1, device=x.device, dtype=torch.int32)
    return torch.arange(0, (batch + 1) * seqlen, seqlen, device=x.device, dtype=torch.int32)


class Routes(NamedTuple):
    """Pairs (query, chosen block), sorted by key head and block; pairs that stand for no block come last.

    A pair stands for `rows` query rows, those of the heads that choose together. place: (total_q * choosers, slots) int32, the position of
    each pair after sorting. pair: (total_q * choosers * slots,) int32, the pair at each position. cu_seqlens_q (in pairs times rows) and
    cu_seqlens_k: int32 (kv_heads * count + 1,); the keys of one head follow those of another.
    """

    place: Tensor
    pair: Tensor
    rows: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def routes(chosen: Tensor, blocks: Blocks, heads: int, kv_heads: int, total_k: int) -> Routes:
    """chosen: (total_q, choosers, slots) as routed_attention has them, without the batch."""
    rows = heads // chosen.shape[1]
    place, pair, bounds_q, bounds_k = _order(chosen, blocks.first, blocks.bounds_k, blocks.sequence, blocks.own, rows, kv_heads, total_k)
    return Routes(place, pair, rows, bounds_q, bounds_k)


def _lay_out(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, size: int,
             count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.lists import launch_layout

    return launch_layout(cu_seqlens_q, cu_seqlens_k, total_q, total_k, size, count)


def _fake_layout(cu_seqlens_q, cu_seqlens_k, total_q, total_k, size, count):
    return tuple(cu_seqlens_q.new_empty(n) for n in (cu_seqlens_q.shape[0] - 1, count + 1, count + 1, total_q, total_q))


def _arrange(chosen: Tensor, first: Tensor, bounds_k: Tensor, sequence: Tensor, own: Tensor, rows: int, kv_heads: int,
             total_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnzoo_kernels.routed.lists import launch_order

    return launch_order(chosen, first, bounds_k, sequence, own, rows, kv_heads, total_k)


def _fake_order(chosen, first, bounds_k, sequence, own, rows, kv_heads, total_k):
    numbers = kv_heads * (bounds_k.shape[0] - 1) + 1
    place, pair = chosen.new_empty(chosen.shape[:2].numel(), chosen.shape[2]), chosen.new_empty(chosen.numel())
    return place, pair, *(chosen.new_empty(numbers) for _ in range(2))


_layout = autograd.forward_only("routed_layout", _lay_out, _fake_layout)
_order = autograd.forward_only("routed_order", _arrange, _fake_order)
