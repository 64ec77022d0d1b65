"""Kernels whose warps Triton 3.6's compiler specialises on Hopper: one group of four warps loads, two keep 64 rows each.

The compiler makes the groups' code from an ordinary loop (`warp_specialize`), in ways that a kernel has to follow:

- it halves tiles of 128 rows between the two groups, and their descriptors' blocks, but not the boxes that the host encodes:
  `HalvedLaunch`; rows must be such a descriptor's first dimension: `side_by_side`. Triton 3.7 refuses it;
- a loop with an `else` is left as it is, and a second loop comes out wrong: so there is one, inside the loop over a program's tiles;
- it makes barriers that nobody waits for: `invalidated`.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attnzoo_kernels._triton.launch import Launch, descriptor_like, tma_takes_layout

COMPILES = triton.__version__.startswith("3.6.")


@triton.jit
def invalidated(x):
    """x, when the two words at the beginning of shared memory are barriers no more. The first load of a kernel must need it.

    The compiler makes barriers there that nobody waits for, and lays tiles over them. A program that is stopped for another process and
    resumed would not find the tiles as they were.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
        " @first mbarrier.inval.shared::cta.b64 [global_smem]; @first mbarrier.inval.shared::cta.b64 [global_smem+8];"
        " fence.proxy.async.shared::cta; mov.b32 $0, $1; }", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def passed(x):
    """A float32 tile as it is: what a product hands to one elsewhere must pass an operation, or the compiler would send it to all warps."""
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=True, pack=1)


def lies_side_by_side(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether side_by_side takes (batch, seqlen, heads, width) in 16 bits with these strides."""
    batch, seqlen, heads, _ = shape
    return tma_takes_layout(shape, strides, 2) and (batch == 1 or strides[0] == seqlen * strides[1]) and strides[1] >= heads * strides[2]


def side_by_side(shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> TensorDescriptor:
    """Descriptor of tiles [rows, width], without an address: rows of all sequences by columns of all heads."""
    batch, seqlen, heads, width = shape
    return TensorDescriptor(torch.empty(0), [batch * seqlen, (heads - 1) * strides[2] + width], [strides[1], 1], [rows, width])


@dataclass
class HalvedLaunch(Launch):
    """A launch of such a kernel. It is called as the ordinary kernel, and hands on the tensors at the positions `takes`.

    templates: among those, by position, descriptors that `blocks` does not make; halved: which the compiler halves.
    """

    takes: tuple[int, ...] = ()
    templates: dict[int, TensorDescriptor] = field(default_factory=dict)
    halved: tuple[int, ...] = ()

    def _taken(self, tensors: tuple) -> list:
        return [descriptor_like(self.templates[n], tensors[m]) if n in self.templates else tensors[m] for n, m in enumerate(self.takes)]

    def compile(self, *tensors):
        compiled = super().compile(*self._taken(tensors))
        descriptors = sorted([*self.blocks, *self.templates])
        for n in self.halved:
            compiled.metadata.tensordesc_meta[descriptors.index(n)]["block_size"][0] = self.templates[n].block_shape[0] // 2
        return compiled

    def __call__(self, *tensors):
        if self.compiled is None:
            self.compiled = self.compile(*tensors)
            if self.other is not None:
                self.other.compile(*tensors)
        super().__call__(*self._taken(tensors))
