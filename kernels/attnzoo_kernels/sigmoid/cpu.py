"""Sigmoid attention on a CPU: some keys at a time, so that their weights stay in the processor's cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu import by_score
from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window_of, row_tiles, window_span
from attnzoo_kernels.dispatch import without_autocast

KEYS = 512


def _tiles(call: Call) -> Iterator[Tile]:
    for rows in row_tiles(0, call.len_q):
        span = window_span(rows, call)
        parts = [Part(keys, in_window_of(rows, keys, call)) for keys in row_tiles(span.start, span.stop, KEYS)]
        if parts:
            yield Tile(rows, parts)


attend = operator("sigmoid", "sigmoid_attention", _tiles, by_score)


@without_autocast
def sigmoid_attention_cpu(q, k, v, *, window_size, softmax_scale, sigmoid_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k) -> Tensor:
    """Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, _ = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes,
                    softmax_scale=softmax_scale, score_bias=sigmoid_bias, window_size=window_size, exact=dtype.itemsize > 2)
    return out.to(dtype)
