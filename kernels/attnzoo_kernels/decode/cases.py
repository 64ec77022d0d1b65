"""Shapes of `decode_attention` and `latent_decode_attention`: inputs, counted work and identifiers, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash.cases import mixed_lengths


class Inputs(NamedTuple):
    """What one call takes: `decode_attention(q, k_cache, v_cache, **options)`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One problem: `lengths` tokens in the cache of each sequence, and NaN after them up to `max_len` (None: the longest length).

    `heads_first` stores the cache as (batch, kv_heads, max_len, head_dim); `strided` puts NaN between its rows; `q_scale` multiplies q.
    """

    lengths: tuple[int, ...] = (128,)
    max_len: int | None = None
    seqlen_q: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    heads_first: bool = False
    strided: bool = False
    page: int | None = None  # tokens of a page; None: no pages. Pages lie in random order, and unused ones hold NaN
    q_scale: float = 1.0
    fp8: bool = False  # caches in float8_e4m3fn with a scale for each key head
    segments: bool = False  # queries are those of one token, for ranges of keys of random lengths that follow each other

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def bytes(self) -> int:
        """Bytes of the keys and values that the queries see, each counted once."""
        left = self.window_size[0]
        seen = sum(length if left < 0 else min(length, left + self.seqlen_q) for length in self.lengths)
        return seen * self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * (1 if self.fp8 else self.dtype.itemsize)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout and the options of the call."""
        generator = torch.Generator(device).manual_seed(seed)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        max_len = max(self.lengths) if self.max_len is None else self.max_len

        def normal(rows: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(self.batch, rows, heads, dim, generator=generator, device=device, dtype=self.dtype)

        def cache(dim: int) -> torch.Tensor:
            values = normal(max_len, self.kv_heads, dim)
            if self.strided:
                values = torch.cat([values, torch.full_like(values[..., :1].expand(-1, -1, -1, 8), torch.nan)], dim=-1)[..., :dim]
            if self.heads_first:
                values = values.transpose(1, 2).contiguous().transpose(1, 2)
            behind = torch.arange(max_len, device=device) >= lengths[:, None]
            return values.masked_fill_(behind[..., None, None], torch.nan)

        q = normal(self.seqlen_q, self.heads, self.head_dim).mul_(self.q_scale)
        options = {"cache_seqlens": lengths, "causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}
        if self.alibi:
            options["alibi_slopes"] = torch.exp2(-8 * torch.arange(1, self.heads + 1, device=device, dtype=torch.float32) / self.heads)
        if self.sinks:
            options["sinks"] = torch.randn(self.heads, generator=generator, device=device)
        caches = cache(self.head_dim), cache(self.value_dim or self.head_dim)
        if self.page is not None:
            caches, options["block_table"] = self._paged(caches, generator)
        if self.segments:
            cuts = torch.rand(self.batch, self.seqlen_q + 1, generator=generator, device=device).sort().values * (lengths + 1)[:, None]
            options["segments"] = cuts.int().unfold(1, 2, 1).contiguous()
        if self.fp8:
            scales = (0.5 + torch.rand(self.kv_heads, generator=generator, device=device) for _ in range(2))
            options |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
            caches = (x.to(torch.float8_e4m3fn) for x in caches)
        return Inputs(q, *caches, options)

    def _paged(self, caches: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The caches in pages, and their block table, in which -1 follows a sequence's pages."""
        device, max_len = caches[0].device, caches[0].shape[1]
        pages = -(-max_len // self.page)
        table = torch.randperm(self.batch * pages + 3, generator=generator, device=device)[: self.batch * pages].view(self.batch, pages)
        placed = []
        for x in caches:
            rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * self.page - max_len), value=torch.nan)
            placed.append(x.new_full((self.batch * pages + 3, self.page, *x.shape[2:]), torch.nan))
            placed[-1][table] = rows.unflatten(1, (pages, self.page))
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        unused = torch.arange(pages, device=device) * self.page >= lengths[:, None]
        return placed, table.masked_fill(unused, -1).int()

    def __str__(self) -> str:
        longest = max(self.lengths, default=0)
        parts = [f"b{self.batch}", f"k{longest}" + ("mixed" if len(set(self.lengths)) > 1 else "")]
        parts += [f"of{self.max_len}"] if self.max_len is not None else []
        parts += [f"q{self.seqlen_q}", f"h{self.heads}kv{self.kv_heads}"]
        parts += [f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else "")]
        parts += [] if self.causal else ["full"]
        parts += ["window{},{}".format(*self.window_size)] if self.window_size != (-1, -1) else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += [name.replace("_", "-") for name in ("alibi", "sinks", "heads_first", "strided") if getattr(self, name)]
        parts += [f"page{self.page}"] if self.page else []
        parts += ["fp8"] if self.fp8 else []
        parts += ["segments"] if self.segments else []
        parts += [f"scale{self.q_scale:g}"] if self.q_scale != 1 else []
        parts.append(str(self.dtype).removeprefix("torch."))
        return "-".join(parts)


CORRECTNESS: tuple[Case, ...] = (
    *(Case(lengths=(n,) * 4) for n in (1, 17, 97, 128, 1023, 1025)),
    *(Case(lengths=(97, 40, 31, 64), kv_heads=1, head_dim=d) for d in (16, 32, 40, 80, 96, 111, 128, 160, 192, 256)),
    Case(lengths=(113, 40, 64), head_dim=64, value_dim=128),
    Case(lengths=(113, 40, 64), head_dim=192, value_dim=128),
    Case(lengths=(113, 40, 64), head_dim=40, value_dim=111),
    *(Case(lengths=(80, 33, 113, 65, 64, 50, 90, 7), heads=h, kv_heads=kv) for h, kv in ((1, 1), (4, 4), (24, 1), (6, 2))),
    *(Case(lengths=(113, 70), seqlen_q=m, causal=causal) for m, causal in ((2, True), (5, False), (16, True), (33, True))),
    Case(lengths=(3, 0, 250, 1), seqlen_q=7),  # queries before the sequence's first token
    Case(lengths=(0, 0, 31, 0, 64, 65, 0), max_len=100),
    Case(lengths=(0,), max_len=16),
    Case(lengths=(), max_len=16),
    Case(lengths=mixed_lengths(60, 131), heads=2, kv_heads=1, head_dim=16),  # more sequences than one pass over them takes
    Case(lengths=(1023, 1, 500), kv_heads=1, head_dim=16),
    Case(lengths=(257, 31, 80), window_size=(64, -1)),
    Case(lengths=(257, 31, 80), seqlen_q=5, window_size=(64, 0)),
    Case(lengths=(257, 31, 80), seqlen_q=5, causal=False, window_size=(9, 2)),
    Case(lengths=(257, 31, 80), window_size=(0, 0)),
    Case(lengths=(257, 31, 80), softcap=5.0),
    Case(lengths=(257, 31, 80), seqlen_q=3, alibi=True),
    Case(lengths=(257, 0, 31), sinks=True),
    Case(lengths=(257, 31, 80), seqlen_q=3, softcap=5.0, alibi=True, sinks=True, window_size=(40, -1)),
    Case(lengths=(257, 31, 80, 113, 64, 200, 150, 97), seqlen_q=4, q_scale=50.0),  # with few rows, near-ties would decide the largest error
    Case(lengths=(257, 31, 80), heads_first=True),
    Case(lengths=(257, 31, 80), strided=True, max_len=300),
    Case(lengths=(257, 31, 0, 80), page=16),
    Case(lengths=(257, 31, 80), seqlen_q=5, page=64, window_size=(64, 0), sinks=True),
    Case(lengths=(130, 31, 80), head_dim=40, value_dim=111, page=128),
    Case(lengths=(100, 31), kv_heads=1, seqlen_q=3, softcap=5.0, alibi=True, page=24),
    Case(lengths=(257, 31, 0, 80), seqlen_q=3, segments=True),
    Case(lengths=(257, 31, 80, 113), seqlen_q=2, segments=True, heads=24, kv_heads=1, softcap=5.0, sinks=True, strided=True, max_len=300),
    Case(lengths=(257, 31, 0, 80), fp8=True),
    Case(lengths=(257, 31, 80), head_dim=40, value_dim=72, seqlen_q=3, fp8=True, sinks=True),
    Case(lengths=(257, 31, 80), head_dim=128, page=16, softcap=5.0, fp8=True, window_size=(100, 0)),
)


def benchmark_case(batch: int, length: int, **changes: Any) -> Case:
    """The shape of Llama 3 8B: 32 query heads and 8 key heads of width 128."""
    return Case(**{"lengths": (length,) * batch, "heads": 32, "kv_heads": 8, "head_dim": 128} | changes)


class LatentInputs(NamedTuple):
    """What one call takes: `latent_decode_attention(q, cache, **options)`."""

    q: torch.Tensor
    cache: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class LatentCase(Case):
    """One problem over latents. A row of the cache has `head_dim` columns; the first `value_dim` of them are the latent.

    There are no windows, softcap, biases, sinks or 8-bit caches.
    """

    heads: int = 16
    kv_heads: int = 1
    head_dim: int = 576
    value_dim: int = 512

    def bytes(self) -> int:
        """Bytes of the cache's rows, each counted once."""
        return sum(self.lengths) * self.head_dim * self.dtype.itemsize

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> LatentInputs:
        q, cache, _, options = Case.inputs(replace(self, value_dim=1), device, seed)
        del options["window_size"], options["softcap"]
        return LatentInputs(q, cache.squeeze(2), options | {"value_dim": self.value_dim})


LATENT_CORRECTNESS: tuple[LatentCase, ...] = (
    *(LatentCase(lengths=(n,) * 2) for n in (1, 97, 1023)),
    *(LatentCase(lengths=(97, 40, 31, 64), heads=h, head_dim=80, value_dim=64) for h in (1, 8, 17, 33, 128)),
    *(LatentCase(lengths=(97, 40, 31), head_dim=d, value_dim=v) for d, v in ((16, 16), (40, 37), (72, 8), (128, 128), (364, 300))),
    *(LatentCase(lengths=(113, 70), seqlen_q=m, causal=causal, heads=6, head_dim=80, value_dim=64) for m, causal in ((2, True), (5, False),
                                                                                                                  (16, True))),
    LatentCase(lengths=(3, 0, 250, 1), seqlen_q=7, heads=4, head_dim=48, value_dim=32),  # queries before the sequence's first token
    LatentCase(lengths=(0, 0, 31, 0, 64, 65, 0), max_len=100, head_dim=48, value_dim=32),
    LatentCase(lengths=(0,), max_len=16, head_dim=48, value_dim=32),
    LatentCase(lengths=(), max_len=16, head_dim=48, value_dim=32),
    LatentCase(lengths=mixed_lengths(60, 131), heads=2, head_dim=24, value_dim=16),  # more sequences than one pass over them takes
    LatentCase(lengths=(257, 31, 80, 113, 64, 200, 150, 97), seqlen_q=4, heads=8, head_dim=80, value_dim=64, q_scale=50.0),
    LatentCase(lengths=(257, 31, 80), strided=True, max_len=300, head_dim=80, value_dim=64),
    LatentCase(lengths=(257, 31, 0, 80), head_dim=80, value_dim=64, page=16),
    LatentCase(lengths=(257, 31, 80), seqlen_q=5, head_dim=80, value_dim=64, page=64),
    LatentCase(lengths=(100, 31), seqlen_q=3, heads=2, head_dim=40, value_dim=40, page=24),
)
