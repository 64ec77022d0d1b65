"""The choice of blocks on a CPU, by tiles of queries, behind torch.compile. It has no derivative."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._cpu.tiles import numbers_of, row_tiles
from attnzoo_kernels.routed.cpu import best_blocks, sequences

ROWS = 512


@dispatch.without_autocast
@torch.no_grad()
def _choose(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, slots: int, means: Tensor | None,
            starts: Tensor | None) -> Tensor:
    """q (total_q, heads, head_dim), k (total_k, kv_heads, head_dim); int32 (total_q, heads, slots). means: (blocks, kv_heads, head_dim),
    starts: (sequences,), the index of each sequence's first block; both None if they are not known."""
    dispatch.note("moba_blocks forward", "cpu")
    chosen = q.new_full((*q.shape[:-1], slots), -1, dtype=torch.int32)
    wide = torch.promote_types(q.dtype, torch.float32)
    by_sequence = (sequences(*x) for x in ((q, cu_seqlens_q), (k, cu_seqlens_k), (chosen, cu_seqlens_q)))
    for sequence, (queries, keys, own_chosen) in enumerate(zip(*by_sequence, strict=True)):
        count = len(keys) // block_size  # no query comes behind a last one that is not whole
        if means is None:
            own_means = keys[: count * block_size].to(wide).unflatten(0, (count, block_size)).mean(1)
        else:
            own_means = means[starts[sequence] :]
        for rows in row_tiles(0, len(queries), ROWS):
            own = (numbers_of(rows) + len(keys) - len(queries)).div(block_size, rounding_mode="floor")
            earlier = max(own[-1].item(), 0)
            grouped = queries[rows].to(wide).unflatten(1, (k.shape[1], -1))
            scores = torch.einsum("ikgd,nkd->ikgn", grouped, own_means[:earlier]).flatten(1, 2)
            scores = scores.masked_fill((torch.arange(earlier, device="cpu") >= own[:, None])[:, None] | scores.isnan(), -torch.inf)
            own_chosen[rows] = best_blocks(scores, slots)
    return chosen


def _fake_choose(q, k, cu_seqlens_q, cu_seqlens_k, block_size, slots, means, starts):
    return q.new_empty(*q.shape[:-1], slots, dtype=torch.int32)


choose_on_cpu = autograd.forward_only("moba_blocks_cpu", _choose, _fake_choose)
