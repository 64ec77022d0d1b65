"""Shapes of `two_frame_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnzoo_kernels.flash import cases as flash
from attnzoo_kernels.flash.cases import Inputs


@dataclass(frozen=True)
class Case(flash.Case):
    """One causal problem; fields as in `flash.cases.Case`. The queries and keys of the two frames are drawn independently, so no rotation
    turns one frame into the other."""

    causal: bool = True
    near_keys: int = 24
    far_keys: int | None = None

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head, over the batch. Plain causal attention counts as half of all pairs, as is usual."""
        if self.far_keys is None:
            return super().pairs()
        return sum(_limited_pairs(m, n, self.near_keys, self.far_keys) for m, n in self.lengths)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout and the options of the call."""
        kv_heads = self.kv_heads or self.heads
        _, _, v, dout, options = super().inputs(device, seed)
        pairs = replace(self, heads=2 * self.heads, kv_heads=2 * kv_heads)
        q, k = (x.unflatten(-2, (-1, 2)) for x in super(Case, pairs).inputs(device, seed + 1)[:2])
        options = {name: value for name, value in options.items() if "seqlen" in name}
        if self.packed and self.lengths_k is None:  # a path knows that both sides have equal lengths if both are one tensor
            options["cu_seqlens_k"] = options["cu_seqlens_q"]
        return Inputs(q, k, v, dout, options | {"near_keys": self.near_keys, "far_keys": self.far_keys})

    def __str__(self) -> str:
        far = [] if self.far_keys is None else [f"far{self.far_keys}"]
        return "-".join([super().__str__(), f"near{self.near_keys}", *far])


def _limited_pairs(m: int, n: int, near_keys: int, far_keys: int) -> int:
    position = torch.arange(n - m, n)
    return int(((position + 1).clamp(0, near_keys) + (position - near_keys + 1).clamp(0, far_keys)).sum())


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, heads=1, head_dim=32) for n in (17, 25, 97)),
    *(Case(seqlen_q=97, heads=1, head_dim=32, near_keys=w, far_keys=n) for w, n in ((64, None), (200, None), (40, 3), (7, 45))),
    Case(seqlen_q=97, heads=1, head_dim=32, far_keys=0),
    Case(seqlen_q=70, heads=3, head_dim=32, near_keys=1),  # with one near key, few heads would leave the errors to chance
    *(Case(seqlen_q=m, seqlen_k=n, head_dim=32, kv_heads=1, far_keys=far) for m, n, far in ((17, 97, None), (70, 40, 9))),
    *(Case(seqlen_q=70, heads=1, head_dim=d, value_dim=dv) for d, dv in ((64, 64), (40, 111))),
    Case(batch=2, seqlen_q=40, heads=2, kv_heads=1, head_dim=32, near_keys=9, strided=True),
    Case(seqlen_q=70, heads=3, head_dim=32, q_scale=50.0),  # with one head, near-ties would decide the largest error
    Case(lengths_q=(1, 0, 70, 17, 33, 0), kv_heads=1, head_dim=32, near_keys=16),
    Case(lengths_q=(17, 0, 70, 5), lengths_k=(97, 33, 17, 0), head_dim=32, far_keys=5),
)

# for a GPU: tiles of 64 and more
LARGE: tuple[Case, ...] = (
    *(Case(seqlen_q=n, head_dim=d, near_keys=w, far_keys=far) for n, d, w, far in (
        (1025, 64, 300, None), (1025, 128, 511, 4), (1023, 256, 100, None), (2048, 64, 512, 10), (2048, 128, 256, None))),
    Case(batch=2, seqlen_q=1025, heads=8, kv_heads=2, head_dim=128, near_keys=333),
    Case(seqlen_q=512, seqlen_k=2048, head_dim=64, near_keys=700),
    Case(lengths_q=(1000, 0, 17, 513, 2048, 1), heads=4, kv_heads=2, head_dim=128, near_keys=400),
    Case(lengths_q=(300, 700, 1), lengths_k=(300, 1700, 40), head_dim=64, near_keys=128, far_keys=70),
)


def benchmark_case(seqlen: int, head_dim: int, near_keys: int, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """`tokens` tokens in rows of `seqlen` (one row at least), as many heads as `hidden` holds."""
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=hidden // head_dim, head_dim=head_dim, near_keys=near_keys,
                **changes)
