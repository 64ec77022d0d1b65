"""Routed attention on a CPU. Own blocks are tiles. Each chosen block is a tile, too, with the queries that read it, and its results are
joined to theirs.

Where most blocks are read, and in float32, whose weights are one softmax over all parts, the other blocks are masked instead.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, causal_parts, numbers_of, row_tiles
from attnzoo_kernels.dispatch import without_autocast

ROWS = 64  # queries whose own blocks are read at once, at least


def _tiles(call: Call) -> Iterator[Tile]:
    (size,) = call.numbers
    if call.fused and 2 * size * call.blocks.shape[-1] < call.len_k:
        yield from _own_tiles(call, size)
        yield from _chosen_tiles(call, size)
    else:
        yield from _masked_tiles(call, size)


def _own_tiles(call: Call, size: int) -> Iterator[Tile]:
    """Of one block, or of several small ones."""
    together = size * -(-ROWS // size)
    first = max(-call.diagonal, 0)
    for position in range((first + call.diagonal) // together * together, call.len_k, together):
        rows = slice(max(position - call.diagonal, first), min(position + together - call.diagonal, call.len_q))
        keys = slice(position, rows.stop + call.diagonal)
        if rows.start + call.diagonal == position and together == size:
            yield Tile(rows, causal_parts(position, keys))
        else:
            places, j = _places(call, rows)[:, None], numbers_of(keys)
            yield Tile(rows, [Part(keys, (j // size == places // size) & (j <= places))])


def _chosen_tiles(call: Call, size: int) -> Iterator[Tile]:
    """By chooser and block, the queries that chose it."""
    choosers, count = call.blocks.shape[1], -(-call.len_k // size)
    own = _places(call, slice(0, call.len_q)).div(size, rounding_mode="floor")
    blocks = call.blocks.permute(1, 0, 2)
    there = (blocks >= 0) & (blocks < own[:, None])
    first = torch.arange(choosers, dtype=torch.int32, device="cpu")[:, None, None] * count
    chosen = torch.where(there, blocks + first, choosers * count).flatten()
    query = torch.arange(call.len_q, device="cpu").repeat_interleave(blocks.shape[2]).repeat(choosers)[chosen.argsort(stable=True)]
    ends = torch.bincount(chosen, minlength=choosers * count + 1).cumsum(0).tolist()
    group = call.heads // choosers
    for number, rows in enumerate(query[: ends[-2]].tensor_split(ends[:-2])):
        chooser, block = divmod(number, count)
        if rows.numel():
            yield Tile(rows, [Part(slice(block * size, (block + 1) * size))], slice(chooser * group, (chooser + 1) * group))


def _masked_tiles(call: Call, size: int) -> Iterator[Tile]:
    """All keys before a tile's queries, of which those in no block of theirs are hidden."""
    block = torch.arange(call.len_k, device="cpu") // size
    for rows in row_tiles(max(-call.diagonal, 0), call.len_q):
        places = _places(call, rows)[:, None]
        before = slice(0, rows.stop + call.diagonal)
        numbers = torch.arange(block[before.stop - 1] + 1, device="cpu")
        # (choosers, rows, blocks)
        read = (call.blocks[rows].transpose(0, 1).unsqueeze(-1) == numbers).any(-2) | (numbers == block[places])
        if call.fused and (read | (numbers > block[places])).all():
            yield Tile(rows, causal_parts(0, slice(rows.start + call.diagonal, before.stop)))
        else:
            seen = read[..., block[before]] & (torch.arange(before.stop, device="cpu") <= places)
            yield Tile(rows, [Part(before, seen.repeat_interleave(call.heads // len(seen), dim=0).unsqueeze(0))])


def _places(call: Call, rows: slice) -> Tensor:
    """The keys at which queries stand."""
    return numbers_of(rows) + call.diagonal


attend = operator("routed", "routed_attention", _tiles)


@without_autocast
def routed_attention_cpu(q, k, v, blocks, *, block_size, softmax_scale, cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, blocks=blocks,
                      softmax_scale=softmax_scale, window_size=(-1, 0), exact=dtype.itemsize > 2, numbers=[block_size])
    return out.to(dtype), lse


def sequences(x: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Each sequence's tokens of (total, ...); views."""
    return [x[first:end] for first, end in itertools.pairwise(cu_seqlens.tolist())]


def best_blocks(scores: Tensor, slots: int) -> Tensor:
    """The blocks of the best scores, float32, of equal ones the earlier: int32 (..., slots); -1 for scores of -inf and where there are
    fewer."""
    count = scores.shape[-1]
    bits = (scores + 0.0).view(torch.int32)  # turns -0.0 into 0.0
    # integers in the order of the scores, and of equal scores in the wanted order, because topk may take any of those
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * count - torch.arange(count, device="cpu")
    blocks = order.topk(min(slots, count), dim=-1, sorted=False).indices
    blocks = torch.where(scores.gather(-1, blocks) > -torch.inf, blocks, -1).int()
    return F.pad(blocks, (0, slots - blocks.shape[-1]), value=-1)
