"""The options of one call as the block-sparse launches need them: hashable, so that a launch is planned once for each layout of tensors."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, value_block
from attnzoo_kernels.block_sparse.lists import Grid, TileLists, tile_lists
from attnzoo_kernels.block_sparse.tiles import Tile


@dataclass(frozen=True)
class Options:
    mask_shape: tuple[int, int, int, int]  # a BlockLayout's, as the blocks are
    block_q: int
    block_k: int
    sequences: int | None  # packed sequences; None: dense
    softmax_scale: float
    window_left: int
    window_right: int  # 0: causal

    @classmethod
    def of(cls, mask: Tensor, block_q: int, block_k: int, cu_seqlens_q: Tensor | None, *numbers) -> "Options":
        return cls(tuple(mask.shape), block_q, block_k, None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, *numbers)

    def sizes(self, q: torch.Size, k: torch.Size) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        return (q[0], q[1], k[1]) if self.sequences is None else (self.sequences, q[0], k[0])

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """Tiles of all heads; for packed sequences find_tile's slots."""
        return heads * (sequences * -(-seqlen // block) if self.sequences is None else seqlen // block + sequences + 1)

    def grid(self, q: torch.Size, k: torch.Size, tile: Tile) -> Grid:
        len_q, len_k = self.sizes(q, k)[1:]
        if self.sequences is not None:
            len_q, len_k = self.mask_shape[2] * self.block_q, self.mask_shape[3] * self.block_k
        return Grid(self.block_q, self.block_k, tile.block_m, tile.block_n, len_q, len_k, self.window_left, self.window_right,
                    self.sequences is not None)

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
        block_d, block_dv = self.widths(q, v)
        return {
            "HEAD_DIM": q[-1],
            "VALUE_DIM": v[-1],
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "PART_Q": grid.part[0],
            "PART_K": grid.part[1],
            "PACKED": grid.packed,
            "HAS_LEFT": self.window_left >= 0,
            "HAS_RIGHT": self.window_right >= 0,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "BLOCK_M": grid.tile_m,
            "BLOCK_N": grid.tile_n,
        }
