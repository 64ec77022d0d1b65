"""Compressed keys and the queries that see them as packed sequences of causal attention. Integers on the device; nothing waits for it.

A query at position t sees the compressed key c if its last token c * stride + size - 1 is at most t, so if c <= u - size // stride with
u = (t + 1) // stride. `stride` queries have one u and see the same keys: they are taken for heads of one query u, whose attention is
causal, aligned to the bottom right.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def compressed_bounds(cu_seqlens_k: Tensor, size: int, stride: int) -> Tensor:
    """cu_seqlens of the compressed keys, int32: of each sequence as many as lie in it whole. total_k // stride is a bound of all."""
    counts = ((cu_seqlens_k.diff() - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])


class Fold(NamedTuple):
    """count: units u there are room for. cu_seqlens_q: int32 (sequences + 1,), of units. place: int64 (total_q,), each query's place in
    (count, stride)."""

    count: int
    stride: int
    cu_seqlens_q: Tensor
    place: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, stride: int) -> "Fold":
        sequences = cu_seqlens_q.shape[0] - 1
        len_q, len_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        first = (len_k - len_q + 1).div(stride, rounding_mode="floor")
        units = len_k.div(stride, rounding_mode="floor") - first + 1
        bounds = torch.cat([units.new_zeros(1), units.cumsum(0, dtype=torch.int32)])
        token = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
        there = sequence.clamp(max=sequences - 1)
        inside = token - cu_seqlens_q[there] + (len_k - len_q + 1 - first * stride)[there] + bounds[there] * stride
        behind = token - cu_seqlens_q[-1] + bounds[-1] * stride
        return cls(total_q // stride + 2 * sequences + 1, stride, bounds, torch.where(sequence < sequences, inside, behind).long())

    def fold(self, q: Tensor, kv_heads: int) -> Tensor:
        """(total_q, heads, width) to (count, kv_heads * stride * group, width)."""
        rows = q.new_zeros(self.count * self.stride, *q.shape[1:]).index_copy(0, self.place, q)
        return rows.view(self.count, self.stride, kv_heads, -1, q.shape[-1]).transpose(1, 2).flatten(1, 3)

    def unfold(self, out: Tensor, kv_heads: int) -> Tensor:
        """The way back."""
        rows = out.view(self.count, kv_heads, self.stride, -1, out.shape[-1]).transpose(1, 2)
        return rows.flatten(2, 3).flatten(0, 1).index_select(0, self.place)
