"""Shapes of `routed_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash import cases as flash_cases


class Inputs(NamedTuple):
    """What one call takes: `routed_attention(q, k, v, blocks, **options)`, then `out.backward(dout)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash_cases.Case):
    """One causal problem; fields as in `flash.cases.Case`. Each query gets `slots` different random block numbers. Some of them are -1
    (none), or not those of earlier blocks. shared: the query heads of one key head share their blocks."""

    causal: bool = True
    block_size: int = 16
    slots: int = 2
    shared: bool = False

    def pairs(self) -> float:
        """Visible pairs of one head, over the batch, if every query reads `slots` earlier blocks, or all where there are fewer."""
        total = 0
        for m, n in self.lengths:
            position = torch.arange(m) + n - m
            earlier = position.div(self.block_size, rounding_mode="floor").clamp(max=self.slots) * self.block_size
            total += int((earlier + position % self.block_size + 1)[position >= 0].sum())
        return total

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, blocks, and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        longest = max(n for _, n in self.lengths)
        count = max(-(-longest // self.block_size), self.slots)
        choosers = (self.kv_heads or self.heads) if self.shared else self.heads
        generator = torch.Generator(device).manual_seed(seed + 1)
        order = torch.rand(*q.shape[:-2], choosers, count + 1, generator=generator, device=device).argsort(-1)
        blocks = order[..., : self.slots].int() - 1  # -1 is none
        options = {name: value for name, value in options.items() if "seqlen" in name}
        return Inputs(q, k, v, blocks, dout, options | {"block_size": self.block_size})

    def __str__(self) -> str:
        return "-".join([super().__str__(), f"blocks{self.slots}x{self.block_size}"] + ["shared"] * self.shared)


CORRECTNESS: tuple[Case, ...] = (
    Case(batch=2, seqlen_q=49, heads=4, kv_heads=2, head_dim=32),
    Case(lengths_q=(1, 0, 40, 17, 13, 0), kv_heads=1, head_dim=32, block_size=8, slots=3),
    Case(seqlen_q=65, heads=4, kv_heads=2, head_dim=32, shared=True, slots=3),
    Case(lengths_q=(17, 0, 50, 5), lengths_k=(70, 33, 17, 0), head_dim=32, shared=True, kv_heads=1),
    Case(seqlen_q=5, seqlen_k=97, head_dim=32, block_size=7),
    Case(seqlen_q=40, heads=1, head_dim=40, value_dim=48, block_size=32, strided=True),
    Case(seqlen_q=20, head_dim=32, block_size=1, slots=9),  # more slots than are merged at once
    Case(seqlen_q=49, heads=8, head_dim=32, q_scale=50.0),  # with one head, near-ties would decide the largest error
    Case(seqlen_q=33, head_dim=32, block_size=64),  # no earlier block
    Case(seqlen_q=33, head_dim=32, slots=0),
    Case(seqlen_q=300, heads=1, head_dim=32, block_size=144),  # larger than walk.py takes
    Case(seqlen_q=40, heads=1, head_dim=32, value_dim=136),  # wider
    Case(seqlen_q=150, heads=20, kv_heads=1, head_dim=16, value_dim=24, shared=True, slots=7),  # several programs for a block
)

LONG: tuple[Case, ...] = (
    Case(seqlen_q=4096, heads=4, head_dim=128, block_size=512),
    Case(batch=2, seqlen_q=2048, heads=8, kv_heads=2, head_dim=64, block_size=64, slots=15, shared=True),
    Case(lengths_q=(1000, 0, 17, 513, 2048, 1), heads=4, kv_heads=2, head_dim=128, block_size=100, slots=3),
    Case(seqlen_q=300, seqlen_k=2048, heads=2, head_dim=64, block_size=128),
    Case(lengths_q=tuple(range(0, 240, 3)), heads=4, kv_heads=2, head_dim=64, block_size=16, slots=3, shared=True),  # short sequences
)


def benchmark_case(seqlen: int, head_dim: int = 128, heads: int = 16, block_size: int = 512, slots: int = 2, **changes: Any) -> Case:
    return Case(seqlen_q=seqlen, heads=heads, head_dim=head_dim, block_size=block_size, slots=slots, **changes)
