"""Forget gates: a score gets the sum of the gates' logarithms at the query's own key minus that at the key."""

from typing import NamedTuple

import torch
from torch import Tensor


class Gates(NamedTuple):
    """c: float64 (batch, heads, len_k), cumulative sums of the gates' logarithms along the keys.
    spread: float64 (batch, heads), how much two scores of a query can differ without gates, at most."""

    c: Tensor
    spread: Tensor

    @classmethod
    def summed(cls, log_f: Tensor, q: Tensor, k: Tensor, softmax_scale: float) -> "Gates":
        """log_f: (batch, len_k, heads). q, k: (batch, heads, seqlen, head_dim)."""
        longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1).amax(-1).double() for x in (q, k))
        longest_k = longest_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return cls(log_f.double().cumsum(1).transpose(1, 2), 2 * abs(softmax_scale) * longest_q * longest_k)

    def of(self, positions: slice, keys: slice | Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """(c of the queries' own keys, c of the keys), both relative to the first query's, so that float32 is precise where c matters."""
        c = self.c[:, heads]
        start = c[..., positions.start : positions.start + 1]
        return c[..., positions] - start, c[..., keys] - start

    def first_key(self, positions: slice, negligible: float) -> list[int]:
        """For each head, the first key whose weight may be more than e^-negligible of a row's sum for any of the queries."""
        least = self.c[..., positions].amax(-1) + self.spread + negligible
        # not "<=": with a NaN no key is skipped
        counts = ~(self.c[..., : positions.stop] > least.unsqueeze(-1))
        return counts.any(0).byte().argmax(-1).tolist()
