"""A step of AdamW for many tensors in one launch, which also writes their copies in bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.adamw.reference import adamw_reference

__all__ = ["AdamWTensors", "adamw_"]

IMPLEMENTATIONS = ("triton", "reference")


@dataclass(frozen=True, eq=False)
class AdamWTensors:
    """What a step works on, one of each for each parameter, contiguous and on one device.

    weights, means, squares: float32, the parameters and the running means of gradients and of their squares. gradients: of one dtype,
    float32 or bfloat16. copies: bfloat16, or None.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    copies: Sequence[Tensor] | None = None


def adamw_(tensors: AdamWTensors, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int,
           scale: Tensor | None = None, impl: str | None = None) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) in place, as torch.optim.AdamW makes it.

    step: of how many steps this is the last, from 1. scale: float32, (), a factor of all gradients, which stay as they are.
    Not run on a GPU yet.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A path named runs or raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be.
    """
    checks.integer("step", step, 1)
    for name in ("weights", "gradients", "means", "squares", "copies"):
        own = getattr(tensors, name)
        if own is None and name == "copies":
            continue
        if len(own) != len(tensors.weights):
            raise ValueError(f"tensors.{name}: must be {len(tensors.weights)}, as weights are, got {len(own)}")
        dtypes = {"gradients": (torch.float32, torch.bfloat16), "copies": (torch.bfloat16,)}.get(name, (torch.float32,))
        for x, weight in zip(own, tensors.weights, strict=True):
            if x.dtype not in dtypes or x.dtype != own[0].dtype:
                raise TypeError(f"tensors.{name}: must be all {' or all '.join(map(str, dtypes))}, got {x.dtype}")
            if x.shape != weight.shape or not x.is_contiguous() or x.device != weight.device:
                raise ValueError(f"tensors.{name}: must be contiguous, on {weight.device} and of shape {tuple(weight.shape)} as the weight "
                                 f"is, got {tuple(x.shape)} with strides {x.stride()} on {x.device}")
    if scale is not None and (scale.dtype != torch.float32 or scale.dim()):
        raise TypeError(f"scale: must be float32 of shape (), got {scale.dtype} of shape {tuple(scale.shape)}")
    if not tensors.weights:
        return
    if dispatch.takes_reference("adamw", impl, "tensors.weights", tensors.weights[0], IMPLEMENTATIONS):
        adamw_reference(tensors, lr, betas, eps, weight_decay, step, scale)
    else:
        from attnzoo_kernels.adamw.kernel import launch

        dispatch.note("adamw forward", "triton")
        launch(tensors, lr, betas, eps, weight_decay, step, scale)
