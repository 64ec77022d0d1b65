"""From a layout's mask to what the kernels walk: for each tile of one side the tiles of the other side, by torch operations on the device.

Nothing here waits for the device. Lists are kept with the mask that they were made from.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MAX_KEPT = 16  # lists kept for one mask, each for other tiles or lengths
MAX_PARTS = 32  # blocks in a tile, one bit each


@dataclass(frozen=True)
class Grid:
    """A mask's blocks, a kernel's tiles, and the element mask that cuts both.

    packed: lengths are the layout's extent, and nothing is cut: each sequence has its own ends and diagonal, which the kernel looks for.
    """

    block_q: int
    block_k: int
    tile_m: int
    tile_n: int
    len_q: int
    len_k: int
    window_left: int
    window_right: int
    packed: bool

    @property
    def part(self) -> tuple[int, int]:
        """Tokens (queries, keys) that share a block and a tile."""
        return min(self.block_q, self.tile_m), min(self.block_k, self.tile_n)

    @property
    def parts(self) -> tuple[int, int]:
        """How often `part` fits into a tile."""
        return self.tile_m // self.part[0], self.tile_n // self.part[1]

    @property
    def tiles(self) -> tuple[int, int]:
        return max(1, -(-self.len_q // self.tile_m)), max(1, -(-self.len_k // self.tile_n))


@dataclass(frozen=True)
class TileLists:
    """What one kernel walks; its own side are rows (queries) or columns (keys), the other side is what the lists hold.

    index: int32 (batch or 1, heads or 1, own tiles, other tiles + 1). A list begins with the tiles that need no mask, the others follow,
        both ascending; what comes behind is no part of it but may be read.
    count: int32 (batch or 1, heads or 1, own tiles, 2), how many need none and how many need one.
    bits: int32 like index, which blocks of the listed tile are kept: bit query_part * key_parts + key_part. None where a tile lies in a
        block.
    order: int32 (batch * heads * own tiles,), the programs' (batch, head, tile) as one number, heavy ones first. None where packed.
    """

    index: Tensor
    count: Tensor
    bits: Tensor | None
    order: Tensor | None

    @property
    def tensors(self) -> tuple:
        """In the kernels' order of arguments."""
        return self.order, self.index, self.count, self.bits


_kept = WeakTensorKeyDictionary()


def tile_lists(mask: Tensor, grid: Grid, batch: int, heads: int, group: int, by_keys: bool) -> TileLists:
    """Lists by rows of queries for each of `heads`, or by_keys for each key head, `group` query heads together."""
    kept = _kept.setdefault(mask, {})
    key = (grid, batch, heads, group, by_keys)
    if key in kept:
        return kept[key]
    lists = _make(mask, grid, batch, heads, group, by_keys)
    # what a CUDA graph's capture makes holds nothing before the graph's replay
    if not (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        while len(kept) >= MAX_KEPT:
            del kept[next(iter(kept))]
        kept[key] = lists
    return lists


def _make(mask: Tensor, grid: Grid, batch: int, heads: int, group: int, by_keys: bool) -> TileLists:
    bits = tile_bits(mask, grid)
    category = _categories(bits, grid)
    if by_keys:
        bits, category = bits.mT, category.mT
    # one more, always the last in its list: a kernel may look one entry ahead
    category = torch.nn.functional.pad(category, (0, 1), value=2)
    index = category.sort(dim=-1, stable=True).indices
    clear, masked = ((category == which).sum(-1, dtype=torch.int32) for which in (0, 1))
    has_bits = math.prod(grid.parts) > 1
    bits = torch.nn.functional.pad(bits, (0, 1)).gather(-1, index) if has_bits else None
    order = None
    if not grid.packed:
        weight = clear + masked
        if by_keys and weight.shape[1] > 1:
            weight = weight.unflatten(1, (-1, group)).sum(2)
        order = _heavy_first(weight.expand(batch, heads // group if by_keys else heads, -1), category.shape[-1] * group)
    return TileLists(index.int(), torch.stack([clear, masked], dim=-1), bits, order)


def tile_bits(mask: Tensor, grid: Grid) -> Tensor:
    """Which parts of each tile are kept, int32 (batch, heads, *grid.tiles), bit query_part * key_parts + key_part."""
    (part_q, part_k), (parts_q, parts_k), (tiles_q, tiles_k) = grid.part, grid.parts, grid.tiles
    for dim, repeats in ((-2, grid.block_q // part_q), (-1, grid.block_k // part_k)):
        mask = mask.repeat_interleave(repeats, dim) if repeats > 1 else mask
    missing = tiles_q * parts_q - mask.shape[-2], tiles_k * parts_k - mask.shape[-1]
    mask = torch.nn.functional.pad(mask, (0, missing[1], 0, missing[0]))  # a negative pad cuts
    if parts_q * parts_k == 1:
        return mask.int()
    parts = mask.unflatten(-1, (tiles_k, parts_k)).unflatten(-3, (tiles_q, parts_q)).transpose(-3, -2).flatten(-2)
    place = torch.arange(parts_q * parts_k, device=mask.device)
    return (parts.long() << place).sum(-1).int()


def _categories(bits: Tensor, grid: Grid) -> Tensor:
    """int8 like bits: 0 for tiles that are seen whole, 1 for those seen in part, 2 for those not seen at all."""
    every = (1 << math.prod(grid.parts)) - 1
    every = every - (1 << 32) if every >= 1 << 31 else every
    whole, touched = bits == every, bits != 0
    if not grid.packed:
        seen_whole, seen = _element_mask(grid, bits.device)
        whole, touched = whole & seen_whole, touched & seen
    return 2 - touched.to(torch.int8) - (whole & touched).to(torch.int8)


def _element_mask(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tiles the element mask (window, ends) leaves whole, and which it touches at all: bool (tiles_q, tiles_k)."""
    first_i = torch.arange(grid.tiles[0], device=device)[:, None] * grid.tile_m
    first_j = torch.arange(grid.tiles[1], device=device) * grid.tile_n
    last_i, last_j = (first_i + grid.tile_m).clamp(max=grid.len_q) - 1, (first_j + grid.tile_n).clamp(max=grid.len_k) - 1
    whole = (first_i + grid.tile_m <= grid.len_q) & (first_j + grid.tile_n <= grid.len_k)
    seen = last_j >= first_j
    shift = grid.len_k - grid.len_q
    if grid.window_right >= 0:
        whole = whole & (last_j <= first_i + shift + grid.window_right)
        seen = seen & (first_j <= last_i + shift + grid.window_right)
    if grid.window_left >= 0:
        whole = whole & (first_j >= last_i + shift - grid.window_left)
        seen = seen & (last_j >= first_i + shift - grid.window_left)
    return whole, seen


def _heavy_first(weight: Tensor, limit: int) -> Tensor:
    """Places of weight (batch, heads, tiles), flattened: those beyond twice the mean first, then head by head, which share keys in L2."""
    flat = weight.flatten()
    head = torch.arange(flat.numel(), device=flat.device) // weight.shape[-1]
    heavy = flat > 2 * flat.double().mean()
    key = torch.where(heavy, -flat.long(), head * (limit + 1) + limit - flat)
    return key.argsort(stable=True).int()
