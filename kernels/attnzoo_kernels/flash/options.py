"""What the launches of FlashAttention's kernels share: the operator's options after its checks, as kernel arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width
from attnzoo_kernels.dropout import keep_threshold


@dataclass(frozen=True)
class Options:
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def tensors(self) -> tuple:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.alibi_slopes, self.rng_state

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        if self.packed:
            return self.cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        return q.shape[0], q.shape[1], k.shape[1]

    def scalars(self, q: Tensor, k: Tensor) -> tuple:
        slopes = self.alibi_slopes
        stride_ab = slopes.shape[-1] if slopes is not None and slopes.dim() == 2 else 0
        keep_below = keep_threshold(self.dropout_p)
        heads = q.shape[-2]
        return (stride_ab, self.softmax_scale, self.softcap, keep_below / 65536, self.window_left, self.window_right, keep_below,
                *self.sizes(q, k), heads, heads // k.shape[-2])

    def flags(self, q: Tensor, v: Tensor) -> dict:
        return {
            "HEAD_DIM": q.shape[-1],
            "VALUE_DIM": v.shape[-1],
            "BLOCK_D": block_width(q.shape[-1]),
            "BLOCK_DV": block_width(v.shape[-1]),
            "PACKED": self.packed,
            "HAS_LEFT": self.window_left >= 0,
            "HAS_RIGHT": self.window_right >= 0,
            # a scale that is not positive would turn the maximum into a minimum, if it came after it
            "PRESCALE": self.softcap > 0 or self.alibi_slopes is not None or self.softmax_scale <= 0,
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_ALIBI": self.alibi_slopes is not None,
            "HAS_DROPOUT": self.dropout_p > 0,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """Tiles of all heads; for packed sequences find_tile's slots."""
        tiles = seqlen // block + sequences + 1 if self.packed else sequences * -(-seqlen // block)
        return heads * tiles
