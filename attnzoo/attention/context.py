"""A layer's attention over sequences that several processes read together."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.attention.base import Attention
    from attnzoo.attention.sequence import SequenceInfo

GROUPS = 1  # of heads, which are attended one after the other while keys of the next ones travel; measurements choose it


def attend_in_context(layer: "Attention", q: Tensor, kept: Sequence[Tensor], seq: "SequenceInfo", *rest: Tensor) -> Tensor:
    """`attend` of this process's tokens over those of all processes."""
    window = layer.keys_before if layer.spec.causal else -1
    parts, passes = seq.once(("parts", window), lambda: seq.parts(layer.spec.causal, window))
    n = 1 + len(rest)
    groups = math.gcd(GROUPS, *(x.shape[q.dim() - 2] for x in (q, *rest, *kept))) if layer.divides_heads else 1
    return seq.context.attend(
        lambda part, *tensors: layer.attend_over(tensors[0], tensors[n:], passes[part.index], *tensors[1:n]),
        (q, *rest), kept, parts, groups)
