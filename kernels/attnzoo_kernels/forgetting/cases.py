"""Shapes of `forgetting_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnzoo_kernels.flash import cases as flash_cases


class Inputs(NamedTuple):
    """What one call takes: `forgetting_attention(q, k, v, log_f, **options)`, then `out.backward(dout)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_f: torch.Tensor
    dout: torch.Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash_cases.Case):
    """One causal problem; fields as in `flash.cases.Case`.

    Forget gates are sigmoids of normal numbers with the mean `gate`: with 6 they keep hundreds of tokens, with -3 a few. resets: the
    probability that the gate of a token and head is e^-30.
    """

    causal: bool = True
    gate: float = 2.0
    resets: float = 0.0

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, gates, and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        shape = (*k.shape[:-2], self.heads)
        logits = torch.randn(shape, generator=generator, device=device) + self.gate
        logits[torch.rand(shape, generator=generator, device=device) < self.resets] = -30.0
        options = {name: value for name, value in options.items() if name == "window_size" or "seqlen" in name}
        if self.packed and self.lengths_k is None:  # a path knows that both sides have equal lengths if both are one tensor
            options["cu_seqlens_k"] = options["cu_seqlens_q"]
        return Inputs(q, k, v, torch.nn.functional.logsigmoid(logits), dout, options)

    def __str__(self) -> str:
        return "-".join([super().__str__(), f"gate{self.gate:g}"] + [f"resets{self.resets:g}"] * (self.resets > 0))


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, head_dim=32, gate=gate) for n, gate in ((17, 2.0), (97, 6.0), (97, -3.0))),
    *(Case(seqlen_q=m, seqlen_k=n, head_dim=32) for m, n in ((17, 97), (70, 40))),
    *(Case(seqlen_q=70, heads=1, head_dim=d, value_dim=dv) for d, dv in ((64, 64), (40, 111))),
    Case(batch=2, seqlen_q=40, heads=4, kv_heads=2, head_dim=32, strided=True),
    Case(seqlen_q=97, heads=4, head_dim=32, q_scale=50.0),  # with one head, near-ties would decide the largest error
    Case(seqlen_q=161, heads=1, head_dim=32, gate=6.0, resets=0.1),
    Case(seqlen_q=161, heads=4, head_dim=32, gate=6.0, mean=3.0),
    Case(lengths_q=(1, 0, 70, 17, 33, 0), kv_heads=1, head_dim=32, gate=4.0),
    Case(lengths_q=(17, 0, 70, 5), lengths_k=(97, 33, 17, 0), head_dim=32, window_size=(16, 0)),
)

# long sequences: c, the sum of the gates' logarithms, becomes large, and few of the keys count
LONG: tuple[Case, ...] = (
    *(Case(seqlen_q=n, head_dim=d, gate=gate, resets=resets) for n, d, gate, resets in (
        (1025, 64, 2.0, 0.0), (1025, 128, 6.0, 0.05), (4096, 64, -3.0, 0.0), (4096, 128, 8.0, 0.1), (1023, 256, 4.0, 0.0))),
    Case(batch=2, seqlen_q=1025, heads=8, kv_heads=2, head_dim=128, gate=5.0),
    Case(seqlen_q=512, seqlen_k=2048, head_dim=64, gate=6.0),
    Case(seqlen_q=2048, head_dim=64, gate=6.0, window_size=(300, 0)),
    Case(lengths_q=(1000, 0, 17, 513, 2048, 1), heads=4, kv_heads=2, head_dim=128, gate=5.0, resets=0.02),
    Case(lengths_q=(300, 700, 1), lengths_k=(300, 1700, 40), head_dim=64, gate=4.0),
)


def benchmark_case(seqlen: int, head_dim: int, tokens: int = 16384, hidden: int = 2048, **changes: Any) -> Case:
    """`tokens` tokens in rows of `seqlen` (one row at least), as many heads as `hidden` holds."""
    return Case(batch=max(1, tokens // seqlen), seqlen_q=seqlen, heads=hidden // head_dim, head_dim=head_dim, **changes)
