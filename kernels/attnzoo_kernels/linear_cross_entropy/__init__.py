"""The output layer and its loss in one operator. Logits are made for some thousand tokens at a time; loss and gradients are computed from
each such chunk at once."""

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.fp8 import MULTIPLE
from attnzoo_kernels.linear_cross_entropy import ops
from attnzoo_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy"]

IMPLEMENTATIONS = ("triton", "reference")
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, token_weights: Tensor | None = None,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    vocab_size: int | None = None, fp8: bool = False, impl: str | None = None,
) -> Tensor:
    """Cross-entropy of softmax(x weightᵀ + bias) against `targets`, in nats; the logits of all tokens are never in memory together.

    x: (..., hidden), float16, bfloat16 or float32 (the reference also takes float64). weight: (rows, hidden) as torch.nn.Linear has it, of
    x's dtype, or float32, which is copied to x's dtype for the product. targets: int64 (...), classes below vocab_size. bias: (rows,).
    token_weights: float32 (...), multiplies each token's loss. Only the reference has a gradient for it.
    reduction: "sum", "none" (losses as `targets`), or "mean", the sum over the tokens that count, divided by their number, or by the sum
        of their token_weights; NaN if that is 0.
    ignore_index: tokens with this target do not count: their loss and gradients are zero. Any other target that is no class gives NaN.
    label_smoothing: the probability that is spread evenly over all classes, as in torch.nn.functional.cross_entropy.
    z_loss: z_loss times the squared log-sum-exp of a token's logits is added to its loss (PaLM, arXiv:2204.02311).
    softcap: if above 0, logits l become softcap * tanh(l / softcap) (Gemma 2, arXiv:2408.00118).
    vocab_size: number of classes, by default all rows of weight. The rows after these are padding, and their gradients are zero.
    fp8: use products of 8-bit floats (`attnzoo_kernels.fp8`). Gradients of logits are rounded to e5m2 with one scale, which is set by the
        largest of token_weights. z_loss must be 0, and both sizes of weight must be multiples of 16.

    Returns float32: () or, for "none", the shape of targets. Products take x's dtype and sum in float32; weight's gradient is added up
    in float32. For "mean" and "sum" the forward computes the gradients with the loss (three products); for "none" the backward computes the
    logits again (four). The derivative can be taken once; repeated runs give the same bits.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    vocab_size = _check(x, weight, targets, bias, token_weights, reduction, ignore_index, vocab_size)
    checks.probability("label_smoothing", label_smoothing)
    checks.non_negative("z_loss", z_loss)
    checks.non_negative("softcap", softcap)
    checks.flag("fp8", fp8)
    if fp8 and (z_loss or any(size % MULTIPLE for size in weight.shape)):
        raise ValueError(f"fp8: needs z_loss=0 and sizes of weight that are multiples of {MULTIPLE}, got z_loss={z_loss} and shape "
                         f"{tuple(weight.shape)}")
    if fp8 and x.dtype == torch.float64:
        raise TypeError("fp8: x must be float16, bfloat16 or float32, got torch.float64")
    numbers = ignore_index, label_smoothing, z_loss, softcap, vocab_size, fp8
    if dispatch.takes_reference("linear_cross_entropy", impl, "x", x, IMPLEMENTATIONS):
        losses = linear_cross_entropy_reference(x, weight, targets, bias, token_weights, *numbers)
        loss = losses if reduction == "none" else losses.sum()
    else:
        checks.no_gradient(token_weights=token_weights)
        flat = None if token_weights is None else token_weights.flatten()
        inputs = x.flatten(0, -2), weight, bias, targets.flatten(), flat, *numbers
        loss = ops.losses(*inputs).view(targets.shape) if reduction == "none" else ops.summed(*inputs)
    if reduction == "mean":
        counted = targets != ignore_index
        total = counted.sum() if token_weights is None else torch.where(counted, token_weights.to(loss.dtype), 0).sum()
        # the mean over no tokens is NaN, and its gradients are zeros
        loss = torch.where(total == 0, torch.nan, loss / torch.where(total == 0, 1, total))
    return loss


def _check(x, weight, targets, bias, token_weights, reduction, ignore_index, vocab_size) -> int:
    for name, value in (("x", x), ("weight", weight), ("targets", targets)):
        checks.tensor(name, value)
    if x.dtype not in checks.DTYPES or x.dim() < 2:
        raise TypeError(f"x: must be floating point and (..., hidden), got {x.dtype} of shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight: must be {x.dtype} or float32 of shape (rows, {x.shape[-1]}), got {weight.dtype} of shape "
                         f"{tuple(weight.shape)}")
    if targets.dtype != torch.int64 or targets.shape != x.shape[:-1]:
        raise ValueError(f"targets: must be int64 of shape {tuple(x.shape[:-1])}, got {targets.dtype} of shape {tuple(targets.shape)}")
    for name, value, shape in (("bias", bias, weight.shape[:1]), ("token_weights", token_weights, targets.shape)):
        if value is None:
            continue
        checks.tensor(name, value)
        if value.shape != shape or value.dtype not in checks.DTYPES:
            raise ValueError(f"{name}: must be floating point of shape {tuple(shape)}, got {value.dtype} of shape {tuple(value.shape)}")
    for name, value in (("weight", weight), ("targets", targets), ("bias", bias), ("token_weights", token_weights)):
        if value is not None and value.device != x.device:
            raise ValueError(f"{name}: must be on x's device {x.device}, got {value.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    checks.integer("ignore_index", ignore_index)
    if vocab_size is None:
        return weight.shape[0]
    checks.integer("vocab_size", vocab_size, 1)
    if vocab_size > weight.shape[0]:
        raise ValueError(f"vocab_size: must be at most weight's {weight.shape[0]} rows, got {vocab_size}")
    return vocab_size
