"""What a launch needs to know of its device and tensors."""

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

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


def architecture(where: Tensor | torch.device) -> int:
    """Compute capability times ten of a device, or of a tensor's; 0 in the interpreter."""
    device = where.device if isinstance(where, Tensor) else where
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    return _capability(device.index)


def tma_takes(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x (..., rows, heads, width): 16-byte base and strides, no broadcast."""
    return x.data_ptr() % 16 == 0 and tma_takes_layout(x.shape, x.stride(), x.element_size())


def tma_takes_layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """What tma_takes asks of shape and strides."""
    return 0 not in shape and all(n == 1 or (s > 0 and s * itemsize % 16 == 0) for n, s in zip(shape[:-1], strides[:-1], strict=True))


def descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Host descriptor of (batch, seqlen, heads, width) or (total, heads, width), read in tiles [1, 1, rows, width] of (batch, heads,
    seqlen, width)."""
    return descriptor_like(_descriptor_template(x.shape, x.stride(), 16 // x.element_size(), rows, width), x)


@functools.lru_cache(maxsize=1024)
def _descriptor_template(shape: tuple[int, ...], strides: tuple[int, ...], aligned: int, rows: int, width: int) -> TensorDescriptor:
    if len(shape) == 3:
        shape, strides = (1, *shape), (aligned, *strides)
    order = (0, 2, 1, 3)
    strides = [strides[d] if shape[d] > 1 or d == 3 else aligned for d in order]
    return TensorDescriptor(torch.empty(0), [shape[d] for d in order], strides, [1, 1, rows, width])


def descriptor_like(template: TensorDescriptor, x: Tensor) -> TensorDescriptor:
    """The template's layout at another address, without its constructor's checks, which cost as much as a launch."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(template.__dict__)
    made.base = x
    return made


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, seqlen, heads, width), or of (total, heads, width) with batch 0."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def are_aligned(*tensors: Tensor) -> bool:
    """Whether all begin at 16 bytes, on which Triton specialises a kernel."""
    return not any(x.data_ptr() & 15 for x in tensors)


def on_device_of(x: Tensor):
    """Triton launches on the current device; this makes it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else contextlib.nullcontext()


@dataclass
class Launch:
    """A kernel with all that stays the same from call to call of one layout: the caller keeps one for each layout and alignment.

    Triton's own launch looks at every argument again; from the second call on this goes to the compiled kernel, in half the host time.
    `constants` stand in the order of the kernel's signature.
    """

    kernel: Any
    programs: int
    scalars: tuple
    constants: dict
    num_warps: int
    num_stages: int
    compiled: Any = None

    def __call__(self, *tensors):
        if self.compiled is not None:
            self.compiled[(self.programs, 1, 1)](*tensors, *self.scalars, *self.constants.values())
        else:  # the interpreter compiles nothing and always comes here
            self.compiled = self.kernel[(self.programs,)](*tensors, *self.scalars, **self.constants, num_warps=self.num_warps,
                                                          num_stages=self.num_stages)
