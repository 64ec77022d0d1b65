"""Shapes of linear_cross_entropy, shared by the tests and the benchmark."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    rows: int
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    bias: bool = False
    token_weights: bool = False
    reduction: str = "sum"
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """(x, weight, targets, options of the call). Every seventh target is ignored."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        weight = normal(self.rows, self.hidden) * 2 / self.hidden**0.5
        targets = torch.randint(self.options.get("vocab_size", self.rows), (self.tokens,), generator=generator, device=device)
        targets[::7] = self.options.get("ignore_index", -100)
        options = {"reduction": self.reduction, **self.options}
        options |= {"bias": normal(self.rows).to(self.weight_dtype)} if self.bias else {}
        options |= {"token_weights": normal(self.tokens).abs()} if self.token_weights else {}
        return normal(self.tokens, self.hidden).to(self.dtype), weight.to(self.weight_dtype), targets, options

    def __str__(self) -> str:
        names = [name for name in ("bias", "token_weights") if getattr(self, name)] + [f"{k}{v}" for k, v in self.options.items()]
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join((f"{self.tokens}x{self.hidden}x{self.rows}", dtype, self.reduction, *names))


CORRECTNESS: tuple[Case, ...] = (
    Case(33, 24, 96, torch.float32),
    Case(300, 16, 61, torch.float32, bias=True, reduction="mean", token_weights=True, options={"label_smoothing": 0.1, "z_loss": 1e-2}),
    Case(20, 48, 100, torch.float16, options={"vocab_size": 93, "softcap": 2.0}),
    Case(21, 32, 5000, torch.float16, reduction="none", bias=True, token_weights=True, options={"z_loss": 1e-3, "softcap": 5.0}),
    Case(9, 32, 64, torch.float16, torch.float16, reduction="none", options={"label_smoothing": 0.2, "ignore_index": 5}),
)

BENCHMARK: tuple[Case, ...] = (Case(12288, 768, 50304), Case(65536, 768, 50304), Case(16384, 4096, 128256))
