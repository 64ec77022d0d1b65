"""Residual addition and norm in one pass, forward and backward, over a residual stream in float32 that is stored in two 16-bit halves."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.add_norm import ops
from attnzoo_kernels.add_norm.reference import add_norm_reference

__all__ = ["Stream", "add_norm"]

IMPLEMENTATIONS = ("triton", "reference")
NORMS = ("layernorm", "rmsnorm")
WIDEST = 16384  # a program holds a whole row in registers


class Stream(NamedTuple):
    """x in float32, stored as two tensors of its shape. As 32-bit integers, x's bits are those of `high` (bfloat16), shifted left by 16,
    plus `low` (int16).

    `high` is x rounded to nearest, and carries the gradient. low=None: `high` is x itself, in float32.
    """

    high: Tensor
    low: Tensor | None = None


def add_norm(stream: Stream, branch: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, branch_bias: Tensor | None = None,
             eps: float = 1e-5, kind: str = "layernorm", last: bool = False, impl: str | None = None) -> tuple[Stream, Tensor]:
    """Adds `branch` to a residual stream and normalises the sum: x = stream + branch, and (x - mean) / std * weight + bias.

    stream: a `Stream` of shape (..., width). branch: (..., width), bfloat16; None adds nothing. weight, bias, branch_bias: (width,), all
    float32 or all bfloat16.
    branch_bias: is added, too. Usually the branch is a product whose bias is left to this function; its gradient then takes no pass more.
    kind: "layernorm" (Ba et al. 2016, arXiv:1607.06450) or "rmsnorm" (Zhang and Sennrich 2019, arXiv:1910.07467), which has no bias.
    last: the stream is not needed after this call; None is returned in its place. It may then be `Stream(x)` with x in bfloat16, too: in
    post-norm blocks each norm is the next stream.

    Returns (the new stream, its norm in bfloat16). Sums and norms are computed in float32, and the stream keeps all bits of its float32.
    Gradients of the stream are rounded to bfloat16 between calls, as those of branches are. The backward computes the norm from `high`,
    not from x. The derivative can be taken once; repeated runs give the same bits.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    checks.tensor("weight", weight)
    checks.choice("kind", kind, NORMS)
    checks.flag("last", last)
    checks.finite("eps", eps)
    if not isinstance(stream, tuple) or len(stream) != 2:
        raise TypeError(f"stream: must be a Stream, got {type(stream).__name__}")
    high, low = stream
    checks.tensor("stream.high", high)
    wanted = (torch.float32, torch.bfloat16)[: 1 + last] if low is None else (torch.bfloat16,)
    if high.dtype not in wanted or high.dim() < 1:
        raise TypeError(f"stream.high: must be {' or '.join(map(str, wanted))} of shape (..., width) "
                        f"{'without' if low is None else 'with'} stream.low, got {high.dtype} of shape {tuple(high.shape)}")
    if bias is not None and kind == "rmsnorm":
        raise ValueError("bias: must be None for kind='rmsnorm'")
    of_weight = weight.dtype if weight.dtype == torch.bfloat16 else torch.float32
    for name, x, dtype, shape in (("stream.low", low, torch.int16, high.shape), ("branch", branch, torch.bfloat16, high.shape),
                                  ("weight", weight, of_weight, high.shape[-1:]), ("bias", bias, of_weight, high.shape[-1:]),
                                  ("branch_bias", branch_bias, of_weight, high.shape[-1:])):
        if x is None:
            continue
        checks.tensor(name, x, "a tensor or None")
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(f"{name}: must be {dtype} of shape {tuple(shape)}, got {x.dtype} of shape {tuple(x.shape)}")
        if x.device != high.device:
            raise ValueError(f"{name}: must be on the stream's device {high.device}, got {x.device}")
    if dispatch.takes_reference("add_norm", impl, "stream.high", high, IMPLEMENTATIONS):
        high, low, normed = add_norm_reference(high, low, branch, branch_bias, weight, bias, eps, kind == "rmsnorm")
    else:
        if high.shape[-1] > WIDEST:
            raise NotImplementedError(f'stream: impl="triton" takes a width of at most {WIDEST}, got {high.shape[-1]}; impl="reference" '
                                      "takes it")
        high, low, normed, *_ = ops.add_norm(high, low, branch, branch_bias, weight, bias, eps, kind == "rmsnorm", last)
    return None if last else Stream(high, low), normed
