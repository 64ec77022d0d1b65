"""What a launch needs to know of its device and tensors."""

import functools
import os

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def block_width(width: int) -> int:
    """The power of two that a tile's width is padded to; matrix instructions need 16."""
    return max(16, next_power_of_2(width))


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def architecture(x: Tensor) -> int:
    """Compute capability times ten of the tensor's device; 0 in the interpreter."""
    if not x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    return _capability(x.device.index)


def tma_takes(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x (..., rows, heads, width): 16-byte base and strides, no broadcast."""
    dimensions = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(n == 1 or (s > 0 and s * x.element_size() % 16 == 0) for n, s in dimensions)


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Host descriptor of (batch, seqlen, heads, width) or (total, heads, width), read in tiles [1, 1, rows, width] of [batch, heads, seqlen, width]."""
    if x.dim() == 3:
        x = x.unsqueeze(0)
    x = x.transpose(1, 2)
    aligned = 16 // x.element_size()
    strides = [s if n > 1 else aligned for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, seqlen, heads, width), or of (total, heads, width) with batch 0."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
