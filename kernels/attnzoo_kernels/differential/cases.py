"""Shapes of `differential_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash import cases as flash_cases


class Inputs(NamedTuple):
    """What one call takes: `differential_attention(q1, q2, k1, k2, v, lam, **options)`, then `out.backward(dout)`."""

    q1: torch.Tensor
    q2: torch.Tensor
    k1: torch.Tensor
    k2: torch.Tensor | None
    v: torch.Tensor
    lam: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash_cases.Case):
    """One problem: `heads` pairs of query heads over `kv_heads` pairs of key heads; fields as in `flash.cases.Case`.

    The queries of the two paths are interleaved heads of one tensor, and so are the keys, as in the layers. lam: lambda is a "scalar", or
    there is one for each "head", or one for each "token" and head. shared_keys: both paths read the same keys.
    """

    lam: str = "token"
    shared_keys: bool = False

    def flops(self, backward: bool = False) -> float:
        """Floating-point operations of one pass: two score products and two value products per pair, and 2.5 times that in the backward.

        This is the count of two calls of plain attention, so that times can be compared. The backward computes less, because both paths
        share dO Vᵀ and dV.
        """
        return 2 * super().flops(backward)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, lambda uniform in [0, 1), and the options of the call."""
        kv_heads = self.kv_heads or self.heads
        plain = flash_cases.Case(**{name: getattr(self, name) for name in flash_cases.Case.__dataclass_fields__})
        x = replace(plain, heads=2 * self.heads, kv_heads=2 * kv_heads, value_dim=self.value_dim or self.head_dim).inputs(device, seed)
        (q1, q2), (k1, k2), (v, _), (dout, _) = ((t[..., 0::2, :], t[..., 1::2, :]) for t in x[:4])
        if not self.strided:
            v, dout = v.contiguous(), dout.contiguous()
        shape = {"scalar": (), "head": (self.heads,), "token": q1.shape[:-1]}[self.lam]
        lam = torch.rand(shape, generator=torch.Generator(device).manual_seed(seed + 1), device=device)
        options = {name: value for name, value in x.options.items() if name in ("causal", "window_size") or "seqlen" in name}
        return Inputs(q1, q2, k1, None if self.shared_keys else k2, v, lam, dout, options)

    def __str__(self) -> str:
        return "-".join([super().__str__(), self.lam] + ["sharedk"] * self.shared_keys)


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, causal=causal, head_dim=32, value_dim=64) for n in (17, 113) for causal in (False, True)),
    *(Case(seqlen_q=m, seqlen_k=n, causal=causal, head_dim=32) for m, n in ((17, 97), (113, 17)) for causal in (False, True)),
    *(Case(seqlen_q=70, heads=1, head_dim=d, value_dim=dv, causal=True) for d, dv in ((40, 80), (64, 128), (111, 96), (128, 256))),
    Case(batch=2, seqlen_q=40, heads=6, kv_heads=2, head_dim=32, value_dim=64, causal=True),
    Case(batch=2, seqlen_q=40, heads=4, kv_heads=1, head_dim=32),
    Case(batch=2, seqlen_q=40, heads=4, kv_heads=2, head_dim=32, value_dim=64, causal=True, strided=True),
    Case(batch=2, seqlen_q=40, heads=4, kv_heads=2, head_dim=32, causal=True, shared_keys=True),
    Case(seqlen_q=70, head_dim=32, shared_keys=True, strided=True),
    Case(seqlen_q=113, head_dim=32, value_dim=64, q_scale=50.0, causal=True),
    Case(seqlen_q=130, head_dim=32, value_dim=64, window_size=(32, 16)),
    Case(seqlen_q=130, head_dim=32, window_size=(33, -1), causal=True, shared_keys=True),
    Case(seqlen_q=17, seqlen_k=130, head_dim=32, window_size=(32, 0), causal=True),
    Case(seqlen_q=130, seqlen_k=17, head_dim=32, window_size=(4, 4)),  # most rows see no key
    *(Case(lengths_q=(1, 0, 70, 17, 33, 0), head_dim=32, value_dim=64, causal=causal) for causal in (False, True)),
    Case(lengths_q=(17, 0, 40, 5), lengths_k=(40, 33, 17, 0), heads=4, kv_heads=2, head_dim=32, causal=True),
    Case(lengths_q=(17, 0, 70, 5), lengths_k=(70, 33, 17, 0), head_dim=32, window_size=(16, 16), shared_keys=True),
    Case(lengths_q=(70, 33), heads=4, kv_heads=2, head_dim=32, value_dim=64, causal=True, strided=True),
    *(Case(lengths_q=(97, 0, 70), heads=4, kv_heads=2, head_dim=64, value_dim=dv, causal=True) for dv in (16, 32)),
)

LONG: tuple[Case, ...] = (
    *(Case(seqlen_q=n, causal=causal, head_dim=d, value_dim=2 * d) for n in (1023, 1025) for d in (64, 128) for causal in (False, True)),
    Case(seqlen_q=1025, heads=4, kv_heads=2, causal=True, shared_keys=True),
    Case(lengths_q=(1, 1023, 0, 130, 1025), heads=4, kv_heads=2, value_dim=128, causal=True),
    Case(seqlen_q=1025, value_dim=128, window_size=(200, 0), causal=True),
)


def benchmark_case(seqlen: int, head_dim: int, causal: bool, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """The shape of version 1: `tokens` tokens in rows of `seqlen` (one row at least), and a scalar lambda. Values have the width
    2 head_dim, and there are as many pairs as fill `hidden` with them."""
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=hidden // head_dim // 2, head_dim=head_dim, causal=causal,
                **({"value_dim": 2 * head_dim, "lam": "scalar"} | changes))


def shared_benchmark_case(seqlen: int, head_dim: int, causal: bool, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """The shape of version 2: as many pairs as the baseline has heads, four for each key and value head; lambda per token and head."""
    heads = hidden // head_dim
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=heads, kv_heads=max(1, heads // 4), head_dim=head_dim, causal=causal,
                shared_keys=True, **changes)
