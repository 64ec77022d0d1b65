"""Output layer and cross-entropy in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.fp8 import linear as fp8_linear


@without_autocast
def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, token_weights: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, vocab_size: int, fp8: bool,
) -> Tensor:
    """The loss of each token, in float32 (float64 for float64)."""
    bias = None if bias is None else bias.to(x.dtype)
    logits = (fp8_linear(x, weight, bias) if fp8 else F.linear(x, weight.to(x.dtype), bias))[..., :vocab_size]
    logits = logits.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    known = (targets >= 0) & (targets < vocab_size)
    losses = F.cross_entropy(logits, torch.where(known, targets, 0).flatten(), reduction="none", label_smoothing=label_smoothing)
    if z_loss > 0:
        losses = losses + z_loss * logits.logsumexp(-1).square()
    losses = losses.view(targets.shape)
    if token_weights is not None:
        losses = losses * token_weights
    return torch.where(targets == ignore_index, 0, torch.where(known, losses, torch.nan))
