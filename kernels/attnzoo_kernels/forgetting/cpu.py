"""Forgetting attention on a CPU: keys before a tile's queries and their own are parts; keys whose weights cannot count are left out."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, causal_parts, in_window_of, row_tiles, window_span
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.forgetting.gates import NEGLIGIBLE

ROWS = 256  # queries of a tile: with fewer, keys are copied to more channels more often


def _tiles(call: Call) -> Iterator[Tile]:
    (prune,) = call.numbers
    for rows in row_tiles(max(-call.diagonal, 0), call.len_q, ROWS):
        keys = window_span(rows, call)
        first = [keys.start]
        if prune:
            positions = slice(rows.start + call.diagonal, rows.stop + call.diagonal)
            first = [max(keys.start, key) for key in call.gates.first_key(positions, math.log(call.len_k) + NEGLIGIBLE)]
        if min(first) == max(first):
            yield Tile(rows, _parts(call, rows, slice(first[0], keys.stop)))
        else:
            for head, key in enumerate(first):
                yield Tile(rows, _parts(call, rows, slice(key, keys.stop)), slice(head, head + 1))


def _parts(call: Call, rows: slice, keys: slice) -> list[Part]:
    own = slice(rows.start + call.diagonal, rows.stop + call.diagonal)
    if not call.fused or call.window[0] >= 0 or keys.start > own.start:
        return [Part(keys, in_window_of(rows, keys, call))]
    return causal_parts(keys.start, own)


attend = operator("forgetting", "forgetting_attention", _tiles)


@without_autocast
def forgetting_attention_cpu(q, k, v, log_f, *, window_size, softmax_scale, prune, cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, log_f=log_f, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      softmax_scale=softmax_scale, window_size=window_size, exact=dtype.itemsize > 2, numbers=[prune])
    return out.to(dtype), lse
