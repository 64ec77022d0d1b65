"""Shapes of `nsa_attention`: inputs and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash import cases as flash_cases


class Inputs(NamedTuple):
    """What one call takes: `nsa_attention(q, k, v, k_cmp, v_cmp, gates, **options)`, then `out.backward(dout)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    gates: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash_cases.Case):
    """One causal problem; fields as in `flash.cases.Case`, and those of `nsa_attention`. The window has keys and values of its own."""

    causal: bool = True
    compress_size: int = 32
    compress_stride: int = 16
    block_size: int = 64
    block_count: int = 16
    window: int = 512

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("compress_size", "compress_stride", "block_size", "block_count", "window")}

    def pairs(self) -> float:
        """Pairs of a query and a key or compressed key, of one head, over the batch, if every query reads as many blocks as it may."""
        total = 0
        for m, n in self.lengths:
            t = torch.arange(m) + n - m
            compressed = ((t + 1 - self.compress_size).div(self.compress_stride, rounding_mode="floor") + 1).clamp(min=0)
            selected = t.div(self.block_size, rounding_mode="floor").clamp(max=self.block_count - 1) * self.block_size
            total += int((compressed + selected + t % self.block_size + 1 + (t + 1).clamp(max=self.window))[t >= 0].sum())
        return total

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, gates between 0 and 1, and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        if self.packed:
            rows = (k.shape[0] // self.compress_stride,)
        else:
            rows = (k.shape[0], max(0, (k.shape[1] - self.compress_size) // self.compress_stride + 1))
        k_cmp, v_cmp, k_window, v_window = (
            torch.randn(shape, generator=generator, device=device).to(self.dtype)
            for shape in ((*rows, *k.shape[-2:]), (*rows, *v.shape[-2:]), k.shape, v.shape))
        gates = torch.rand(*q.shape[:-1], 3, generator=generator, device=device).to(self.dtype)
        options = {name: value for name, value in options.items() if "seqlen" in name}
        return Inputs(q, k, v, k_cmp, v_cmp, gates, dout, options | self.sizes | {"k_window": k_window, "v_window": v_window})

    def __str__(self) -> str:
        return "-".join([super().__str__(), f"c{self.compress_size}x{self.compress_stride}",
                         f"s{self.block_count}x{self.block_size}", f"w{self.window}"])


SMALL = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4, "window": 12}
CORRECTNESS: tuple[Case, ...] = (
    Case(seqlen_q=50, heads=4, kv_heads=2, head_dim=32, **SMALL),
    Case(lengths_q=(1, 0, 40, 9), kv_heads=1, head_dim=32, **SMALL),
    Case(lengths_q=(7, 1), lengths_k=(41, 30), heads=3, kv_heads=1, head_dim=16, **SMALL),
    Case(seqlen_q=40, heads=1, head_dim=16, **SMALL | {"compress_stride": 8, "block_size": 16, "block_count": 2}),
    Case(seqlen_q=60, heads=5, kv_heads=1, head_dim=16, **SMALL | {"compress_size": 16}),  # compressed keys of more than a block
    Case(seqlen_q=7, head_dim=16, **SMALL),  # no compressed key
)

LONG: tuple[Case, ...] = (
    Case(seqlen_q=2048, heads=8, kv_heads=2, head_dim=64),
    Case(batch=2, seqlen_q=1500, heads=6, kv_heads=2, head_dim=128, block_count=8),
    Case(lengths_q=(1000, 0, 17, 513, 1), heads=16, kv_heads=1, head_dim=128, window=128),
)


def benchmark_case(seqlen: int, head_dim: int = 128, heads: int = 64, kv_heads: int = 4, **changes: Any) -> Case:
    return Case(seqlen_q=seqlen, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **changes)
