"""Shapes of `flash_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


class Inputs(NamedTuple):
    """What one call takes: `flash_attention(q, k, v, **options)`, then `out.backward(dout)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One problem. If `seqlen_k`, `kv_heads` or `value_dim` is None, it equals `seqlen_q`, `heads` or `head_dim`.

    With `lengths_q` the batch is packed, and `batch`, `seqlen_q` and `seqlen_k` are not used; `lengths_k` equals `lengths_q` if it is None.
    `strided` makes q, k, v and dout views of head-major storage with NaN after every row; `q_scale` multiplies q, for large logits. With
    `mean`, all keys of a head have one random vector added, and all values another one, as in trained models; `mean` is the standard
    deviation of the coordinates of these vectors.
    """

    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int | None = None
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    q_scale: float = 1.0
    mean: float = 0.0

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence in the batch."""
        if self.lengths_q is None:
            return [(self.seqlen_q, self.seqlen_q if self.seqlen_k is None else self.seqlen_k)] * self.batch
        return list(zip(self.lengths_q, self.lengths_k or self.lengths_q, strict=True))

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head, over the batch. Plain causal attention counts as half of all pairs, as is usual."""
        return sum(_pairs(m, n, self.causal, self.window_size) for m, n in self.lengths)

    def flops(self, backward: bool = False) -> float:
        """Floating-point operations of one pass: 2 * pairs * heads * (head_dim + value_dim), and 2.5 times that in the backward."""
        forward = 2 * self.pairs() * self.heads * (self.head_dim + (self.value_dim or self.head_dim))
        return 2.5 * forward if backward else forward

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout and the options of the call."""
        generator = torch.Generator(device).manual_seed(seed)
        kv_heads = self.kv_heads or self.heads
        value_dim = self.value_dim or self.head_dim
        queries, keys = zip(*self.lengths, strict=True)
        # (batch, seqlen) or (total,)
        rows_q, rows_k = ((sum(queries),), (sum(keys),)) if self.packed else ((self.batch, queries[0]), (self.batch, keys[0]))

        def normal(rows: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
            values = torch.randn(*rows, heads, dim, generator=generator, device=device, dtype=torch.float32).to(self.dtype)
            return _head_major(values) if self.strided else values

        q = normal(rows_q, self.heads, self.head_dim).mul_(self.q_scale)
        k = normal(rows_k, kv_heads, self.head_dim)
        v = normal(rows_k, kv_heads, value_dim)
        dout = normal(rows_q, self.heads, value_dim)
        for x in (k, v) if self.mean else ():
            x.add_(self.mean * normal((1,) * len(rows_k), kv_heads, x.shape[-1]))
        options: dict[str, Any] = {
            "causal": self.causal, "window_size": self.window_size, "softcap": self.softcap, "dropout_p": self.dropout_p,
        }
        if self.alibi:
            options["alibi_slopes"] = torch.exp2(-8 * torch.arange(1, self.heads + 1, device=device, dtype=torch.float32) / self.heads)
        if self.sinks:
            options["sinks"] = torch.randn(self.heads, generator=generator, device=device)
        if self.packed:
            options |= {
                "cu_seqlens_q": _cumulative(queries, device), "cu_seqlens_k": _cumulative(keys, device),
                "max_seqlen_q": max(queries), "max_seqlen_k": max(keys),
            }
        return Inputs(q, k, v, dout, options)

    def __str__(self) -> str:
        if self.packed:
            parts = [f"packed{len(self.lengths_q)}x{max(self.lengths_q)}"]
            if self.lengths_k:
                parts.append(f"k{max(self.lengths_k)}")
        else:
            parts = [f"b{self.batch}", f"n{self.seqlen_q}"]
            if self.seqlen_k is not None:
                parts.append(f"k{self.seqlen_k}")
        parts.append(f"h{self.heads}" + (f"kv{self.kv_heads}" if self.kv_heads else ""))
        parts.append(f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else ""))
        parts.append("causal" if self.causal else "full")
        if self.window_size != (-1, -1):
            parts.append("window{},{}".format(*self.window_size))
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += [name for name in ("alibi", "sinks", "strided") if getattr(self, name)]
        parts += [f"dropout{self.dropout_p:g}"] if self.dropout_p else []
        parts += [f"scale{self.q_scale:g}"] if self.q_scale != 1 else []
        parts += [f"mean{self.mean:g}"] if self.mean else []
        parts.append(str(self.dtype).removeprefix("torch."))
        return "-".join(parts)


def _pairs(m: int, n: int, causal: bool, window_size: tuple[int, int]) -> float:
    left, right = window_size
    if left < 0 and right < 0 and (not causal or m == n):
        return m * n / 2 if causal else m * n
    right = 0 if causal else right
    diagonal = torch.arange(m) + n - m
    first = (diagonal - left).clamp(min=0) if left >= 0 else torch.zeros_like(diagonal)
    last = (diagonal + right).clamp(max=n - 1) if right >= 0 else torch.full_like(diagonal, n - 1)
    return int((last - first + 1).clamp(min=0).sum())


def _head_major(values: torch.Tensor) -> torch.Tensor:
    *rows, heads, dim = values.shape
    storage = values.new_full((*rows[:-1], heads, rows[-1], dim + 8), float("nan"))
    view = storage[..., :dim].transpose(-3, -2)
    return view.copy_(values)


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(device)


def mixed_lengths(longest: int, count: int) -> tuple[int, ...]:
    """`count` lengths spread evenly from a fifth of `longest` to `longest` (mean 0.6 of it), in a fixed random order."""
    lengths = [round(longest * (0.2 + 0.8 * i / (count - 1))) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


# with two rows, the accuracy rule would only compare two rounding errors; cases of single queries therefore have 32 rows
SINGLE_ROWS = {"batch": 4, "heads": 8}

CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, causal=causal, **SINGLE_ROWS if n == 1 else {}) for n in (1, 17, 97, 113, 1023, 1025) for causal in (False, True)),
    *(Case(seqlen_q=m, seqlen_k=n, causal=causal, **SINGLE_ROWS if m == 1 else {})
      for m, n in ((17, 97), (113, 17), (1, 1025), (128, 1023)) for causal in (False, True)),
    *(Case(seqlen_q=97, heads=1, head_dim=d, causal=True) for d in (32, 40, 80, 96, 111, 128, 160, 192, 256)),
    Case(seqlen_q=113, heads=1, head_dim=64, value_dim=128),
    Case(seqlen_q=113, heads=1, head_dim=192, value_dim=128, causal=True),
    *(Case(seqlen_q=113, heads=1, head_dim=d, value_dim=dv) for d, dv in ((32, 16), (64, 32), (128, 16))),
    Case(lengths_q=(97, 0, 70), heads=1, head_dim=64, value_dim=16),
    Case(seqlen_q=113, heads=1, head_dim=40, value_dim=111, causal=True),
    Case(batch=2, seqlen_q=113, heads=6, kv_heads=2, causal=True),
    Case(batch=2, seqlen_q=97, heads=4, kv_heads=1),
    Case(batch=2, seqlen_q=113, heads=4, kv_heads=2, strided=True, causal=True),
    Case(seqlen_q=113, q_scale=50.0, causal=True),
    Case(seqlen_q=257, window_size=(32, 16)),
    Case(seqlen_q=257, window_size=(0, 0)),
    Case(seqlen_q=257, window_size=(64, -1), causal=True),
    Case(seqlen_q=17, seqlen_k=257, window_size=(32, 0), causal=True),
    Case(seqlen_q=257, seqlen_k=17, window_size=(4, 4)),  # most rows see no key
    Case(seqlen_q=113, softcap=5.0, causal=True),
    Case(seqlen_q=113, heads=4, alibi=True),
    Case(seqlen_q=113, seqlen_k=257, heads=4, alibi=True, causal=True),
    Case(seqlen_q=113, sinks=True, causal=True),
    Case(seqlen_q=113, seqlen_k=17, sinks=True, causal=True),  # rows that see nothing but their sink
    Case(seqlen_q=257, heads=4, kv_heads=2, softcap=5.0, alibi=True, sinks=True, window_size=(64, -1), causal=True),
    *(Case(lengths_q=(1, 0, 97, 17, 130, 0), causal=causal) for causal in (False, True)),
    Case(lengths_q=(17, 0, 113, 5), lengths_k=(97, 33, 17, 0), causal=True),
    Case(lengths_q=(17, 0, 113, 5), lengths_k=(97, 33, 17, 0), heads=4, kv_heads=2, sinks=True, window_size=(16, 16)),
    Case(lengths_q=(97, 113), heads=4, kv_heads=2, alibi=True, softcap=5.0, strided=True, causal=True),
)

DROPOUT: tuple[Case, ...] = (
    Case(seqlen_q=113, dropout_p=0.1, causal=True),
    Case(seqlen_q=97, seqlen_k=257, heads=4, kv_heads=2, dropout_p=0.5),
    Case(lengths_q=(17, 0, 113), dropout_p=0.2, causal=True),
)


def benchmark_case(seqlen: int, head_dim: int, causal: bool, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """`tokens` tokens in rows of `seqlen` (one row at least), as many heads as `hidden` holds."""
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=hidden // head_dim, head_dim=head_dim, causal=causal, **changes)


def packed_benchmark_case(longest: int, head_dim: int, causal: bool, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """About `tokens` tokens in sequences of mixed lengths; the longest has `longest` tokens, and the mean is 0.6 of that."""
    lengths = mixed_lengths(longest, max(3, round(tokens / (0.6 * longest))))
    return Case(lengths_q=lengths, heads=hidden // head_dim, head_dim=head_dim, causal=causal, **changes)


def feature_cases(plain: Case) -> dict[str, Case]:
    """Variants of the benchmark case `plain` with one feature each. Their cost per visible pair is compared with that of `plain`."""
    return {
        "window 1024": replace(plain, window_size=(1023, 0)),
        "window 4096": replace(plain, window_size=(4095, 0)),
        "alibi": replace(plain, alibi=True),
        "sinks": replace(plain, sinks=True),
        "gqa 4": replace(plain, kv_heads=plain.heads // 4),
        "softcap 30": replace(plain, softcap=30.0),
        "dropout 0.1": replace(plain, dropout_p=0.1),
    }
