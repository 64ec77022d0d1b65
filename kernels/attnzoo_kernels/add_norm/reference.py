"""Sum and norm in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast


class _Split(torch.autograd.Function):
    """Splits float32 into two halves: x rounded to bfloat16, which carries the gradient, and the rest of its bits in int16."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        bits = x.contiguous().view(torch.int32)
        high = ((bits + 0x8000) >> 16).to(torch.int16)
        low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
        ctx.mark_non_differentiable(low)
        return high.view(torch.bfloat16), low

    @staticmethod
    def backward(ctx, dhigh: Tensor, _) -> Tensor:
        return dhigh.to(torch.float32)


class _Join(torch.autograd.Function):
    """Joins the halves to float32. The gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, high: Tensor, low: Tensor) -> Tensor:
        return ((high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        return dx.to(torch.bfloat16), None


@without_autocast
def add_norm_reference(high: Tensor, low: Tensor | None, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor,
                       bias: Tensor | None, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(high, low, norm): both halves of the sum, and its norm in bfloat16."""
    x = high.float() if low is None else _Join.apply(high, low)
    for added in (branch, branch_bias):
        x = x if added is None else x + added
    weight, bias = weight.float(), None if bias is None else bias.float()
    normed = F.rms_norm(x, x.shape[-1:], weight, eps) if rms else F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return *_Split.apply(x), normed.to(torch.bfloat16)
