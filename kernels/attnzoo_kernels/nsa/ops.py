"""The choice of blocks behind torch.compile. It has no derivative. Triton is imported in it."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd


def _choose(
    q: Tensor, k_cmp: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor, compress_size: int,
    compress_stride: int, block_size: int, slots: int, softmax_scale: float,
) -> Tensor:
    from attnzoo_kernels.nsa.choose import launch_blocks

    return launch_blocks(q, k_cmp, lse.contiguous(), cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, compress_size, compress_stride, block_size,
                         slots, softmax_scale)


def _fake_choose(q, k_cmp, lse, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, compress_size, compress_stride, block_size, slots, *_):
    return q.new_empty(q.shape[0], k_cmp.shape[1], slots, dtype=torch.int32)


choose = autograd.forward_only("nsa_blocks", _choose, _fake_choose)
