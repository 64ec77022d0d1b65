"""The options of one call as FlashAttention's launches need them: hashable, so that a launch is planned once for each layout."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import L2_GROUP, architecture, block_width, multiprocessors, tma_takes_layout, value_block
from attnzoo_kernels._triton.tiles import BY_SEQUENCE
from attnzoo_kernels.dropout import drop_threshold

Layout = tuple[torch.Size, tuple[int, ...]]


def layout(x: Tensor) -> Layout:
    return x.shape, x.stride()


def strides(x: Layout) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, seqlen, heads, width), or of (total, heads, width) with batch 0."""
    return (0, *x[1][:2]) if len(x[0]) == 3 else x[1][:3]


def tma_kind(wanted: bool, tensors: tuple[Layout, ...], itemsize: int, packed: bool) -> int:
    """The kernels' TMA: load_rows tells its values."""
    if not wanted or not all(tma_takes_layout(*x, itemsize) for x in tensors):
        return 0
    return BY_SEQUENCE.value if packed else 1


@dataclass(frozen=True)
class Options:
    sequences: int | None  # packed sequences; None: dense
    slopes_stride: int | None  # batch stride of ALiBi's slopes; None: no ALiBi
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float

    @classmethod
    def of(cls, cu_seqlens_q: Tensor | None, alibi_slopes: Tensor | None, *numbers) -> "Options":
        slopes_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
        return cls(None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, slopes_stride, *numbers)

    def sizes(self, q: torch.Size, k: torch.Size) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        return (q[0], q[1], k[1]) if self.sequences is None else (self.sequences, q[0], k[0])

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """Tiles of all heads; for packed sequences find_tile's slots."""
        return heads * (sequences * -(-seqlen // block) if self.sequences is None else seqlen // block + sequences + 1)

    def heads_together(self, own: torch.Size, other: torch.Size, width: int, block: int, device: torch.device, dtype: torch.dtype) -> int:
        """Of how many heads causal programs take the tiles in turn, heavy ones first: of as many as L2 holds of the `width` columns that
        each walks, but of three tiles a multiprocessor (two programs run there), else the last heads' heavy tiles end late. Divides
        their number. Short sequences have no heavy tiles, and are 3 to 5 % faster head by head."""
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

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        drop_below = drop_threshold(self.dropout_p)
        return (self.slopes_stride or 0, self.softmax_scale, self.softmax_scale * math.log2(math.e), self.softcap, 1 - drop_below / 32768,
                self.window_left, self.window_right, drop_below, *self.sizes(q, k), q[-2], q[-2] // k[-2])

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {
            "HEAD_DIM": q[-1],
            "VALUE_DIM": v[-1],
            "BLOCK_D": block_width(q[-1]),
            "BLOCK_DV": value_block(q[-1], v[-1]),
            "PACKED": self.sequences is not None,
            "HAS_LEFT": self.window_left >= 0,
            "HAS_RIGHT": self.window_right >= 0,
            # a scale that is not positive would turn the maximum into a minimum, if it came after it; float32 follows eager's roundings
            "PRESCALE": self.softmax_scale <= 0 or dtype == torch.float32 and (self.softcap > 0 or self.slopes_stride is not None),
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_ALIBI": self.slopes_stride is not None,
            "ONE_SIDED": self.window_right == 0,
            "HARDWARE_TANH": dtype != torch.float32 and architecture(device) >= 75 and torch.version.cuda is not None,
            "HAS_DROPOUT": self.dropout_p > 0,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
