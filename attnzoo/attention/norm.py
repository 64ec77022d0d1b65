"""The norms that models and attention layers share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's, whose fused kernel wants input and weight of one dtype: autocast may hand over an input in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadwiseRMSNorm(nn.Module):
    """RMSNorm of each head (..., heads, width) by itself, with a weight for each channel of each head."""

    def __init__(self, heads: int, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * width))  # flat: optimizers decay matrices

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype).view(x.shape[-2:])
