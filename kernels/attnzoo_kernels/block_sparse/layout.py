"""BlockLayout: which blocks of an attention matrix are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels import checks

BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
    """A grid of blocks, some of them kept: query i may see key j if mask[..., i // block_q, j // block_k].

    Made by `from_mask`, by `from_scores` or by a function of `attnzoo_kernels.block_sparse.patterns`, and used in any number of calls. What
    the kernels read is derived from it on the device in the first call of each kind, and kept as long as the mask. `|` and `&` combine
    layouts, slices of block indices cut them: `layout[:m, :m]`.

    mask: bool (batch or 1, heads or 1, q_blocks, k_blocks), contiguous; not to be written to. block_q, block_k: tokens of a block, of
    BLOCKS. Raises TypeError or ValueError for another dtype, shape or block size.
    """

    mask: Tensor
    block_q: int
    block_k: int

    def __post_init__(self):
        for name, block in (("block_q", self.block_q), ("block_k", self.block_k)):
            check_block(name, block)
        _check_mask(self.mask)
        if self.mask.dim() != 4 or not self.mask.is_contiguous():
            raise ValueError(f"mask: must be (batch, heads, q_blocks, k_blocks) and contiguous, got shape {tuple(self.mask.shape)} with "
                             f"strides {self.mask.stride()}; BlockLayout.from_mask takes it")

    @classmethod
    def from_mask(cls, mask: Tensor, block_q: int, block_k: int | None = None) -> BlockLayout:
        """Layout of a copy of mask: bool, (q_blocks, k_blocks), (heads, q_blocks, k_blocks) or (batch, heads, q_blocks, k_blocks).

        heads are the query heads; batch and heads may be 1 for all. A sequence takes ceil(seqlen / block) blocks, the last one may be
        ragged. block_k defaults to block_q. Raises TypeError or ValueError for another dtype, shape or block size.
        """
        block_k = block_q if block_k is None else block_k
        _check_mask(mask)
        if mask.dim() not in (2, 3, 4):
            raise ValueError(f"mask: must be (q_blocks, k_blocks), with heads or (batch, heads) before them, got shape {tuple(mask.shape)}")
        mask = mask.detach().clone(memory_format=torch.contiguous_format)
        return cls(mask.view(*(1,) * (4 - mask.dim()), *mask.shape), block_q, block_k)

    @classmethod
    def from_scores(cls, scores: Tensor, top_k: int, block_q: int, block_k: int | None = None) -> BlockLayout:
        """Layout that keeps for each block of queries the `top_k` blocks of keys with the largest scores. Fewer are kept where there are
        fewer blocks, or where scores are -inf or NaN.

        scores: float32, float16, bfloat16 or float64, of a mask's shape in `from_mask`, on any device. Of equal scores that of the earlier
        block is taken, on every device. -inf and NaN are never taken: a causal choice has -inf for the blocks of later keys, and one that
        takes a block in any case has +inf for it. The host does not wait, and scores get no gradient. Raises as `from_mask`, and TypeError
        or ValueError for another top_k or dtype.
        """
        checks.tensor("scores", scores, "a floating-point tensor")
        if scores.dtype not in checks.DTYPES:
            raise TypeError(f"scores: must be float16, bfloat16, float32 or float64, got {scores.dtype}")
        checks.integer("top_k", top_k, 1)
        if scores.dim() not in (2, 3, 4):
            raise ValueError(f"scores: must be (q_blocks, k_blocks), with heads or (batch, heads) before them, got shape "
                             f"{tuple(scores.shape)}")
        scores = scores.detach() + 0.0  # -0 becomes 0, which equals it
        best, block = scores.masked_fill_(scores.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, block[..., :top_k], best[..., :top_k] > -torch.inf)
        return cls.from_mask(mask, block_q, block_k)

    @property
    def batch(self) -> int:
        return self.mask.shape[0]

    @property
    def heads(self) -> int:
        return self.mask.shape[1]

    @property
    def blocks(self) -> tuple[int, int]:
        """(q_blocks, k_blocks)."""
        return tuple(self.mask.shape[2:])

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def density(self) -> float:
        """Share of all blocks that are kept (waits for the device)."""
        return self.mask.double().mean().item() if self.mask.numel() else 0.0

    def to(self, device: torch.device | str) -> BlockLayout:
        return BlockLayout(self.mask.to(device), self.block_q, self.block_k)

    def __repr__(self) -> str:
        grid = f"{self.blocks[0]} x {self.blocks[1]} blocks of {self.block_q} x {self.block_k} tokens"
        parts = [f"{n} {name}" for n, name in ((self.batch, "sequences"), (self.heads, "heads")) if n > 1]
        return f"BlockLayout({', '.join([grid, *parts, f'density {self.density:.3f}', str(self.device)])})"

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """Blocks that either layout keeps. A layout of several heads or sequences may be combined with one that serves all of them."""
        self._check_joined(other)
        return BlockLayout(self.mask | other.mask, self.block_q, self.block_k)

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """Blocks that both layouts keep."""
        self._check_joined(other)
        return BlockLayout(self.mask & other.mask, self.block_q, self.block_k)

    def _check_joined(self, other: BlockLayout) -> None:
        if not isinstance(other, BlockLayout):
            raise TypeError(f"a BlockLayout joins a BlockLayout, got {type(other).__name__}")
        for name in ("block_q", "block_k", "blocks", "device"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name}: joined layouts must agree, got {getattr(self, name)} and {getattr(other, name)}")
        for name in ("batch", "heads"):
            if 1 not in (getattr(self, name), getattr(other, name)) and getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name}: joined layouts must agree or be 1, got {getattr(self, name)} and {getattr(other, name)}")

    def __getitem__(self, index: tuple[slice, slice]) -> BlockLayout:
        """The part of the grid that two slices of blocks name, for queries and keys."""
        if not isinstance(index, tuple) or len(index) != 2 or any(not isinstance(i, slice) or i.step not in (None, 1) for i in index):
            raise TypeError(f"a layout is cut by two slices of blocks without a step, [queries, keys], got {index!r}")
        return BlockLayout(self.mask[(..., *index)].contiguous(), self.block_q, self.block_k)

    def __eq__(self, other: object) -> bool:
        """Whether grids and masks are the same (waits for the device)."""
        if not isinstance(other, BlockLayout):
            return NotImplemented
        return (self.block_q, self.block_k) == (other.block_q, other.block_k) and torch.equal(self.mask, other.mask)

    __hash__ = object.__hash__

    def plot(self, axes=None, *, batch: int = 0, head: int = 0):
        """Draw one head's kept blocks with matplotlib, on `axes` or a new figure; returns the axes."""
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(4, 4), layout="constrained")[1]
        q_blocks, k_blocks = self.blocks
        kept = self.mask[batch if self.batch > 1 else 0, head if self.heads > 1 else 0].cpu()
        axes.imshow(kept, cmap="Greys", vmin=0, vmax=1.3, interpolation="nearest", aspect="auto",
                    extent=(0, k_blocks * self.block_k, q_blocks * self.block_q, 0))
        axes.set(xlabel="key", ylabel="query", title=f"density {kept.double().mean().item():.3f}")
        return axes


def _check_mask(mask: Tensor) -> None:
    checks.tensor("mask", mask, "a bool tensor")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: must be a bool tensor, got {mask.dtype}")


def check_block(name: str, block: int) -> None:
    if not isinstance(block, checks.INTEGERS) or block not in BLOCKS:
        raise ValueError(f"{name}: must be one of {', '.join(map(str, BLOCKS))} tokens, got {block!r}")
