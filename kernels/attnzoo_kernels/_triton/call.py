"""The options of an operator's call, without its tensors. They are hashable, so that a launch is planned only once for them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import autograd
from attnzoo_kernels._triton.launch import L2_GROUP, block_width, multiprocessors, tma_takes_layout, value_block
from attnzoo_kernels._triton.tiles import BY_SEQUENCE

Layout = tuple[torch.Size, tuple[int, ...]]


def layout(x: Tensor) -> Layout:
    return x.shape, x.stride()


def operand_strides(*tensors: Layout) -> tuple[tuple[int, ...], ...]:
    """(batch, row, head) strides for an Operand, of each tensor (batch, seqlen, heads, width), or (total, heads, width) with batch stride
    0."""
    return tuple((0, *stride[:2]) if len(shape) == 3 else stride[:3] for shape, stride in tensors)


def strides(*tensors: Layout) -> tuple[int, ...]:
    """operand_strides as one flat tuple."""
    return tuple(stride for by_dimension in operand_strides(*tensors) for stride in by_dimension)


def outputs(q: Tensor, value_dim: int, softmaxes: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(out, LSE, statistics), uninitialised, for queries (batch, seqlen, heads, width) or (total, heads, width).

    out has the dtype of q; LSE and statistics are float32. The LSE is (batch, heads, seqlen) or (heads, total). With several softmaxes it
    has a first dimension of that size. Statistics always have a first dimension, of twice the number of softmaxes.
    """
    rows = autograd.lse_shape(q, q.dim() == 3)
    lse = torch.empty(rows if softmaxes == 1 else (softmaxes, *rows), dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:-1], value_dim), lse, lse.new_empty(2 * softmaxes, *rows)


def tma_kind(wanted: bool, tensors: tuple[Layout, ...], itemsize: int, packed: bool) -> int:
    """The kernels' constant TMA, whose values load_rows explains."""
    if not wanted or not all(tma_takes_layout(*x, itemsize) for x in tensors):
        return 0
    return BY_SEQUENCE.value if packed else 1


def read_blocks(tile: Any, constants: dict[str, Any], grad_out: int | None = None) -> dict[int, tuple]:
    """The `blocks` of a Launch whose tensors 0, 1 and 2 are q, k and v, and whose dO is tensor number `grad_out`. Empty unless TMA reads
    them."""
    width, value_width, by_sequence = constants["BLOCK_D"], constants["BLOCK_DV"], constants["TMA"] == BY_SEQUENCE.value
    blocks = {0: (tile.block_m, width, by_sequence), 1: (tile.block_n, width, by_sequence), 2: (tile.block_n, value_width, by_sequence)}
    if grad_out is not None:
        blocks[grad_out] = (tile.block_m, value_width, by_sequence)
    return blocks if constants["TMA"] else {}


def packed_sequences(cu_seqlens: Tensor | None) -> int | None:
    """The number of packed sequences; None for a dense call."""
    return None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def filled(own: tuple, count: int) -> tuple:
    """A variant's own arguments, filled up to `count` with None."""
    return *own, *(None,) * (count - len(own))


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options that all operators have. An operator's own Options add to them."""

    sequences: int | None  # packed sequences; None: dense
    softmax_scale: float
    window_left: int = -1  # -1: unlimited
    window_right: int = -1  # -1: unlimited, 0: causal

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    @property
    def causal(self) -> bool:
        return self.window_right >= 0

    def sizes(self, q: torch.Size, k: torch.Size) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k); the latter two are totals where packed."""
        return (q[0], q[1], k[1]) if self.sequences is None else (self.sequences, q[0], k[0])

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """How many programs the tiles of all heads need. Packed sequences get a program for each slot of `_triton.tiles.find_tile`."""
        return heads * (sequences * -(-seqlen // block) if self.sequences is None else seqlen // block + sequences + 1)

    def heads_together(self, own: torch.Size, other: torch.Size, width: int, block: int, device: torch.device, dtype: torch.dtype) -> int:
        """How many heads' tiles causal programs interleave, the tiles with the most work first.

        It is as many heads as fit into L2, if each reads `width` columns. It is at least as many as have three tiles for each
        multiprocessor, where two programs run: with fewer, the longest tiles of the last heads would end late. The result divides the
        number of heads. It is 1 for short sequences, which are faster head by head.
        """
        sequences, seqlen, other_seqlen = self.sizes(own, other)
        heads = own[-2]
        if self.sequences is None:
            heads *= sequences
        else:
            seqlen, other_seqlen = seqlen // max(sequences, 1), other_seqlen // max(sequences, 1)
        tiles = -(-seqlen // block)
        if tiles < 16:
            return 1
        least = max(1, L2_GROUP // max(other_seqlen * width * dtype.itemsize, 1), -(-3 * multiprocessors(device) // tiles))
        return next(n for n in range(min(least, heads), heads + 1) if heads % n == 0)

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        """The constants that every kernel of plain Triton takes."""
        return {
            "HEAD_DIM": q[-1],
            "VALUE_DIM": v[-1],
            "BLOCK_D": block_width(q[-1]),
            "BLOCK_DV": value_block(q[-1], v[-1]),
            "PACKED": self.packed,
            "HAS_LEFT": self.window_left >= 0,
            "HAS_RIGHT": self.window_right >= 0,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
