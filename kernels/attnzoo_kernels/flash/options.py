"""FlashAttention's options beside those of every call."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import architecture
from attnzoo_kernels.dropout import drop_threshold

C_BLOCK = 128  # rows of a block in KeyBias; the rows of tiles divide it


class KeyBias(NamedTuple):
    """A bias by key, such as a cumulative forget gate: a number c for every key and query head, in the softmax's units.

    c_i - c_j is added to the score of query i and key j, where c_i is that of the key on query i's diagonal, the query's own key.

    For 16-bit inputs, c is stored in blocks of C_BLOCK rows of one sequence and head, each relative to c at the block's start: first the
    blocks of all keys, then those of all queries. Packed sequences have a block for each of find_tile's slots.
    """

    c: Tensor | None  # float32 (blocks, C_BLOCK), relative to the block's start; for keys in the unit of the products q·k. For float32
    # inputs (2, batch, heads, seqlen_k) or (2, heads, total): high and low parts of c itself
    starts: Tensor | None  # float32 (blocks, 2), high and low part of c at each block's start; not for float32 inputs
    ends: Tensor | None  # int32 (blocks,), for skipping tiles: for a block of queries the first block of keys that it does not skip, for a
    # block of keys the end of the blocks of queries that do not skip it


NO_KEY_BIAS = KeyBias(None, None, None)
DISTANCE_PAD = 256  # more than the rows and columns of any tile


class DistanceBias(NamedTuple):
    """A bias by the distance from query to key, and, in a backward, the sums of dS by distance, as integers."""

    table: Tensor | None  # float32 (heads, distances + 2 DISTANCE_PAD), in the softmax's units; the padding repeats its ends
    sums: Tensor | None = None  # int64 (heads, distances), zeros before the launch; None if no gradient is wanted
    unit: Tensor | None = None  # float64: the integer that stands for 1.0


NO_DISTANCE_BIAS = DistanceBias(None)
DROPOUT_FROM_ROW = 2  # a value of the kernels' HAS_DROPOUT


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    slopes_stride: int | None = None  # batch stride of ALiBi's slopes; None: no ALiBi
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_from_row: bool = False  # rng_state also says which row of the dropout mask each sequence's first query has
    key_bias: bool = False
    ranges: bool = False  # `sequences` counts key ranges; queries and keys are one dense sequence each
    pruned: bool = False  # tiles are skipped by KeyBias's ends
    distances: int = 0  # entries of a DistanceBias; 0: there is none
    origin: int = 0  # index of the entry for distance 0

    @classmethod
    def of(cls, cu_seqlens_q: Tensor | None, alibi_slopes: Tensor | None, softmax_scale: float, window_left: int, window_right: int,
           softcap: float, dropout_p: float) -> "Options":
        """cu_seqlens_q: cu_seqlens, or the table of key ranges by queries."""
        slopes_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
        ranges = cu_seqlens_q is not None and cu_seqlens_q.dim() == 2
        return cls(sequences=cu_seqlens_q.shape[0] if ranges else packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale,
                   window_left=window_left, window_right=window_right, slopes_stride=slopes_stride, softcap=softcap, dropout_p=dropout_p,
                   ranges=ranges)

    @property
    def causal(self) -> bool:
        return super().causal or self.ranges

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        return heads * -(-seqlen // block) if self.ranges else super().programs(heads, seqlen, sequences, block)

    def heads_together(self, own: torch.Size, other: torch.Size, width: int, block: int, device: torch.device, dtype: torch.dtype) -> int:
        one = replace(self, sequences=1) if self.ranges else self
        return super(Options, one).heads_together(own, other, width, block, device, dtype)

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        drop_below = drop_threshold(self.dropout_p)
        return (self.slopes_stride or 0, self.softmax_scale, self.softmax_scale * math.log2(math.e), self.softcap, 1 - drop_below / 32768,
                self.window_left, self.window_right, drop_below, *self.sizes(q, k), q[-2], q[-2] // k[-2],
                self.distances, self.origin)

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        constants = super().constants(q, v, dtype)
        return constants | {
            "PACKED": self.packed and not self.ranges,
            "HAS_RIGHT": constants["HAS_RIGHT"] or self.ranges,
            # float32 follows eager's roundings
            "PRESCALE": self.distances > 0 or dtype == torch.float32 and (
                self.softcap > 0 or self.slopes_stride is not None or self.key_bias),
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_ALIBI": self.slopes_stride is not None,
            "ONE_SIDED": self.window_right == 0,
            "HARDWARE_TANH": dtype != torch.float32 and architecture(device) >= 75 and torch.version.cuda is not None,
            "HAS_DROPOUT": DROPOUT_FROM_ROW if self.dropout_from_row else self.dropout_p > 0,
            "HAS_KEY_BIAS": self.key_bias,
            "PRUNED": self.pruned,
            "RANGES": self.ranges,
            "HAS_DISTANCES": self.distances > 0,
        }
