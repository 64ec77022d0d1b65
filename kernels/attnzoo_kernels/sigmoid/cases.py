"""Shapes of `sigmoid_attention`: those of flash_attention, with a bias. Shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnzoo_kernels.flash import cases as flash
from attnzoo_kernels.flash.cases import SINGLE_ROWS, Inputs


@dataclass(frozen=True)
class Case(flash.Case):
    """One problem. sigmoid_bias: None for minus the logarithm of the number of keys; softmax_scale: None for head_dim ** -0.5."""

    sigmoid_bias: float | None = None
    softmax_scale: float | None = None

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        x = super().inputs(device, seed)
        options = {name: value for name, value in x.options.items() if name not in ("softcap", "dropout_p")}
        return x._replace(options=options | {"sigmoid_bias": self.sigmoid_bias, "softmax_scale": self.softmax_scale})

    def __str__(self) -> str:
        return super().__str__() + ("" if self.sigmoid_bias is None else f"-bias{self.sigmoid_bias:g}")


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, causal=causal, **SINGLE_ROWS if n == 1 else {})
      for n, causal in ((1, False), (17, True), (113, False), (1025, True))),
    *(Case(seqlen_q=m, seqlen_k=n, causal=True) for m, n in ((17, 97), (113, 17), (128, 1023))),
    *(Case(seqlen_q=97, heads=1, head_dim=d, causal=True) for d in (32, 40, 96, 111, 128, 256)),
    *(Case(seqlen_q=113, heads=1, head_dim=d, value_dim=dv) for d, dv in ((64, 128), (192, 128), (64, 16))),
    Case(batch=2, seqlen_q=50, heads=4, kv_heads=2, causal=True, softmax_scale=-0.2, sigmoid_bias=-3.0),
    Case(batch=2, seqlen_q=70, strided=True),
    Case(seqlen_q=113, q_scale=50.0, causal=True),  # weights close to one and to zero
    Case(seqlen_q=257, sigmoid_bias=0.0),
    Case(seqlen_q=257, window_size=(32, 16)),
    Case(seqlen_q=97, seqlen_k=17, window_size=(4, 4)),  # most rows see no key
    Case(seqlen_q=97, seqlen_k=130, alibi=True, causal=True),
    Case(lengths_q=(1, 0, 70, 17, 40, 0), causal=True),
    Case(lengths_q=(17, 0, 70, 5), lengths_k=(97, 33, 17, 0), kv_heads=1, window_size=(16, 16)),
    Case(lengths_q=(50, 40), kv_heads=1, alibi=True, strided=True),
)


def benchmark_case(seqlen: int, head_dim: int, causal: bool, **changes: Any) -> Case:
    """The benchmark case of flash_attention, with the default bias."""
    return Case(**vars(flash.benchmark_case(seqlen, head_dim, causal, **changes)))
