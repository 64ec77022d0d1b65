"""From a tree's segments to key ranges, on the host's side and in plain PyTorch."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd
from attnzoo_kernels.ranges import CAUSAL_TOP_LEFT, COLUMNS


def check_tree(parents: Tensor) -> None:
    """Segments lie depth first; waits for the device."""
    path: list[int] = []
    for segment, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            before = f"{segment - 1} or a segment above it" if segment else "there is none before"
            raise ValueError(f"parents: segments must lie depth first, each behind its parent's others: segment {segment} must have "
                             f"-1 for a parent, or {before}, got {parent}")
        path.append(segment)


def reference_ranges(parents: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Of each segment (begin, end of the last segment below, begin, end, causal from the top left), int32 (segments, 5)."""
    segment = torch.arange(len(parents), device=parents.device)
    # the first segment behind that hangs on one before
    ends = [torch.where((segment > some[:, None]) & (parents < some[:, None]), segment, len(parents)).amin(1)
            for some in segment.split(1024)]
    begin, end, below = cu_seqlens[:-1], cu_seqlens[1:], cu_seqlens[torch.cat(ends)]
    return torch.stack([begin, below, begin, end, torch.full_like(begin, CAUSAL_TOP_LEFT)], 1)


def _ranges(parents: Tensor, cu_seqlens: Tensor) -> Tensor:
    from attnzoo_kernels.tree.kernel import launch_ranges

    return launch_ranges(parents, cu_seqlens)


make_ranges = autograd.forward_only("tree_ranges", _ranges, lambda parents, cu_seqlens: cu_seqlens.new_empty(len(parents), COLUMNS))
