"""From chosen blocks to packed sequences: for every block the queries that read it. Integers on the device; nothing here waits for it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The blocks of all sequences, numbered one behind the other. All int32.

    There are `count` of them, a bound that needs no look at the lengths: those behind the last are empty, and one at least is. Block b has
    the keys bounds_k[b] .. bounds_k[b + 1], and its own queries are bounds_q[b] .. bounds_q[b + 1], the last of them at its last key.
    """

    size: int
    count: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    first: Tensor  # (sequences,), each sequence's first block
    bounds_q: Tensor  # (count + 1,)
    bounds_k: Tensor  # (count + 1,)
    sequence: Tensor  # (total_q,), of each query; the last one's behind it
    own: Tensor  # (total_q,), each query's own block, counted from its sequence's first; -1 where it sees no key

    @classmethod
    def of(cls, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, size: int) -> "Blocks":
        """Of dense q and k too, whose sequences are then put one behind the other."""
        if cu_seqlens_q is None:
            cu_seqlens_q, cu_seqlens_k = even_bounds(q), even_bounds(k)
        total_q, total_k = (x.shape[:-2].numel() for x in (q, k))
        sequences = cu_seqlens_q.shape[0] - 1
        count = total_k // size + sequences + 1
        start_q, end_q, start_k, end_k = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
        shift = (end_k - start_k) - (end_q - start_q)
        # a sequence without keys has a block, too, for its queries
        behind = ((end_k - start_k + size - 1) // size).clamp(min=1).cumsum(0, dtype=torch.int32)
        first = torch.cat([behind.new_zeros(1), behind[:-1]])

        block = torch.arange(count, device=cu_seqlens_q.device, dtype=torch.int32)
        of = torch.searchsorted(behind, block, right=True).clamp(max=sequences - 1)
        at = (block - first[of]) * size
        bounds_k = torch.minimum(start_k[of] + at, end_k[of])
        bounds_q = torch.minimum(torch.maximum(start_q[of] + at - shift[of], start_q[of]), end_q[of])
        bounds_q = torch.where(at == 0, start_q[of], bounds_q)  # queries before the first key are in no other block
        token = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
        sequence = torch.searchsorted(end_q.contiguous(), token, right=True, out_int32=True).clamp(max=sequences - 1)
        position = token - start_q[sequence] + shift[sequence]
        own = torch.where((position >= 0) & (token < end_q[-1]), position.div(size, rounding_mode="floor"), -1).int()
        return cls(size, count, cu_seqlens_q, cu_seqlens_k, first,
                   torch.cat([bounds_q, end_q[-1:]]), torch.cat([bounds_k, end_k[-1:]]), sequence, own)


def even_bounds(x: Tensor) -> Tensor:
    """cu_seqlens of (batch, seqlen, heads, width) whose sequences are put one behind the other."""
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32) * x.shape[1]


class Routes(NamedTuple):
    """Pairs (query, chosen block) in the order of key heads and blocks; pairs that read nothing come last.

    A pair stands for `rows` queries, those of the heads that choose together. place: (total_q * choosers, slots) int32, where each pair
    went. cu_seqlens_q (of pairs times rows) and cu_seqlens_k: int32 (kv_heads * count + 1,), the keys one head behind the other.
    """

    place: Tensor
    rows: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def routes(chosen: Tensor, blocks: Blocks, heads: int, kv_heads: int, total_k: int) -> Routes:
    """chosen: (total_q, choosers, slots) as routed_attention has them, without the batch."""
    total_q, choosers, slots = chosen.shape
    device, count = chosen.device, blocks.count
    key_head = torch.arange(choosers, device=device, dtype=torch.int32) // (choosers // kv_heads)
    number = key_head[:, None] * count + (blocks.first[blocks.sequence].view(-1, 1, 1) + chosen)
    earlier = (chosen >= 0) & (chosen < blocks.own.view(-1, 1, 1))
    number = torch.where(earlier, number, kv_heads * count).int().flatten()
    in_order, pair = torch.sort(number, stable=True)  # stable: queries rise in each block
    place = torch.empty_like(number).scatter_(0, pair, torch.arange(number.shape[0], device=device, dtype=torch.int32))
    rows = heads // choosers
    numbers = torch.arange(kv_heads * count + 1, device=device, dtype=torch.int32)
    bounds = torch.searchsorted(in_order, numbers, out_int32=True) * rows
    head_starts = torch.arange(kv_heads, device=device, dtype=torch.int32)[:, None] * total_k
    bounds_k = torch.cat([(head_starts + blocks.bounds_k[:-1]).flatten(), numbers.new_full((1,), kv_heads * total_k)])
    return Routes(place.view(total_q * choosers, slots), rows, bounds, bounds_k)
