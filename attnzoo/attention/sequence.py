"""The positions and the sequence boundaries of the tokens in a forward pass."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnzoo_kernels.ranges import KeyRanges
from attnzoo_kernels.tree import tree_ranges

if TYPE_CHECKING:
    from attnzoo_kernels.context_parallel import ContextParallel
    from attnzoo_kernels.context_placement import Part


class Losses:
    """The sum `total` of the auxiliary losses that layers add, each () and summed over tokens; None before the first.

    It is an object and not a list, because PyTorch's fully_shard gives each layer a copy of a list among its arguments.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        self.total = loss if self.total is None else self.total + loss


@dataclass(frozen=True)
class SequenceInfo:
    """Positions and sequence boundaries of the tokens in one forward pass. All layers receive the same object.

    position_ids: int64, (1, seqlen) or (batch, seqlen) dense, (total,) packed.
    cu_seqlens: int32 (sequences + 1,), None if dense. The last value may be repeated as padding; tokens after it belong to no sequence.
    max_seqlen: int, at least the longest sequence.
    parents: int32 (segments,) for trees of shared prefixes, whose segments `cu_seqlens` bounds, see `attnzoo.batch.Inputs`; else None.
    memo: the results of `once`.
    keys: cu_seqlens and max_seqlen of keys and values where they differ from those of the queries; else None.
    context: the plan of context parallelism (`attnzoo_kernels.context_parallel`). position_ids are then those of this process's tokens,
        while cu_seqlens and max_seqlen describe the whole sequences.
    losses: auxiliary losses, which layers add in training.
    dropout_states: for context parallelism, int64 (layers, 2): seed and offset of each layer's attention dropout; None: layers draw them.
    first_rows: in a part of context parallelism, int64 (sequences,), or (1,) if dense: the index of the part's first query in each whole
        sequence.
    """

    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    keys: tuple[Tensor, int] | None = None
    context: "ContextParallel | None" = None
    parents: Tensor | None = None
    dropout_states: Tensor | None = None
    first_rows: Tensor | None = None
    losses: Losses = field(default_factory=lambda: Losses(), repr=False, compare=False)  # torch.compile cannot call the class

    @property
    def cu_seqlens_k(self) -> Tensor | None:
        return self.cu_seqlens if self.keys is None else self.keys[0]

    @property
    def max_seqlen_k(self) -> int | None:
        return self.max_seqlen if self.keys is None else self.keys[1]

    @property
    def tree_ranges(self) -> KeyRanges:
        """The keys that each query of a tree sees. All layers of a pass share these tables."""
        return self.once("tree ranges", lambda: tree_ranges(self.parents, self.cu_seqlens))

    def dropout_state(self, layer: int, batch: int) -> Tensor | None:
        """`flash_attention`'s dropout_state for a layer; None if the operator draws its own. batch: rows of a dense batch."""
        if self.dropout_states is None:
            return None
        state = self.dropout_states[layer]
        if self.first_rows is None:
            return state
        return torch.cat([state, self.first_rows if self.cu_seqlens is not None else self.first_rows.expand(batch)])

    def context_lengths(self, causal: bool) -> Tensor:
        """The number of tokens that each token may see, by causality and packing alone: int64, in the layout of position_ids."""
        if causal:
            return self.position_ids + 1
        if self.cu_seqlens is None:
            return torch.full_like(self.position_ids, self.position_ids.shape[-1])
        tokens = torch.arange(self.position_ids.shape[0], device=self.position_ids.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.cu_seqlens[1:], tokens, right=True).clamp(max=self.cu_seqlens.shape[0] - 2)
        return self.cu_seqlens.diff()[sequence].clamp(min=1).long()

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """make()'s result, computed by the first layer that asks for `key` in this pass and shared by the others.

        A key must not contain lengths, because torch.compile would turn them into constants. They do not change within a pass, so that a
        key need not contain them.
        """
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def parts(self, causal: bool, window: int, merge: bool) -> tuple[tuple["Part", ...], list["SequenceInfo"]]:
        """For context parallelism: this process's parts, queries with the keys that they see, and a SequenceInfo for each part.

        merge: all chunks in one part, where the plan allows it; only for layers without attention dropout.
        """
        parts = self.context.parts(causal=causal, window=window, cu_seqlens=self.cu_seqlens, max_seqlen=self.max_seqlen, merge=merge)
        dropout_states = None if merge else self.dropout_states
        passes = []
        for part, position_ids in zip(parts, self.position_ids.chunk(len(parts), -1), strict=True):
            lengths = part.lengths
            keys = (lengths["cu_seqlens_k"], lengths["max_seqlen_k"]) if lengths else None
            first_rows = None
            if dropout_states is not None:
                starts = position_ids.new_zeros(1) if self.cu_seqlens is None else self.cu_seqlens[:-1].long()
                first_rows = (part.begin - starts).clamp(min=0)
            passes.append(SequenceInfo(position_ids, lengths.get("cu_seqlens_q"), lengths.get("max_seqlen_q"), keys=keys,
                                       dropout_states=dropout_states, first_rows=first_rows))
        return parts, passes
