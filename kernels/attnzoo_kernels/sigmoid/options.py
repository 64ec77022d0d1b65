"""Sigmoid attention's options beside those of every call."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels._triton.launch import architecture


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    sigmoid_bias: float | None = None  # None: minus the logarithm of a sequence's keys
    slopes_stride: int | None = None  # batch stride of ALiBi's slopes; None: no ALiBi

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, alibi_slopes: Tensor | None, softmax_scale: float, sigmoid_bias: float | None, window_left: int,
           window_right: int) -> "Options":
        slopes_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
        return cls(sequences=packed_sequences(cu_seqlens), softmax_scale=softmax_scale, window_left=window_left, window_right=window_right,
                   sigmoid_bias=sigmoid_bias, slopes_stride=slopes_stride)

    @property
    def by_length(self) -> bool:
        """Whether the bias is known on the device only."""
        return self.sigmoid_bias is None and self.packed

    def base_2_bias(self, seqlen_k: int) -> float:
        """Of dense sequences, or a given one."""
        return (-math.log(max(seqlen_k, 1)) if self.sigmoid_bias is None else self.sigmoid_bias) * math.log2(math.e)

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        return (self.slopes_stride or 0, self.softmax_scale, self.sigmoid_bias or 0.0, self.window_left, self.window_right,
                *self.sizes(q, k), q[-2], q[-2] // k[-2])

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return super().constants(q, v, dtype) | {
            "HAS_BIAS": self.sigmoid_bias is not None, "HAS_ALIBI": self.slopes_stride is not None,
            "HARDWARE": dtype != torch.float32 and architecture(device) >= 80 and torch.version.hip is None,
        }
