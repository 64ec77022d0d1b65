"""The choice of blocks behind torch.compile. It has no derivative. Triton is imported in it."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd


def _choose(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, first: Tensor, bounds_k: Tensor, block_size: int,
            slots: int, means: Tensor | None) -> Tensor:
    from attnzoo_kernels.moba.choose import launch_blocks

    return launch_blocks(q, k, cu_seqlens_q, cu_seqlens_k, first, bounds_k, block_size, slots, means)


def _fake_choose(q, k, cu_seqlens_q, cu_seqlens_k, first, bounds_k, block_size, slots, means):
    return q.new_empty(*q.shape[:-1], slots, dtype=torch.int32)


choose = autograd.forward_only("moba_blocks", _choose, _fake_choose)
