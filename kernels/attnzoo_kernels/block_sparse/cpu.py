"""Block-sparse attention on a CPU: the keys of a few rows of blocks are gathered and attended to at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window, numbers_of, row_tiles, window_span
from attnzoo_kernels.dispatch import without_autocast

ROWS = 64  # queries that share their keys, at least


def _tiles(call: Call) -> Iterator[Tile]:
    block_q, block_k = call.numbers
    for head, layout in enumerate(call.layout):
        heads = slice(head, head + 1) if len(call.layout) > 1 else slice(None)
        for rows in row_tiles(0, call.len_q, max(block_q, ROWS)):
            span = window_span(rows, call)
            kept = layout[rows.start // block_q : -(-rows.stop // block_q)].any(0)
            keys = numbers_of(span)
            keys = keys[kept[keys // block_k]]
            if keys.numel():
                seen = in_window(rows, keys, call) & layout[numbers_of(rows)[:, None] // block_q, keys // block_k]
                yield Tile(rows, [Part(_slice_if_one(keys), None if seen.all() else seen)], heads)


def _slice_if_one(keys: Tensor) -> slice | Tensor:
    """Keys without a gap are read in place."""
    first, last = keys[0].item(), keys[-1].item()
    return slice(first, last + 1) if last - first + 1 == keys.numel() else keys


attend = operator("block_sparse", "block_sparse_attention", _tiles)


@without_autocast
def block_sparse_attention_cpu(q, k, v, mask, *, block_q, block_k, window_size, softmax_scale, cu_seqlens_q,
                               cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, layout=mask,
                      softmax_scale=softmax_scale, window_size=window_size, exact=dtype.itemsize > 2, numbers=[block_q, block_k])
    return out.to(dtype), lse
