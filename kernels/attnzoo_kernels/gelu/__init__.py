"""GELU of a sum with a bias (Hendrycks and Gimpel 2016, arXiv:1606.08415), the middle of a transformer's MLP."""

import os

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.gelu import ops
from attnzoo_kernels.gelu.reference import bias_gelu_reference

__all__ = ["bias_gelu"]

IMPLEMENTATIONS = ("triton", "reference")


def bias_gelu(x: Tensor, bias: Tensor, *, impl: str | None = None) -> Tensor:
    """y = z Φ(z) with z = x + bias and Φ the normal distribution function, in one pass; backward in one pass too, bias's sum included.

    x: (..., width), float16, bfloat16 or float32 (the reference also takes float64), contiguous: a product whose bias is left to this
    function, which adds it in float32. bias: (width,), contiguous, of any floating point dtype.

    Returns x's shape and dtype. The derivative can be taken once; repeated runs give the same bits.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A path named runs or raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be.
    """
    checks.choice("impl", impl, IMPLEMENTATIONS)
    checks.tensor("x", x)
    checks.tensor("bias", bias)
    if x.dim() < 1 or not x.is_contiguous():
        raise ValueError(f"x: must be (..., width) and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
                         "call .contiguous()")
    if bias.shape != x.shape[-1:] or not bias.is_floating_point() or not bias.is_contiguous():
        raise ValueError(f"bias: must be floating point, contiguous and of shape {tuple(x.shape[-1:])}, got {tuple(bias.shape)} of "
                         f"{bias.dtype} with strides {bias.stride()}")
    if bias.device != x.device:
        raise ValueError(f"bias: must be on x's device {x.device}, got {bias.device}")
    if impl == "reference" or impl is None and not x.is_cuda:
        return bias_gelu_reference(x, bias)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f'x: impl="triton" takes float16, bfloat16 or float32, got {x.dtype}; impl="reference" takes it')
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'impl: "triton" needs CUDA tensors, got {x.device} (on a CPU it runs in the interpreter: TRITON_INTERPRET=1)')
    return ops.bias_gelu(x, bias)
