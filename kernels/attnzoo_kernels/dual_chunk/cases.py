"""Shapes of `dual_chunk_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels.dual_chunk.geometry import STAGES, geometry
from attnzoo_kernels.flash import cases as flash
from attnzoo_kernels.flash.cases import Inputs

FLASH_OPTIONS = ("window_size", "softcap", "dropout_p")


def rotary_tables(positions: int, rotary_dim: int, device: torch.device | str = "cpu", base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 (positions, rotary_dim / 2)."""
    frequency = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


@dataclass(frozen=True)
class Case(flash.Case):
    """One problem over chunks, causal by default; fields as in `flash.cases.Case`. rotary_dim: None for all channels, except the last of
    an odd head_dim."""

    causal: bool = True
    chunk_size: int = 32
    local_size: int = 8
    variant: str = "paper"
    stages: tuple[str, ...] = STAGES
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    multiplier: bool = False

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head, over the batch. Plain causal attention counts as half of all pairs, as is usual."""
        if self.stages == STAGES:
            return super().pairs()
        chunk = geometry(self.chunk_size, self.local_size, self.variant).chunk
        return sum(_stage_pairs(m, n, chunk, self.stages, self.causal) for m, n in self.lengths)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        options: dict[str, Any] = {name: value for name, value in options.items() if name not in FLASH_OPTIONS}
        if self.packed and self.lengths_k is None:  # a path knows that both sides have equal lengths if both are one tensor
            options["cu_seqlens_k"] = options["cu_seqlens_q"]
        positions = geometry(self.chunk_size, self.local_size, self.variant).positions
        cos, sin = rotary_tables(positions, self.rotary_dim or self.head_dim // 2 * 2, device)
        options |= {
            "cos": cos, "sin": sin, "chunk_size": self.chunk_size, "local_size": self.local_size, "variant": self.variant,
            "stages": self.stages, "rope_interleaved": self.rope_interleaved,
        }
        if self.multiplier:
            generator = torch.Generator(device).manual_seed(seed + 1)
            options["logit_multiplier"] = torch.rand(q.shape[:-2], generator=generator, device=device) + 0.5
        return Inputs(q, k, v, dout, options)

    def __str__(self) -> str:
        parts = [super().__str__(), self.variant, f"c{self.chunk_size}", f"w{self.local_size}"]
        parts += ["+".join(self.stages)] if self.stages != STAGES else []
        parts += [f"r{self.rotary_dim}"] if self.rotary_dim else []
        parts += [name for name, on in (("interleaved", self.rope_interleaved), ("multiplier", self.multiplier)) if on]
        return "-".join(parts)


def _stage_pairs(m: int, n: int, chunk: int, stages: tuple[str, ...], causal: bool) -> int:
    position = torch.arange(m) + n - m
    start = position.div(chunk, rounding_mode="floor") * chunk
    end = (position + 1).clamp(0, n) if causal else torch.full_like(position, n)

    def keys(first, last):
        return int((torch.minimum(last, end) - first.clamp(min=0)).clamp(min=0).sum())

    zero, most = torch.zeros_like(start), torch.full_like(start, n)
    counts = {
        "intra": keys(start, start + chunk),
        "successive": keys(start - chunk, start) + keys(start + chunk, start + 2 * chunk),
        "inter": keys(zero, start - chunk) + keys(start + 2 * chunk, most),
    }
    return sum(counts[stage] for stage in stages)


# a chunk has 24 tokens unless a case says otherwise
CORRECTNESS: tuple[Case, ...] = (
    Case(seqlen_q=1, heads=8, head_dim=32),
    *(Case(seqlen_q=n, heads=1, head_dim=32) for n in (23, 24, 25, 48, 49, 121)),
    *(Case(seqlen_q=n, heads=1, head_dim=32, chunk_size=c, local_size=w, variant=variant)
      for n, c, w in ((70, 24, 0), (97, 40, 8), (50, 40, 32), (33, 9, 2)) for variant in ("paper", "chunkllama")),
    *(Case(seqlen_q=m, seqlen_k=n, heads=2, kv_heads=1, head_dim=32, causal=causal)
      for m, n in ((17, 97), (60, 40), (200, 40)) for causal in (True, False)),
    # chunks of whole tiles: one loop over all queries after a key
    *(Case(seqlen_q=130, heads=1, head_dim=32, chunk_size=48, local_size=16, causal=causal) for causal in (True, False)),
    *(Case(seqlen_q=m, seqlen_k=n, heads=1, head_dim=32, chunk_size=40) for m, n in ((40, 136), (130, 34))),
    Case(lengths_q=(1, 0, 130, 33), heads=2, kv_heads=1, head_dim=32, chunk_size=40),
    *(Case(lengths_q=(97, 0, 130), heads=2, kv_heads=1, head_dim=64, value_dim=dv, chunk_size=40) for dv in (16, 32)),
    Case(seqlen_q=61, heads=1, head_dim=40, rotary_dim=16),
    Case(seqlen_q=61, heads=1, head_dim=33, value_dim=17, rotary_dim=20, rope_interleaved=True),
    Case(seqlen_q=61, heads=1, head_dim=64, value_dim=128, rope_interleaved=True, causal=False),
    Case(batch=2, seqlen_q=61, heads=2, head_dim=34),
    Case(batch=2, seqlen_q=50, heads=2, kv_heads=1, head_dim=32, strided=True, multiplier=True),
    Case(seqlen_q=97, heads=1, head_dim=32, q_scale=30.0, chunk_size=40),
    Case(seqlen_q=97, heads=1, head_dim=32, chunk_size=20, variant="chunkllama", causal=False, multiplier=True),
    *(Case(seqlen_q=61, heads=1, head_dim=32, stages=stages, causal=causal)
      for stages, causal in ((("intra",), True), (("intra", "inter"), False), (("successive",), True))),
    Case(lengths_q=(1, 0, 61, 24, 0), heads=1, head_dim=32, multiplier=True),
    Case(lengths_q=(17, 0, 40, 5), lengths_k=(61, 33, 17, 0), heads=1, head_dim=32, causal=False),
    Case(lengths_q=(17, 0, 40, 5), lengths_k=(61, 33, 17, 0), heads=2, kv_heads=1, head_dim=32),
)

# for a GPU: tiles of 64 and more, many chunks
LARGE: tuple[Case, ...] = (
    *(Case(seqlen_q=n, heads=2, head_dim=d, chunk_size=256, local_size=64, causal=causal)
      for n in (1023, 1025) for d in (64, 128) for causal in (True, False)),
    *(Case(batch=2, seqlen_q=1500, heads=4, kv_heads=2, head_dim=d, chunk_size=300, local_size=57, multiplier=True) for d in (64, 128)),
    *(Case(seqlen_q=400, heads=1, head_dim=d, chunk_size=200, local_size=50) for d in (80, 96, 111, 160, 192, 256)),
    Case(lengths_q=(1, 0, 700, 129, 1000, 0), heads=4, kv_heads=2, head_dim=128, chunk_size=256, local_size=64),
    Case(lengths_q=(17, 0, 600, 5), lengths_k=(970, 33, 170, 0), heads=4, kv_heads=1, head_dim=64, chunk_size=256, local_size=64,
         causal=False),
)


def benchmark_case(seqlen: int, head_dim: int, chunk_size: int, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """`tokens` tokens in rows of `seqlen` (one row at least), as many heads as `hidden` holds, local_size a quarter of chunk_size."""
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=hidden // head_dim, head_dim=head_dim, chunk_size=chunk_size,
                local_size=chunk_size // 4, **changes)
