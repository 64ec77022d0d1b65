"""Shapes of gelu_mlp, shared by the tests and the benchmark."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    rows: int
    width: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    tanh: bool = True

    @property
    def approximate(self) -> str:
        return "tanh" if self.tanh else "none"

    def inputs(self, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, up, down, and the result's gradient."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        x, up, down = normal(self.rows, self.width), normal(self.hidden, self.width), normal(self.width, self.hidden)
        scaled = x, up / self.width**0.5, down / self.hidden**0.5, normal(self.rows, self.width)
        return tuple(t.to(self.dtype) for t in scaled)

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}x{self.hidden}-{str(self.dtype).removeprefix('torch.')}{'-tanh' * self.tanh}"


CORRECTNESS: tuple[Case, ...] = (Case(150, 72, 264, torch.float16), Case(7, 64, 40, torch.float16, tanh=False))

BENCHMARK: tuple[Case, ...] = (Case(65536, 768, 3072), Case(12288, 768, 3072), Case(16384, 4096, 16384))
