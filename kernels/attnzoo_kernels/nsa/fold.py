"""Folds queries that see the same compressed keys into packed sequences of causal attention, and adds up the branches.

A query at position t sees the compressed key c if its last token c * stride + size - 1 is at most t, that is, if c <= u - size // stride
with u = (t + 1) // stride. So `stride` queries have the same u and see the same keys. They are treated as heads of one unit u. The units'
attention is causal, aligned to the bottom right, so that flash_attention can compute it over packed sequences of units and of compressed
keys. All integers stay on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels.nsa import ops


class Fold(NamedTuple):
    """Where queries are in units, which have `stride` places each. bounds: cu_seqlens of the compressed keys. cu_seqlens_q: int32
    (sequences + 1,), cu_seqlens of the units. place: int32 (total_q,), each query's index in (units, stride), flattened. source: int32
    (units * stride,), the query at each place, or -1."""

    stride: int
    bounds: Tensor
    cu_seqlens_q: Tensor
    place: Tensor
    source: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> "Fold":
        return cls(stride, *ops.layout(cu_seqlens_q, cu_seqlens_k, total_q, size, stride))

    def unfolded(self) -> "Fold":
        """For `combine` of an attention to compressed keys that was not folded."""
        rows = torch.arange(self.place.shape[0], dtype=torch.int32, device=self.place.device)
        return Fold(1, self.bounds, self.cu_seqlens_q, rows, rows)

    def fold(self, q: Tensor, kv_heads: int) -> Tensor:
        """(total_q, heads, width) to (units, kv_heads * stride * group, width)."""
        return ops.fold(q, self.place, self.source, kv_heads, self.stride)

    def unfold_lse(self, lse: Tensor, kv_heads: int) -> Tensor:
        """(kv_heads * stride * group, units) to (heads, total_q)."""
        return ops.unfold_lse(lse, self.place, kv_heads, self.stride)

    def combine(self, compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, kv_heads: int) -> Tensor:
        """The sum of the branches times their gates (total_q, heads, 3). compressed is folded."""
        return ops.combine(compressed, selected, near, gates, self.place, self.source, kv_heads, self.stride)
