"""Block-sparse attention's options beside those of every call."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width, value_block
from attnzoo_kernels.block_sparse.lists import Grid, TileLists, tile_lists
from attnzoo_kernels.block_sparse.tiles import Tile


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    mask_shape: tuple[int, int, int, int]  # a BlockLayout's, as the blocks are
    block_q: int
    block_k: int

    @classmethod
    def of(cls, mask: Tensor, block_q: int, block_k: int, cu_seqlens_q: Tensor | None, softmax_scale: float, window_left: int,
           window_right: int) -> "Options":
        return cls(mask_shape=tuple(mask.shape), block_q=block_q, block_k=block_k, sequences=packed_sequences(cu_seqlens_q),
                   softmax_scale=softmax_scale, window_left=window_left, window_right=window_right)

    def grid(self, q: torch.Size, k: torch.Size, tile: Tile) -> Grid:
        len_q, len_k = self.sizes(q, k)[1:]
        if self.packed:
            len_q, len_k = self.mask_shape[2] * self.block_q, self.mask_shape[3] * self.block_k
        return Grid(self.block_q, self.block_k, tile.block_m, tile.block_n, len_q, len_k, self.window_left, self.window_right, self.packed)

    def lists(self, mask: Tensor, grid: Grid, q: torch.Size, k: torch.Size, *, by_keys: bool) -> TileLists:
        return tile_lists(mask, grid, self.sizes(q, k)[0], q[-2], q[-2] // k[-2], by_keys)

    def scalars(self, grid: Grid, q: torch.Size, k: torch.Size, *, by_keys: bool) -> tuple:
        """What all kernels take at their end: strides and extent of the lists, scales, window, sizes."""
        tiles, others = reversed(grid.tiles) if by_keys else grid.tiles
        batch, heads = self.mask_shape[:2]
        strides = (heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0, tiles, others + 1)
        return (*strides, self.softmax_scale, self.softmax_scale * math.log2(math.e), self.window_left, self.window_right,
                *self.sizes(q, k), q[-2], q[-2] // k[-2])

    def widths(self, q: torch.Size, v: torch.Size) -> tuple[int, int]:
        """(BLOCK_D, BLOCK_DV)."""
        return block_width(q[-1]), value_block(q[-1], v[-1])

    def constants(self, grid: Grid, q: torch.Size, v: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        return super().constants(q, v, dtype) | {"PART_Q": grid.part[0], "PART_K": grid.part[1], "BLOCK_M": grid.tile_m,
                                                 "BLOCK_N": grid.tile_n}
