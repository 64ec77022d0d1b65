"""The choice of blocks on a CPU, by tiles of queries, behind torch.compile. It has no derivative."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._cpu.tiles import numbers_of, row_tiles
from attnzoo_kernels.routed.cpu import best_blocks, sequences

ROWS = 128  # queries whose scores are in memory at once


@dispatch.without_autocast
@torch.no_grad()
def _choose(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, slots: int) -> Tensor:
    """q (total_q, heads, width), k (total_k, 1, width); int32 (total_q, heads, slots)."""
    dispatch.note("msa_blocks forward", "cpu")
    chosen = q.new_full((*q.shape[:-1], slots), -1, dtype=torch.int32)
    wide = torch.promote_types(q.dtype, torch.float32)
    by_sequence = (sequences(*x) for x in ((q, cu_seqlens_q), (k, cu_seqlens_k), (chosen, cu_seqlens_q)))
    for queries, keys, own_chosen in zip(*by_sequence, strict=True):
        keys = keys.squeeze(1).to(wide)
        for rows in row_tiles(0, len(queries), ROWS):
            own = (numbers_of(rows) + len(keys) - len(queries)).div(block_size, rounding_mode="floor")
            earlier = max(own[-1].item(), 0)
            scores = (queries[rows].to(wide) @ keys[: earlier * block_size].mT).unflatten(-1, (earlier, block_size)).amax(-1)
            scores = scores.masked_fill((torch.arange(earlier, device="cpu") >= own[:, None])[:, None] | scores.isnan(), -torch.inf)
            own_chosen[rows] = best_blocks(scores, slots)
    return chosen


def _fake_choose(q, k, cu_seqlens_q, cu_seqlens_k, block_size, slots):
    return q.new_empty(*q.shape[:-1], slots, dtype=torch.int32)


choose_on_cpu = autograd.forward_only("msa_blocks_cpu", _choose, _fake_choose)
