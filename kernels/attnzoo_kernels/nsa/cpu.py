"""On a CPU by tiles of queries: attention over compressed keys, and the choice of blocks, which has no derivative."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, numbers_of, row_tiles
from attnzoo_kernels.differential.reference import softmax_over_seen
from attnzoo_kernels.nsa.bounds import seen_by
from attnzoo_kernels.nsa.reference import block_scores
from attnzoo_kernels.routed.cpu import best_blocks, sequences

ROWS = 512


def _tiles(call: Call) -> Iterator[Tile]:
    """call.blocks: how many keys each query sees, the first ones."""
    counts = call.blocks.flatten()
    for rows in row_tiles(0, call.len_q, ROWS):
        own = counts[rows]
        fewest, most = own[0].item(), own[-1].item()
        if most:
            yield Tile(rows, [Part(slice(0, most), None if fewest == most else torch.arange(most, device="cpu") < own[:, None])])


_attend = operator("nsa_compressed", "nsa_attention", _tiles)


@dispatch.without_autocast
def attend_compressed_on_cpu(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, cu_seqlens_c: Tensor,
                             size: int, stride: int, softmax_scale: float) -> Tensor:
    """q (total_q, heads, head_dim), k_cmp and v_cmp (total_c, kv_heads, width)."""
    dtype = q.dtype
    q, k_cmp, v_cmp = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k_cmp, v_cmp))
    counts = _count_seen(cu_seqlens_q, cu_seqlens_k, q.shape[0], size, stride)
    out, _ = _attend(q.unsqueeze(0), k_cmp.unsqueeze(0), v_cmp, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_c, blocks=counts,
                     softmax_scale=softmax_scale, exact=dtype.itemsize > 2)
    return out.to(dtype)


def _count(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> Tensor:
    """How many compressed keys each query sees, int32 (total_q, 1, 1)."""
    counts = cu_seqlens_q.new_zeros(total_q)
    for own, len_k in zip(sequences(counts, cu_seqlens_q), cu_seqlens_k.diff().tolist(), strict=True):
        own.copy_(seen_by(torch.arange(len_k - len(own), len_k, device="cpu"), size, stride))
    return counts.view(-1, 1, 1)


_count_seen = autograd.forward_only("nsa_seen_cpu", _count, lambda cu_seqlens_q, _, total_q, *sizes: cu_seqlens_q.new_empty(total_q, 1, 1))


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
        last_token = torch.arange(len(keys), device="cpu") * compress_stride + compress_size - 1
        keys = keys.to(wide).transpose(0, 1).repeat_interleave(q.shape[1] // kv_heads, dim=0)
        for rows in row_tiles(0, len(queries), ROWS):
            position = numbers_of(rows) + len_k - len(queries)
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
