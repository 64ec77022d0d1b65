"""Inputs of bias_gelu, shared by the tests and the benchmark."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype = torch.float32  # as under autocast
    scale: float = 2.0  # reaches the tails of the normal distribution
    tanh: bool = False
    bias: bool = True

    @property
    def approximate(self) -> str:
        return "tanh" if self.tanh else "none"

    def inputs(self, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """(x, gradient of the output, bias): (rows, width), (rows, width), and (width,) or None."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        x, dout = self.scale * normal(self.rows, self.width), normal(self.rows, self.width)
        return x.to(self.dtype), dout.to(self.dtype), normal(self.width).to(self.bias_dtype) if self.bias else None

    def __str__(self) -> str:
        kind = "-tanh" * self.tanh + "-without bias" * (not self.bias)
        return f"{self.rows}x{self.width}-{str(self.dtype).removeprefix('torch.')}{kind}"


CORRECTNESS: tuple[Case, ...] = (
    Case(1, 8, torch.float32),
    Case(17, 40, torch.float32),
    Case(113, 111, torch.float16, torch.float16),
    Case(97, 1025, torch.float16),
    Case(300, 256, torch.float32, scale=8.0),
    Case(300, 256, torch.float32, scale=8.0, tanh=True),
    Case(113, 111, torch.float16, torch.float16, tanh=True),
    Case(97, 1025, torch.float16, tanh=True, bias=False),
    Case(17, 40, torch.float32, bias=False),
    Case(37, 2048, torch.float16),
    Case(37, 2048, torch.float16, tanh=True),
)

BENCHMARK: tuple[Case, ...] = (Case(20992, 3072), Case(16384, 8192), Case(12288, 3072, tanh=True), Case(12288, 3072, tanh=True, bias=False))
