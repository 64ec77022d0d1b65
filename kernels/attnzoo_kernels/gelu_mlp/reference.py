"""The MLP in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast


@without_autocast
def gelu_mlp_reference(x: Tensor, up: Tensor, down: Tensor, approximate: str = "none") -> Tensor:
    return F.linear(F.gelu(F.linear(x, up), approximate=approximate), down)
