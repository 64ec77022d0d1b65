"""A transformer's MLP with GELU between its two products, which is computed at the end of the products around it."""

from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.gelu_mlp import ops
from attnzoo_kernels.gelu_mlp.reference import gelu_mlp_reference

__all__ = ["MULTIPLE", "gelu_mlp"]

IMPLEMENTATIONS = ("triton", "reference")
APPROXIMATIONS = ("none", "tanh")
MULTIPLE = 8  # of 16 bits: what TMA reads


def gelu_mlp(x: Tensor, up: Tensor, down: Tensor, *, approximate: str = "none", impl: str | None = None) -> Tensor:
    """GELU(x upᵀ) downᵀ. Forward GELU is written with x upᵀ, backward its derivative is multiplied with the gradient as that is made: what
    lies between the products is not read again for it.

    x: (..., width), float16 or bfloat16 (the reference also takes float32 and float64). up: (hidden, width), down: (out, hidden), as
    torch.nn.Linear has them, of x's dtype; for "triton" all sizes are multiples of 8, and the GPU's compute capability is at least 9.0.
    approximate: "none" or "tanh", as of `attnzoo_kernels.bias_gelu`.

    Returns (..., out) in x's dtype. x upᵀ is rounded to it before GELU. The derivative can be taken once; repeated runs give the same
    bits. Not run on a GPU yet: models take it where `benchmarks.gpt` says so.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A path named runs or raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    for name, tensor in (("x", x), ("up", up), ("down", down)):
        checks.tensor(name, tensor)
        if tensor.dtype not in checks.DTYPES or tensor.dtype != x.dtype:
            raise TypeError(f"{name}: must be floating point and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name}: must be on x's device {x.device}, got {tensor.device}")
    if x.dim() < 1 or up.dim() != 2 or down.dim() != 2 or up.shape[1] != x.shape[-1] or down.shape[1] != up.shape[0]:
        raise ValueError(f"up, down: must be (hidden, {x.shape[-1] if x.dim() else 'width'}) and (out, hidden), got {tuple(up.shape)} and "
                         f"{tuple(down.shape)}")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate: must be one of {', '.join(map(repr, APPROXIMATIONS))}, got {approximate!r}")
    if dispatch.takes_reference("gelu_mlp", impl, "x", x, IMPLEMENTATIONS, checks.DTYPES[:2]):
        return gelu_mlp_reference(x, up, down, approximate)
    if any(size % MULTIPLE for size in (*up.shape, *down.shape)):
        raise NotImplementedError(f'up, down: impl="triton" takes sizes that are multiples of {MULTIPLE}, got {tuple(up.shape)} and '
                                  f'{tuple(down.shape)}; impl="reference" takes them')
    return ops.gelu_mlp(x, up, down, approximate == "tanh")[0]
