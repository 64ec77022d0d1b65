"""The two frames' options beside those of every call. Queries and keys have two heads, the near and the far frame's, for each of a call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels._triton.call import Call, packed_sequences
from attnzoo_kernels.checks import UNLIMITED


@dataclass(frozen=True, kw_only=True)
class Options(Call):
    near_keys: int  # near keys of a query, its own included
    far_keys: int  # how many keys at a sequence's beginning can be seen far; UNLIMITED for all

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, softmax_scale: float, near_keys: int, far_keys: int) -> "Options":
        return cls(sequences=packed_sequences(cu_seqlens), softmax_scale=softmax_scale, window_right=0, near_keys=near_keys,
                   far_keys=far_keys)

    def scalars(self, q: torch.Size, k: torch.Size) -> tuple:
        return self.softmax_scale, self.near_keys, self.far_keys, *self.sizes(q, k), q[-2] // 2, q[-2] // k[-2]

    def constants(self, q: torch.Size, v: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        constants = super().constants(q, v, dtype) | {"LIMITED": self.far_keys < UNLIMITED}  # most queries see few keys
        del constants["HAS_LEFT"], constants["HAS_RIGHT"]
        return constants
