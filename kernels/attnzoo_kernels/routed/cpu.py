"""Routed attention on a CPU: own blocks are tiles, and so is each chosen block with the queries that read it, whose results are joined."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window_of, row_tiles
from attnzoo_kernels.dispatch import without_autocast

ROWS = 128  # queries whose own blocks are read at once, at least


def _tiles(call: Call) -> Iterator[Tile]:
    (size,) = call.numbers
    block = torch.arange(call.len_k) // size
    if not call.fused:
        yield from _masked_tiles(call, block)
        return
    first = max(-call.diagonal, 0)
    together = size * -(-ROWS // size)
    for position in range((first + call.diagonal) // together * together, call.len_k, together):
        rows = slice(max(position - call.diagonal, first), min(position + together - call.diagonal, call.len_q))
        keys = slice(position, rows.stop + call.diagonal)
        if together == size:
            seen = in_window_of(rows, keys, call)
        else:
            seen = (block[keys] == block[_positions(call, rows), None]) & (torch.arange(call.len_k)[keys] <= _positions(call, rows)[:, None])
        whole = together == size and rows.stop - rows.start == keys.stop - keys.start
        yield Tile(rows, [Part(keys, None if whole else seen, triangle=whole)])
    yield from _chosen_tiles(call, size)


def _positions(call: Call, rows: slice) -> Tensor:
    return torch.arange(rows.start, rows.stop) + call.diagonal


def _chosen_tiles(call: Call, size: int) -> Iterator[Tile]:
    """By chooser and block, the queries that chose it."""
    choosers, count = call.blocks.shape[1], -(-call.len_k // size)
    own = _positions(call, slice(0, call.len_q)).div(size, rounding_mode="floor")
    blocks = call.blocks.permute(1, 0, 2)
    there = (blocks >= 0) & (blocks < own[:, None])
    chosen = torch.where(there, blocks + torch.arange(choosers)[:, None, None] * count, choosers * count).flatten()
    query = torch.arange(call.len_q).repeat_interleave(blocks.shape[2]).repeat(choosers)[chosen.argsort(stable=True)]
    ends = torch.bincount(chosen, minlength=choosers * count + 1).cumsum(0).tolist()
    group = call.heads // choosers
    for number, rows in enumerate(query[: ends[-2]].tensor_split(ends[:-2])):
        chooser, block = divmod(number, count)
        if rows.numel():
            yield Tile(rows, [Part(slice(block * size, (block + 1) * size))], slice(chooser * group, (chooser + 1) * group))


def _masked_tiles(call: Call, block: Tensor) -> Iterator[Tile]:
    """All keys before a tile's queries, of which those that no block has are hidden."""
    for rows in row_tiles(max(-call.diagonal, 0), call.len_q):
        keys, position = slice(0, rows.stop + call.diagonal), _positions(call, rows)[:, None]
        # (choosers, rows, blocks)
        read = (call.blocks[rows].transpose(0, 1).unsqueeze(-1) == torch.arange(block[-1] + 1)).any(-2)
        read |= torch.arange(block[-1] + 1) == block[position]
        seen = read[..., block[keys]] & (torch.arange(keys.stop) <= position)
        yield Tile(rows, [Part(keys, seen.repeat_interleave(call.heads // len(seen), dim=0))])


attend = operator("routed", "routed_attention", _tiles)


@without_autocast
def routed_attention_cpu(q, k, v, blocks, *, block_size, softmax_scale, cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, blocks=blocks,
                      softmax_scale=softmax_scale, window_size=(-1, 0), exact=dtype.itemsize > 2, numbers=[block_size])
    return out.to(dtype), lse


def best_blocks(scores: Tensor, slots: int) -> Tensor:
    """The blocks of the best scores, int32 (..., slots), of equal ones the earlier; -1 for scores of -inf and where there are fewer. Writes
    to the scores."""
    blocks = scores.new_full((*scores.shape[:-1], slots), -1, dtype=torch.int32)
    for slot in range(min(slots, scores.shape[-1])):
        best, block = scores.max(-1, keepdim=True)  # the first of equal ones
        blocks[..., slot] = torch.where(best > -torch.inf, block, -1)[..., 0]
        scores.scatter_(-1, block, -torch.inf)
    return blocks
