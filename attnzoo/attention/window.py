"""The sliding window that several variants share."""

from collections.abc import Sequence

from attnzoo.attention.base import Attention, AttentionSpec


class WindowedAttention(Attention):
    """Base of variants with a sliding window.

    window_size: (left, right), how many keys before and after its own a query sees; -1 is unlimited. right is 0 in a causal model.
    """

    def __init__(self, spec: AttentionSpec, window_size: Sequence[int]):
        super().__init__(spec)
        if len(window_size) != 2 or any(not isinstance(side, int) or side < -1 for side in window_size):
            raise ValueError(f"attention.window_size={list(window_size)}: must be two integers of at least -1 (unlimited), [left, right]")
        self.window_size = tuple(window_size)

    @property
    def keys_before(self) -> int:
        return self.window_size[0]

    def check_context_parallel(self, packed: bool) -> None:
        super().check_context_parallel(packed)
        if not self.spec.causal and self.window_size != (-1, -1):
            raise ValueError(f"trainer.context_parallel: needs attention.window_size=[-1,-1] in a bidirectional model, got "
                             f"{list(self.window_size)}")

    def visible_pairs(self, length: int) -> int:
        limit = length - 1
        left, right = (limit if side < 0 else min(side, limit) for side in self.window_size)
        # each side of the diagonal is a triangle, cut off at the window's width
        sides = (left,) if self.spec.causal else (left, right)
        return length + sum(side * length - side * (side + 1) // 2 for side in sides)
