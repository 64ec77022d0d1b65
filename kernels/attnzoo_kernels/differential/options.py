"""Differential attention's options: those of every call, and what its kernels make of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    @classmethod
    def of(cls, cu_seqlens_q: Tensor | None, softmax_scale: float, window_left: int, window_right: int) -> "Options":
        return cls(sequences=packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale, window_left=window_left,
                   window_right=window_right)

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        return self.softmax_scale, self.window_left, self.window_right, *self.sizes(q, k), q[-2], q[-2] // k[-2]

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype, *, shared_k: bool) -> dict[str, Any]:
        return super().constants(q, v, dtype) | {"SHARED_K": shared_k}


def lambda_strides(lam: Tensor, packed: bool) -> tuple[int, int, int]:
    """(batch, row, head) strides of lambda: (), (heads,), (batch, seqlen, heads) or (total, heads)."""
    if lam.dim() == 0:
        return 0, 0, 0
    if lam.dim() == 1:
        return 0, 0, lam.stride(0)
    return (0, *lam.stride()) if packed else lam.stride()
