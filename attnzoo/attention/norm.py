"""The norms that models and attention layers share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMSNorm, with the weight cast to the input's dtype. The fused kernel needs both in one dtype, and under autocast the input
    may have 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadwiseRMSNorm(nn.Module):
    """RMSNorm of each head (..., heads, width) by itself, with a weight for each channel of each head."""

    def __init__(self, heads: int, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * width))  # one-dimensional, because optimizers apply weight decay to matrices

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype).view(x.shape[-2:])
