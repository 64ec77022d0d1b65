"""The kernel that finds a tree's key ranges: what `segments.reference_ranges` does, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.ranges import CAUSAL_TOP_LEFT, COLUMNS

BLOCK = 64


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["parents", "cu_seqlens"])
def tree_ranges_kernel(parents, cu_seqlens, ranges, segments, KIND: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    segment = first + lanes
    after = tl.zeros([BLOCK], tl.int32) + segments
    for start in range(first, segments, BLOCK):
        other = start + lanes
        parent = tl.load(parents + other, mask=other < segments, other=0)
        # [BLOCK, BLOCK]
        behind = (other[None, :] > segment[:, None]) & (other < segments)[None, :] & (parent[None, :] < segment[:, None])
        after = tl.minimum(after, tl.min(tl.where(behind, other[None, :], segments), 1))
    inside = segment < segments
    begin = tl.load(cu_seqlens + segment, mask=inside)
    end = tl.load(cu_seqlens + segment + 1, mask=inside)
    below = tl.load(cu_seqlens + after, mask=inside)
    row = ranges + segment * COLUMNS
    tl.store(row, begin, mask=inside)
    tl.store(row + 1, below, mask=inside)
    tl.store(row + 2, begin, mask=inside)
    tl.store(row + 3, end, mask=inside)
    tl.store(row + 4, KIND, mask=inside)


def launch_ranges(parents: Tensor, cu_seqlens: Tensor) -> Tensor:
    ranges = cu_seqlens.new_empty(len(parents), COLUMNS)
    with on_device_of(ranges):
        tree_ranges_kernel[(triton.cdiv(len(parents), BLOCK),)](parents, cu_seqlens, ranges, len(parents), KIND=CAUSAL_TOP_LEFT,
                                                               COLUMNS=COLUMNS, BLOCK=BLOCK)
    return ranges
