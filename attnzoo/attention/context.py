"""A layer's attention under context parallelism, where several processes share the tokens of one sequence."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.attention.base import Attention
    from attnzoo.attention.sequence import SequenceInfo

GROUPS = 1  # groups of heads: while one group is computed, the keys of the next ones are transferred; chosen by measurement


def attend_in_context(layer: "Attention", q: Tensor, kept: Sequence[Tensor], seq: "SequenceInfo", *rest: Tensor) -> Tensor:
    """`attend` with the queries of this process's tokens and the keys of all processes' tokens."""
    # a dropout mask counts a sequence's keys from its first one, and depends on the sequence's number
    drops = layer.dropout_p > 0
    window = layer.keys_before if layer.spec.causal and not drops else -1
    merge = layer.merges_chunks and not drops
    parts, passes = seq.once(("parts", window, merge), lambda: seq.parts(layer.spec.causal, window, merge))
    n = 1 + len(rest)
    groups = math.gcd(GROUPS, *(x.shape[q.dim() - 2] for x in (q, *rest, *kept))) if layer.divides_heads else 1
    return seq.context.attend(
        lambda part, *tensors: layer.attend_over(tensors[0], tensors[n:], passes[part.index], *tensors[1:n]),
        (q, *rest), kept, parts, groups)
