"""Dual Chunk attention's options beside those of every call, and its tensors beside queries, keys and values."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import block_width


class Extras(NamedTuple):
    """Tables of angles, the queries' multipliers and the bounds of packed sequences."""

    cos: Tensor
    sin: Tensor
    logit_multiplier: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    chunk: int
    top: int
    far: int
    stages: int = 7
    rope_interleaved: bool = False
    rotary_dim: int = 0
    multiplier_stride: int | None = None  # batch stride of the queries' multipliers; None: there are none
    same_lengths: bool = False  # packed: one cu_seqlens serves queries and keys

    @classmethod
    def of(cls, extras: Extras, chunk: int, top: int, far: int, stages: int, causal: bool, rope_interleaved: bool,
           softmax_scale: float) -> "Options":
        multiplier, packed = extras.logit_multiplier, extras.cu_seqlens_q is not None
        stride = None if multiplier is None else multiplier.stride(0) if multiplier.dim() == 2 else 0
        return cls(sequences=packed_sequences(extras.cu_seqlens_q), softmax_scale=softmax_scale, window_right=0 if causal else -1,
                   chunk=chunk, top=top, far=far, stages=stages, rope_interleaved=rope_interleaved, rotary_dim=2 * extras.cos.shape[1],
                   multiplier_stride=stride,
                   same_lengths=packed and extras.cu_seqlens_q.data_ptr() == extras.cu_seqlens_k.data_ptr())

    @property
    def near(self) -> int:
        """How many queries at the start of a chunk have another rotary position to the chunk before theirs than to the chunks before that
        one."""
        return min(max(self.top - self.chunk, 0), self.chunk) if self.top == self.far else self.chunk

    @property
    def chunks(self) -> tuple[int, int, int]:
        return self.chunk, self.top, self.far

    @property
    def has_multiplier(self) -> bool:
        return self.multiplier_stride is not None

    def logit_scale(self, dtype: torch.dtype) -> float:
        """The factor of products of rotated queries and keys. It is 1 in 16 bits, where the queries contain the scale; in float32 that
        would cost a rounding."""
        return self.softmax_scale if dtype == torch.float32 else 1.0

    def query_scale(self, dtype: torch.dtype) -> float:
        """The factor of rotated queries, beside their row multiplier."""
        return self.softmax_scale * (1.0 if dtype == torch.float32 else math.log2(math.e)) / self.logit_scale(dtype)

    @property
    def key_copies(self) -> int:
        """How many rotated copies keys have: one for their place in the chunk and, if not causal, two for the other stages of keys after
        the query."""
        return 1 if self.causal else 3

    def tiles_end_at_seams(self, q: torch.Size, k: torch.Size, block_m: int, block_n: int) -> bool:
        """Whether tiles of block_m queries, counted from a key tile's first row on, never cross a seam between relations."""
        aligned = self.same_lengths if self.packed else (k[1] - q[1]) % block_m == 0
        return aligned and self.stages == 7 and self.chunk % block_m == 0 and block_n % block_m == 0

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        return *self.sizes(q, k), q[-2], self.batches(q), self.chunk, self.stages, q[-2] // k[-2]

    def batches(self, x: torch.Size) -> int:
        """Batch rows of one copy of x."""
        return 1 if self.packed else x[0]

    def rotation_constants(self, head_dim: int) -> dict[str, Any]:
        return {"HEAD_DIM": head_dim, "ROTARY_DIM": self.rotary_dim, "BLOCK_D": block_width(head_dim), "INTERLEAVED": self.rope_interleaved}

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        constants = super().constants(q, v, dtype) | {"CAUSAL": self.causal}
        del constants["HAS_LEFT"], constants["HAS_RIGHT"]
        return constants

    def chunk_programs(self, heads: int, sequences: int, seqlen: int, offset: int, block: int) -> int:
        """Programs of chunk_tile over all heads; dense rows begin at position `offset`."""
        if self.packed:
            return heads * (seqlen // block + seqlen // self.chunk + 3 * (sequences + 1))
        per_chunk = -(-self.chunk // block)

        def tile(position: int) -> int:
            return position // self.chunk * per_chunk + position % self.chunk // block

        return heads * sequences * (tile(offset + seqlen - 1) - tile(offset) + 1)
