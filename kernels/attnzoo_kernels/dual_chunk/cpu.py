"""Dual Chunk attention on a CPU: queries and keys are rotated to each stage's positions, and the stages are parts of a tile."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window_of, row_tiles
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.dual_chunk.reference import rotate, stage_positions
from attnzoo_kernels.packing import behind_last, token_positions


def _tiles(call: Call) -> Iterator[Tile]:
    size, stages = call.numbers
    first, last = call.diagonal // size, (call.len_k - 1) // size
    for chunk in range(first, last + 1):
        begin = chunk * size
        for rows in row_tiles(max(begin - call.diagonal, 0), min(begin + size - call.diagonal, call.len_q)):
            parts = list(_parts(call, rows, begin, size, stages))
            if parts:
                yield Tile(rows, parts)


def _parts(call: Call, rows: slice, begin: int, size: int, stages: int) -> Iterator[Part]:
    """What the rows of the chunk at `begin` see: of two tokens the later one stands at its stage's position, the other in its chunk."""
    end = call.len_k if call.window[1] < 0 else rows.stop + call.diagonal
    relations = (
        (2, 0, begin - size, {"q_copy": 2}),
        (1, begin - size, begin, {"q_copy": 1}),
        (0, begin, begin + size, {}),
        (1, begin + size, begin + 2 * size, {"k_copy": 1}),
        (2, begin + 2 * size, end, {"k_copy": 2}),
    )
    for stage, first, stop, copy in relations:
        first, stop = max(first, 0), min(stop, end)
        if stages >> stage & 1 and first < stop:
            yield Part(slice(first, stop), in_window_of(rows, slice(first, stop), call), **copy)


attend = operator("dual_chunk", "dual_chunk_attention", _tiles)


@without_autocast
def dual_chunk_attention_cpu(q, k, v, *, cos, sin, geometry, stages, causal, rope_interleaved, logit_multiplier, softmax_scale,
                             cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    if logit_multiplier is not None:
        if cu_seqlens_q is not None:
            logit_multiplier = logit_multiplier.masked_fill(behind_last(cu_seqlens_q, len(logit_multiplier)), 0)
        q = q * logit_multiplier[..., None, None]
    if cu_seqlens_q is None:
        i, j = (torch.arange(k.shape[1] - x.shape[1], k.shape[1], device="cpu") for x in (q, k))
    else:
        i, j = token_positions(cu_seqlens_q, q.shape[0], cu_seqlens_k), token_positions(cu_seqlens_k, k.shape[0])
    queries, keys = ([rotate(x, cos[p], sin[p], rope_interleaved) for p in stage_positions(position, geometry)]
                     for x, position in ((q, i), (k, j)))
    # keys behind their query are the only ones at a later stage's position
    keys = keys[:1] if causal else keys
    out, lse = attend(torch.stack(queries), torch.stack(keys), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      softmax_scale=softmax_scale, window_size=(-1, 0 if causal else -1), exact=dtype.itemsize > 2,
                      numbers=[geometry.chunk, stages])
    return out.to(dtype), lse
