"""AdamW's step in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo_kernels.adamw import AdamWTensors


@torch.no_grad()
def adamw_reference(tensors: AdamWTensors, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int,
                    scale: Tensor | None) -> None:
    first, second = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    lists = tensors.weights, tensors.gradients, tensors.means, tensors.squares
    for n, (weight, gradient, mean, square) in enumerate(zip(*lists, strict=True)):
        gradient = gradient.to(torch.float32) if scale is None else gradient.to(torch.float32) * scale
        weight.mul_(1 - lr * weight_decay)
        mean.lerp_(gradient, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        weight.addcdiv_(mean, (square.sqrt() / second).add_(eps), value=-lr / first)
        if tensors.copies is not None:
            tensors.copies[n].copy_(weight)
