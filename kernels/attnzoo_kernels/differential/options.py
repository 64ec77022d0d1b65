"""What the launches of differential attention's kernels share: the operator's options after its checks, as kernel arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, value_block


@dataclass(frozen=True)
class Options:
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    softmax_scale: float
    window_left: int
    window_right: int

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def causal(self) -> bool:
        return self.window_right >= 0

    @property
    def tensors(self) -> tuple:
        return self.cu_seqlens_q, self.cu_seqlens_k

    def sizes(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """(sequences, seqlen_q, seqlen_k), the totals where packed."""
        if self.packed:
            return self.cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        return q.shape[0], q.shape[1], k.shape[1]

    def scalars(self, q: Tensor, k: Tensor) -> tuple:
        heads = q.shape[-2]
        return self.softmax_scale, self.window_left, self.window_right, *self.sizes(q, k), heads, heads // k.shape[-2]

    def flags(self, q: Tensor, k2: Tensor | None, v: Tensor) -> dict:
        return {
            "HEAD_DIM": q.shape[-1],
            "VALUE_DIM": v.shape[-1],
            "BLOCK_D": block_width(q.shape[-1]),
            "BLOCK_DV": value_block(q.shape[-1], v.shape[-1]),
            "SHARED_K": k2 is None,
            "PACKED": self.packed,
            "HAS_LEFT": self.window_left >= 0,
            "HAS_RIGHT": self.window_right >= 0,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    def programs(self, heads: int, seqlen: int, sequences: int, block: int) -> int:
        """Tiles of all heads; for packed sequences find_tile's slots."""
        tiles = seqlen // block + sequences + 1 if self.packed else sequences * -(-seqlen // block)
        return heads * tiles


def lambda_strides(lam: Tensor, packed: bool) -> tuple[int, int, int]:
    """(batch, row, head) strides of lambda: (), (heads,), (batch, seqlen, heads) or (total, heads)."""
    if lam.dim() == 0:
        return 0, 0, 0
    if lam.dim() == 1:
        return 0, 0, lam.stride(0)
    return (0, *lam.stride()) if packed else lam.stride()
