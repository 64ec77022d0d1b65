"""One call of an operator as its launches need it, beside its tensors: hashable, so that a launch is planned once."""

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
    """(batch, row, head) strides of each (batch, seqlen, heads, width), or (total, heads, width) with batch 0, for an Operand."""
    return tuple((0, *of[:2]) if len(shape) == 3 else of[:3] for shape, of in tensors)


def strides(*tensors: Layout) -> tuple[int, ...]:
    """The same one behind the other."""
    return tuple(stride for of in operand_strides(*tensors) for stride in of)


def outputs(q: Tensor, value_dim: int, softmaxes: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(out, LSE, statistics) for queries (batch, seqlen, heads, width) or (total, heads, width); the latter two in float32: (batch, heads,
    seqlen) or (heads, total) behind a dimension of the softmaxes, if there are several, and of twice as many."""
    rows = autograd.lse_shape(q, q.dim() == 3)
    lse = torch.empty(rows if softmaxes == 1 else (softmaxes, *rows), dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:-1], value_dim), lse, lse.new_empty(2 * softmaxes, *rows)


def tma_kind(wanted: bool, tensors: tuple[Layout, ...], itemsize: int, packed: bool) -> int:
    """The kernels' TMA: load_rows tells its values."""
    if not wanted or not all(tma_takes_layout(*x, itemsize) for x in tensors):
        return 0
    return BY_SEQUENCE.value if packed else 1


def read_blocks(tile: Any, constants: dict[str, Any], grad_out: int | None = None) -> dict[int, tuple]:
    """A Launch's blocks where TMA reads q, k, v, its first tensors, and grad_out at its position: tiles of `tile`'s rows."""
    width, value_width, by_sequence = constants["BLOCK_D"], constants["BLOCK_DV"], constants["TMA"] == BY_SEQUENCE.value
    blocks = {0: (tile.block_m, width, by_sequence), 1: (tile.block_n, width, by_sequence), 2: (tile.block_n, value_width, by_sequence)}
    if grad_out is not None:
        blocks[grad_out] = (tile.block_m, value_width, by_sequence)
    return blocks if constants["TMA"] else {}


def packed_sequences(cu_seqlens: Tensor | None) -> int | None:
    """The number of sequences that are packed; None where the call is dense."""
    return None if cu_seqlens is None else cu_seqlens.shape[0] - 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all operators have in common. An operator's own Options extend it by what is theirs."""

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
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        return (q[0], q[1], k[1]) if self.sequences is None else (self.sequences, q[0], k[0])

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """Tiles of all heads; for packed sequences find_tile's slots, which need no prefix sum."""
        return heads * (sequences * -(-seqlen // block) if self.sequences is None else seqlen // block + sequences + 1)

    def heads_together(self, own: torch.Size, other: torch.Size, width: int, block: int, device: torch.device, dtype: torch.dtype) -> int:
        """Of how many heads causal programs take the tiles in turn, heavy ones first: of as many as L2 holds of the `width` columns that
        each reads, but of three tiles a multiprocessor (two programs run there), else the last heads' heavy tiles end late. Divides
        their number. Short sequences have no heavy tiles, and are faster head by head."""
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
