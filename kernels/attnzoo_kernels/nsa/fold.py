"""Queries that see the same compressed keys as packed sequences of causal attention, by operations of PyTorch or by kernels.

A query at position t sees the compressed key c if its last token c * stride + size - 1 is at most t, so if c <= u - size // stride with
u = (t + 1) // stride. `stride` queries have one u and see the same keys: they are taken for heads of one unit u. Its attention is causal,
aligned to the bottom right, so that flash_attention computes it over packed sequences of units and of compressed keys. All integers stay on
the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels.nsa import ops
from attnzoo_kernels.nsa.bounds import compressed_bounds


class Fold(NamedTuple):
    """By operations of PyTorch. bounds: cu_seqlens of the compressed keys. cu_seqlens_q: int32 (sequences + 1,), of units. count: units
    there is room for. place: int64 (total_q,), each query's place in (count, stride)."""

    count: int
    stride: int
    bounds: Tensor
    cu_seqlens_q: Tensor
    place: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> "Fold":
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
        return cls(total_q // stride + 2 * sequences + 1, stride, compressed_bounds(cu_seqlens_k, size, stride), bounds,
                   torch.where(sequence < sequences, inside, behind).long())

    def fold(self, q: Tensor, kv_heads: int) -> Tensor:
        """(total_q, heads, width) to (count, kv_heads * stride * group, width)."""
        rows = q.new_zeros(self.count * self.stride, *q.shape[1:]).index_copy(0, self.place, q)
        return rows.view(self.count, self.stride, kv_heads, -1, q.shape[-1]).transpose(1, 2).flatten(1, 3)

    def unfold(self, out: Tensor, kv_heads: int) -> Tensor:
        """The way back."""
        rows = out.view(self.count, kv_heads, self.stride, -1, out.shape[-1]).transpose(1, 2)
        return rows.flatten(2, 3).flatten(0, 1).index_select(0, self.place)

    def unfold_lse(self, lse: Tensor, kv_heads: int) -> Tensor:
        """(kv_heads * stride * group, count) to (heads, total_q)."""
        return self.unfold(lse.mT.unsqueeze(-1), kv_heads)[..., 0].mT

    def combine(self, compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, kv_heads: int) -> Tensor:
        """The branches by their gates (total_q, heads, 3); compressed is folded."""
        return gates[..., :1] * self.unfold(compressed, kv_heads) + gates[..., 1:2] * selected + gates[..., 2:] * near


class KernelFold(NamedTuple):
    """By kernels. place: int32. source: int32 (count * stride,), the query at each place, or -1."""

    stride: int
    bounds: Tensor
    cu_seqlens_q: Tensor
    place: Tensor
    source: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> "KernelFold":
        return cls(stride, *ops.layout(cu_seqlens_q, cu_seqlens_k, total_q, size, stride))

    def fold(self, q: Tensor, kv_heads: int) -> Tensor:
        return ops.fold(q, self.place, self.source, kv_heads, self.stride)

    def unfold_lse(self, lse: Tensor, kv_heads: int) -> Tensor:
        return ops.unfold_lse(lse, self.place, kv_heads, self.stride)

    def combine(self, compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, kv_heads: int) -> Tensor:
        return ops.combine(compressed, selected, near, gates, self.place, self.source, kv_heads, self.stride)
