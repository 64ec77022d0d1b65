"""FlashAttention's options beside those of every call."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import architecture
from attnzoo_kernels.dropout import drop_threshold


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    slopes_stride: int | None = None  # batch stride of ALiBi's slopes; None: no ALiBi
    softcap: float = 0.0
    dropout_p: float = 0.0
    key_bias: bool = False

    @classmethod
    def of(cls, cu_seqlens_q: Tensor | None, alibi_slopes: Tensor | None, softmax_scale: float, window_left: int, window_right: int,
           softcap: float, dropout_p: float) -> "Options":
        slopes_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
        return cls(sequences=packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale, window_left=window_left,
                   window_right=window_right, slopes_stride=slopes_stride, softcap=softcap, dropout_p=dropout_p)

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        drop_below = drop_threshold(self.dropout_p)
        return (self.slopes_stride or 0, self.softmax_scale, self.softmax_scale * math.log2(math.e), self.softcap, 1 - drop_below / 32768,
                self.window_left, self.window_right, drop_below, *self.sizes(q, k), q[-2], q[-2] // k[-2])

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return super().constants(q, v, dtype) | {
            # float32 follows eager's roundings
            "PRESCALE": dtype == torch.float32 and (self.softcap > 0 or self.slopes_stride is not None or self.key_bias),
            "HAS_SOFTCAP": self.softcap > 0,
            "HAS_ALIBI": self.slopes_stride is not None,
            "ONE_SIDED": self.window_right == 0,
            "HARDWARE_TANH": dtype != torch.float32 and architecture(device) >= 75 and torch.version.cuda is not None,
            "HAS_DROPOUT": self.dropout_p > 0,
            "HAS_KEY_BIAS": self.key_bias,
        }
