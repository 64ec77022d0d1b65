"""GELU of a sum with a bias in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor


def bias_gelu_reference(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    return F.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)
