"""Shapes of `flash_attention` over key ranges, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnzoo_kernels.flash.cases import Case, Inputs, _pairs
from attnzoo_kernels.ranges import CAUSAL, CAUSAL_TOP_LEFT, FULL


@dataclass(frozen=True)
class RangeCase(Case):
    """One problem: lengths_q and lengths_k hold one number each, of all queries and keys; ranges are rows of KeyRanges.

    label: how the case is called.
    """

    ranges: tuple[tuple[int, int, int, int, int], ...] = ()
    label: str = "ranges"

    def pairs(self) -> float:
        """Of one head, counted as often as ranges show them. Plain causal ranges count as half, as the field does."""
        def seen(q_begin, q_end, k_begin, k_end, kind):
            queries, keys = max(q_end - q_begin, 0), max(k_end - k_begin, 0)
            if kind == CAUSAL_TOP_LEFT:  # behind the last key's query all keys are seen
                inside = min(queries, keys)
                return _pairs(inside, inside, True, (self.window_size[0], 0)) + (queries - inside) * keys
            return _pairs(queries, keys, kind == CAUSAL, self.window_size)

        return sum(seen(*row) for row in self.ranges)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        x = super().inputs(device, seed)
        options = {name: x.options[name] for name in ("window_size", "softcap", "sinks") if name in x.options}
        return x._replace(options=options | {"ranges": torch.tensor(self.ranges, dtype=torch.int32, device=device).view(-1, 5)})

    def __str__(self) -> str:
        return "-".join([self.label, f"{len(self.ranges)}of{self.lengths[0][0]}", *super().__str__().split("-")[1:]])


TREE = ((0, 70, 0, 20, CAUSAL_TOP_LEFT), (20, 45, 20, 41, CAUSAL_TOP_LEFT), (41, 45, 41, 45, CAUSAL_TOP_LEFT),
        (45, 70, 45, 70, CAUSAL_TOP_LEFT))
CROSSING = ((3, 33, 5, 50, CAUSAL), (10, 60, 50, 80, FULL), (0, 0, 3, 4, FULL), (50, 66, 40, 20, CAUSAL), (40, 64, 0, 33, CAUSAL),
            (62, 70, 60, 61, FULL), (60, 65, 40, 43, CAUSAL))
TWICE = ((0, 40, 0, 33, FULL), (8, 30, 10, 40, FULL), (8, 30, 10, 40, CAUSAL))

CORRECTNESS: tuple[RangeCase, ...] = (
    RangeCase(lengths_q=(70,), heads=4, kv_heads=2, head_dim=16, ranges=TREE, label="tree"),
    RangeCase(lengths_q=(70,), lengths_k=(80,), head_dim=16, ranges=CROSSING, sinks=True, label="crossing"),
    RangeCase(lengths_q=(70,), lengths_k=(80,), head_dim=16, value_dim=32, ranges=CROSSING, window_size=(9, 3), strided=True,
              label="crossing"),
    RangeCase(lengths_q=(41,), lengths_k=(40,), heads=1, head_dim=16, ranges=TWICE, softcap=5.0, label="twice"),
    RangeCase(lengths_q=(17,), heads=1, head_dim=16, label="nothing"),
)
