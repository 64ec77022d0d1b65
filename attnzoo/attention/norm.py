"""The norm that models and attention layers share."""

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's, whose fused kernel wants input and weight of one dtype: autocast may hand over an input in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
