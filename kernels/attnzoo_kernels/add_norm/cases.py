"""Inputs of add_norm, shared by the tests and the benchmark."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels.add_norm import Stream
from attnzoo_kernels.add_norm.reference import add_norm_reference


@dataclass(frozen=True)
class Case:
    rows: int
    width: int
    kind: str = "layernorm"
    bias: bool = True
    begins: bool = False  # the stream is one float32 tensor, and there is no branch
    last: bool = False

    def inputs(self, device: torch.device | str, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """(x, branch or None, weight, bias or None); the branch is bfloat16, the others are float32."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        x, branch = 3 * normal(self.rows, self.width) + 0.2, normal(self.rows, self.width).to(torch.bfloat16)
        return x, None if self.begins else branch, 1 + 0.3 * normal(self.width), normal(self.width) if self.bias else None

    def gradients(self, device: torch.device | str, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Gradients of the new stream and of the norm, both bfloat16."""
        generator = torch.Generator(device).manual_seed(seed)
        both = torch.randn(2, self.rows, self.width, generator=generator, device=device).to(torch.bfloat16)
        return both[0], both[1]

    def stream(self, x: Tensor) -> Stream:
        """x as a Stream: in two halves, or under `begins` as it is."""
        if self.begins:
            return Stream(x)
        ones = torch.ones_like(x[0])
        return Stream(*add_norm_reference(x, None, None, None, ones, None, 1e-5, False)[:2])

    def __str__(self) -> str:
        names = [name for name in ("begins", "last") if getattr(self, name)] + ["without bias"] * (not self.bias)
        return "-".join((f"{self.rows}x{self.width}", self.kind, *names))


CORRECTNESS: tuple[Case, ...] = (
    Case(37, 40),
    Case(3, 768, bias=False),
    Case(19, 24, "rmsnorm", bias=False),
    Case(11, 48, begins=True),
    Case(9, 130, last=True),
    Case(5, 64, "rmsnorm", bias=False, begins=True, last=True),
)

BENCHMARK: tuple[Case, ...] = (Case(65536, 768, bias=False), Case(12288, 768, bias=False), Case(16384, 4096, "rmsnorm", bias=False))
