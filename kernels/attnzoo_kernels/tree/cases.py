"""Shapes of `tree_attention`, shared by the tests and the benchmarks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from attnzoo_kernels.flash.cases import Inputs
from attnzoo_kernels.flash.range_cases import RangeCase
from attnzoo_kernels.tree.segments import reference_ranges


@dataclass(frozen=True)
class Case(RangeCase):
    """One problem: segments given by their parents and the bounds of their tokens. `of` makes it from the segments' lengths. The options of
    the call are parents and cu_seqlens."""

    parents: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()

    @classmethod
    def of(cls, parents: tuple[int, ...], segments: tuple[int, ...], **changes: Any) -> Case:
        bounds = (0, *itertools.accumulate(segments))
        ranges = reference_ranges(torch.tensor(parents, dtype=torch.int32), torch.tensor(bounds, dtype=torch.int32))
        return cls(lengths_q=(bounds[-1],), parents=parents, bounds=bounds, ranges=tuple(map(tuple, ranges.tolist())),
                   **{"label": "tree"} | changes)

    @property
    def leaves(self) -> list[list[int]]:
        """For each leaf, the tokens of the sequence from its root to it."""
        paths = []
        for leaf in set(range(len(self.parents))) - set(self.parents):
            path, segment = [], leaf
            while segment >= 0:
                path.append(range(*self.bounds[segment : segment + 2]))
                segment = self.parents[segment]
            paths.append([token for segment in reversed(path) for token in segment])
        return paths

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        x = super().inputs(device, seed)
        return x._replace(options={"parents": torch.tensor(self.parents, dtype=torch.int32, device=device),
                                   "cu_seqlens": torch.tensor(self.bounds, dtype=torch.int32, device=device)})


def drawn(segments: int, longest: int, seed: int, **changes: Any) -> Case:
    """Random trees. The parent of each segment is the segment before it or an ancestor of that one, or the segment is a root."""
    draw = random.Random(seed)
    parents: list[int] = []
    for segment in range(segments):
        above = [segment - 1] if segment else []
        while above and above[-1] >= 0:
            above.append(parents[above[-1]])
        parents.append(draw.choice(above) if above else -1)
    return Case.of(tuple(parents), tuple(draw.choice((0, 1, draw.randint(0, longest), longest)) for _ in range(segments)), **changes)


def rollouts(prompt: int, answer: int, answers: int, groups: int = 1, **changes: Any) -> Case:
    """`groups` prompts of `prompt` tokens, each with `answers` answers of `answer` tokens."""
    parents = tuple(p for group in range(groups) for p in (-1, *[group * (answers + 1)] * answers))
    return Case.of(parents, (prompt, *[answer] * answers) * groups, label=f"rollouts{prompt}+{answers}x{answer}", **changes)


CORRECTNESS: tuple[Case, ...] = (
    Case.of((-1, 0, 1, 0, -1, 4), (20, 21, 4, 25, 9, 0), heads=4, kv_heads=2, head_dim=16),
    rollouts(33, 9, 3, head_dim=32, value_dim=16, strided=True),
    Case.of((-1,), (40,), head_dim=16),
    drawn(12, 14, 3, head_dim=16),
)
