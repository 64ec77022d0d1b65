"""Shapes of `distance_bias_attention`: those of flash_attention, with a table of biases. Shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash import cases as flash
from attnzoo_kernels.flash.cases import SINGLE_ROWS


class Inputs(NamedTuple):
    """What one call takes: `distance_bias_attention(q, k, v, bias, **options)`, then `out.backward(dout)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash.Case):
    """One problem; fields as in `flash.cases.Case`. distances: number of entries of the table. origin: the entry of distance 0."""

    distances: int = 40
    origin: int = 0

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, a standard normal table, and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        bias = torch.randn(self.heads, self.distances, generator=torch.Generator(device).manual_seed(seed + 1), device=device)
        options = {name: value for name, value in options.items() if name not in ("softcap", "dropout_p")}
        return Inputs(q, k, v, bias, dout, options | {"origin": self.origin})

    def __str__(self) -> str:
        return f"{super().__str__()}-table{self.distances},{self.origin}"


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, causal=True, **SINGLE_ROWS if n == 1 else {}) for n in (1, 17, 113)),
    Case(seqlen_q=97, causal=True, distances=97),
    Case(seqlen_q=97, causal=True, distances=1),
    Case(seqlen_q=97, distances=61, origin=30),
    Case(seqlen_q=150, heads=1, distances=9, origin=4),  # tiles of keys far before and far after the queries
    Case(seqlen_q=33, heads=1, distances=5, origin=-40),  # all distances have the first entry
    *(Case(seqlen_q=m, seqlen_k=n, causal=True, distances=64) for m, n in ((17, 97), (113, 17))),
    *(Case(seqlen_q=97, heads=1, head_dim=d, value_dim=dv, causal=True) for d, dv in ((32, 32), (40, 80), (128, 128), (256, 256))),
    Case(batch=2, seqlen_q=50, heads=4, kv_heads=2, causal=True),
    Case(batch=2, seqlen_q=70, strided=True, distances=100, origin=50),
    Case(seqlen_q=113, q_scale=50.0, causal=True, heads=4),
    Case(seqlen_q=130, window_size=(32, 16), distances=49, origin=16),
    Case(seqlen_q=97, seqlen_k=17, window_size=(4, 4)),  # most rows see no key
    Case(lengths_q=(1, 0, 70, 17, 40, 0), causal=True),
    Case(lengths_q=(17, 0, 70, 5), lengths_k=(97, 33, 17, 0), kv_heads=1, window_size=(16, 16), origin=16),
)

LONG: tuple[Case, ...] = (
    *(Case(seqlen_q=n, head_dim=d, causal=True, distances=distances)
      for n, d, distances in ((1025, 64, 1025), (1023, 128, 128), (4096, 128, 4096), (4096, 64, 128))),
    Case(batch=2, seqlen_q=1025, heads=8, kv_heads=2, head_dim=128, causal=True, distances=900),
    Case(seqlen_q=2048, head_dim=64, distances=255, origin=127),
    Case(seqlen_q=512, seqlen_k=2048, causal=True, distances=2048),
    Case(seqlen_q=2048, causal=True, window_size=(300, 0), distances=301),
    Case(lengths_q=(1000, 0, 17, 513, 2048, 1), heads=4, kv_heads=2, head_dim=128, causal=True, distances=2048),
    Case(lengths_q=(300, 700, 1), lengths_k=(300, 1700, 40), causal=True, distances=128),
)


def benchmark_case(seqlen: int, head_dim: int, causal: bool, **changes: Any) -> Case:
    """The benchmark case of flash_attention, with a table of biases."""
    return Case(**vars(flash.benchmark_case(seqlen, head_dim, causal)) | changes)
