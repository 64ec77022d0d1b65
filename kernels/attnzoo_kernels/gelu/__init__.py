"""GELU of a sum with a bias (Hendrycks and Gimpel 2016, arXiv:1606.08415), the middle of a transformer's MLP."""

from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.gelu import ops
from attnzoo_kernels.gelu.reference import bias_gelu_reference

__all__ = ["bias_gelu"]

IMPLEMENTATIONS = ("triton", "reference")
APPROXIMATIONS = ("none", "tanh")


def bias_gelu(x: Tensor, bias: Tensor | None, *, approximate: str = "none", impl: str | None = None) -> Tensor:
    """y = z Φ(z) with z = x + bias and Φ the normal distribution function, in one pass. So is the backward, with the gradient of bias.

    x: (..., width), float16, bfloat16 or float32 (the reference also takes float64), contiguous. Usually it is a product whose bias is left
    to this function. bias: (width,), contiguous, of any floating point dtype; None is no bias. The Triton path adds it in float32, the
    reference in x's dtype.
    approximate: "none", or "tanh" for GPT-2's y = z (1 + tanh(sqrt(2 / π) (z + 0.044715 z³))) / 2.

    Returns x's shape and dtype. The derivative can be taken once; repeated runs give the same bits.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.tensor("x", x)
    if bias is not None:
        checks.tensor("bias", bias, "a tensor or None")
    if x.dim() < 1 or not x.is_contiguous():
        raise ValueError(f"x: must be (..., width) and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
                         "call .contiguous()")
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"x: must be float16, bfloat16, float32 or (by the reference) float64, got {x.dtype}")
    if bias is not None and (bias.shape != x.shape[-1:] or not bias.is_floating_point() or not bias.is_contiguous()):
        raise ValueError(f"bias: must be floating point, contiguous and of shape {tuple(x.shape[-1:])}, got {tuple(bias.shape)} of "
                         f"{bias.dtype} with strides {bias.stride()}")
    if bias is not None and bias.device != x.device:
        raise ValueError(f"bias: must be on x's device {x.device}, got {bias.device}")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate: must be one of {', '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}")
    if dispatch.takes_reference("bias_gelu", impl, "x", x, IMPLEMENTATIONS):
        return bias_gelu_reference(x, bias, approximate)
    return ops.bias_gelu(x, bias, approximate == "tanh")
