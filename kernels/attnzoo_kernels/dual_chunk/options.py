"""What the launches of Dual Chunk attention's kernels share: the operator's options after its checks, as kernel arguments."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, value_block


@dataclass(frozen=True)
class Options:
    cos: Tensor
    sin: Tensor
    logit_multiplier: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    chunk: int
    top: int
    far: int
    stages: int
    causal: bool
    rope_interleaved: bool
    softmax_scale: float

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def near(self) -> int:
        """Queries of a chunk, from its first on, that stand at another position to the chunk before theirs than to those before that."""
        return min(max(self.top - self.chunk, 0), self.chunk) if self.top == self.far else self.chunk

    @property
    def chunks(self) -> tuple[int, int, int]:
        return self.chunk, self.top, self.far

    def logit_scale(self, dtype: torch.dtype) -> float:
        """What products of rotated queries and keys are multiplied by: nothing in 16 bits, where the queries hold it.

        In float32 that would cost a rounding; a scale that is not positive would turn the maximum into a minimum, and is held all the same.
        """
        return self.softmax_scale if dtype == torch.float32 and self.softmax_scale > 0 else 1.0

    def query_scale(self, dtype: torch.dtype) -> float:
        """What rotated queries are multiplied by, beside their row multiplier."""
        return self.softmax_scale * (1.0 if dtype == torch.float32 else math.log2(math.e)) / self.logit_scale(dtype)

    @property
    def multiplier_stride(self) -> int:
        multiplier = self.logit_multiplier
        return multiplier.stride(0) if multiplier is not None and multiplier.dim() == 2 else 0

    @property
    def key_copies(self) -> int:
        """Stages whose positions keys take: their place in the chunk, and behind the query also the two others."""
        return 1 if self.causal else 3

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        if self.packed:
            return self.cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        return q.shape[0], q.shape[1], k.shape[1]

    def tiles_end_at_seams(self, q: Tensor, k: Tensor, block_m: int, block_n: int) -> bool:
        """Whether a walk over queries in tiles of block_m from a key tile's first row on never straddles a seam between stages."""
        if self.packed:
            aligned = self.cu_seqlens_q.data_ptr() == self.cu_seqlens_k.data_ptr()
        else:
            aligned = (k.shape[1] - q.shape[1]) % block_m == 0
        return aligned and self.stages == 7 and self.chunk % block_m == 0 and block_n % block_m == 0

    def scalars(self, q: Tensor, k: Tensor) -> tuple:
        heads = q.shape[-2]
        return *self.sizes(q, k), heads, self.batches(q), self.chunk, self.stages, heads // k.shape[-2]

    def batches(self, x: Tensor) -> int:
        """Batch rows of one copy of x."""
        return 1 if self.packed else x.shape[0]

    def rotation_flags(self, head_dim: int) -> dict:
        return {
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": 2 * self.cos.shape[1],
            "BLOCK_D": block_width(head_dim),
            "INTERLEAVED": self.rope_interleaved,
        }

    def flags(self, q: Tensor, v: Tensor) -> dict:
        return {
            "HEAD_DIM": q.shape[-1],
            "BLOCK_D": block_width(q.shape[-1]),
            "VALUE_DIM": v.shape[-1],
            "BLOCK_DV": value_block(q.shape[-1], v.shape[-1]),
            "PACKED": self.packed,
            "CAUSAL": self.causal,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    def programs(self, heads: int, sequences: int, seqlen: int, offset: int, block: int) -> int:
        """Programs of chunk_tile over all heads; dense rows begin at position `offset`."""
        if self.packed:
            return heads * (seqlen // block + seqlen // self.chunk + 3 * (sequences + 1))
        per_chunk = -(-self.chunk // block)

        def tile(position: int) -> int:
            return position // self.chunk * per_chunk + position % self.chunk // block

        return heads * sequences * (tile(offset + seqlen - 1) - tile(offset) + 1)
