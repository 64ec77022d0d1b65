"""Where the tokens of a pass stand."""

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
    """A sum of losses that layers add to, each () and summed over tokens; None before the first. It is no list, because PyTorch's
    fully_shard hands each layer copies of the lists among its arguments."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        self.total = loss if self.total is None else self.total + loss


@dataclass(frozen=True)
class SequenceInfo:
    """Where the tokens of one forward pass stand; the same object goes through all layers.

    position_ids: int64, (1, seqlen) or (batch, seqlen) dense, (total,) packed.
    cu_seqlens: int32 (sequences + 1,), None if dense; repeating the last value pads it, tokens behind it belong to no sequence.
    max_seqlen: int, at least the longest sequence.
    parents: int32 (segments,), None but in trees, whose segments `cu_seqlens` bounds, see `attnzoo.batch.Inputs`.
    keys: cu_seqlens and max_seqlen of keys and values, where there are others than queries; None where they are the same.
    context: which tokens of longer sequences this process has (`attnzoo_kernels.context_parallel`): position_ids are of these tokens,
        cu_seqlens and max_seqlen of the whole.
    losses: what layers learn from beside the model's loss; layers add theirs in training.
    """

    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    keys: tuple[Tensor, int] | None = None
    context: "ContextParallel | None" = None
    parents: Tensor | None = None
    losses: Losses = field(default_factory=lambda: Losses(), repr=False, compare=False)  # torch.compile cannot call the class

    @property
    def cu_seqlens_k(self) -> Tensor | None:
        return self.cu_seqlens if self.keys is None else self.keys[0]

    @property
    def max_seqlen_k(self) -> int | None:
        return self.max_seqlen if self.keys is None else self.keys[1]

    @property
    def tree_ranges(self) -> KeyRanges:
        """Which keys the queries of trees see, with tables that all layers of a pass share."""
        return self.once("tree ranges", lambda: tree_ranges(self.parents, self.cu_seqlens))

    def context_lengths(self, causal: bool) -> Tensor:
        """Tokens that each token may see, as far as the model's kind and the packing say: int64, like position_ids."""
        if causal:
            return self.position_ids + 1
        if self.cu_seqlens is None:
            return torch.full_like(self.position_ids, self.position_ids.shape[-1])
        tokens = torch.arange(self.position_ids.shape[0], device=self.position_ids.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.cu_seqlens[1:], tokens, right=True).clamp(max=self.cu_seqlens.shape[0] - 2)
        return self.cu_seqlens.diff()[sequence].clamp(min=1).long()

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """make()'s result, computed by the first layer that asks for `key` in this pass and shared by the others.

        A key needs no lengths, which are the same all through a pass, and must not hold any: torch.compile would build in their values.
        """
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def parts(self, causal: bool, window: int) -> tuple[tuple["Part", ...], list["SequenceInfo"]]:
        """Of `context`: this process's chunks of queries with the keys that they see, and each as a pass of its own."""
        parts = self.context.parts(causal=causal, window=window, cu_seqlens=self.cu_seqlens, max_seqlen=self.max_seqlen)
        passes = []
        for part, position_ids in zip(parts, self.position_ids.chunk(len(parts), -1), strict=True):
            of = part.lengths
            keys = (of["cu_seqlens_k"], of["max_seqlen_k"]) if of else None
            passes.append(SequenceInfo(position_ids, of.get("cu_seqlens_q"), of.get("max_seqlen_q"), keys=keys))
        return parts, passes
