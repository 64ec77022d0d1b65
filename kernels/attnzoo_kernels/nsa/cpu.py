"""The choice of blocks on a CPU, by tiles of queries, behind torch.compile. It has no derivative."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._cpu.tiles import row_tiles
from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.nsa.reference import block_scores
from attnzoo_kernels.routed.cpu import best_blocks, sequences

ROWS = 512


@dispatch.without_autocast
@torch.no_grad()
def _choose(
    q: Tensor, k_cmp: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor, compress_size: int, compress_stride: int,
    block_size: int, slots: int, softmax_scale: float,
) -> Tensor:
    """q (total_q, heads, head_dim), k_cmp (total_c, kv_heads, head_dim); int32 (total_q, kv_heads, slots)."""
    kv_heads = k_cmp.shape[1]
    chosen = q.new_full((q.shape[0], kv_heads, slots), -1, dtype=torch.int32)
    wide = torch.promote_types(q.dtype, torch.float32)
    by_sequence = zip(*(sequences(*x) for x in ((q, cu_seqlens_q), (k_cmp, cu_seqlens_c), (chosen, cu_seqlens_q))), strict=True)
    for (queries, keys, own_chosen), len_k in zip(by_sequence, cu_seqlens_k.diff().tolist(), strict=True):
        last_token = torch.arange(len(keys)) * compress_stride + compress_size - 1
        keys = keys.to(wide).transpose(0, 1).repeat_interleave(q.shape[1] // kv_heads, dim=0)
        for rows in row_tiles(0, len(queries), ROWS):
            position = torch.arange(rows.start, rows.stop) + len_k - len(queries)
            own = position.div(block_size, rounding_mode="floor")
            seen = last_token <= position[:, None]
            count = int(seen[-1].sum())
            scores = (queries[rows].to(wide).transpose(0, 1) @ keys[:, :count].mT) * softmax_scale
            weights, _ = softmax_over_seen(scores.unsqueeze(0), seen[:, :count])
            scores = block_scores(weights, own[None], kv_heads, max(own[-1].item(), 0), compress_size, compress_stride, block_size)
            own_chosen[rows] = best_blocks(scores[0], slots)
    return chosen


def _fake_choose(q, k_cmp, cu_seqlens_q, cu_seqlens_k, cu_seqlens_c, compress_size, compress_stride, block_size, slots, *_):
    return q.new_empty(q.shape[0], k_cmp.shape[1], slots, dtype=torch.int32)


choose_on_cpu = autograd.forward_only("nsa_blocks_cpu", _choose, _fake_choose)
