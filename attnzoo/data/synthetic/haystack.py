"""Needles in a haystack: sentences hidden in filler at given depths, and a question about them at the end.

Examples are put together from token ids, so that they have exactly the given length with any tokenizer: `encode` each piece, then `hide`
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnzoo.batch import IGNORED
from attnzoo.errors import NoRoom

# Landmark attention (Mohtashami & Jaggi 2023, arXiv:2305.16300)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Haystack:
    """An example: the prompt, then its answer.

    Attributes:
        input_ids: int64 `(length,)`.
        answer: the slice of `input_ids` with the answer, at the end; the prompt is `input_ids[: answer.start]`.
        needles: the slice with each needle, in the order in which the needles were given.
    """

    input_ids: np.ndarray
    answer: slice
    needles: tuple[slice, ...]

    @property
    def prompt(self) -> np.ndarray:
        return self.input_ids[: self.answer.start]

    @property
    def answer_ids(self) -> np.ndarray:
        return self.input_ids[self.answer]

    @property
    def labels(self) -> np.ndarray:
        """int64 `(length,)`, aligned with the logits: each token of the answer at the position before its own; -100 elsewhere."""
        labels = np.full(len(self.input_ids), IGNORED)
        labels[self.answer.start - 1 : self.answer.stop - 1] = self.answer_ids
        return labels


def hide(
    length: int,
    *,
    needles: Sequence[Sequence[int]],
    depths: Sequence[float],
    question: Sequence[int],
    answer: Sequence[int],
    filler: Sequence[int],
    introduction: Sequence[int] = (),
) -> Haystack:
    """An example of `length` tokens in all: introduction, filler with the needles in it, question, answer.

    Args:
        needles: token ids of each hidden sentence.
        depths: for each needle the share of the filler before it, from 0 (directly after the introduction) to 1 (before the question).
        question, answer: token ids, at least one each.
        filler: token ids, at least one; they are cut to the room there is, or repeated if there are too few.

    Raises:
        NoRoom: `length` is too short for introduction, needles, question and answer.
        ValueError: a depth is out of range, there is not one depth for each needle, or question, answer or filler are empty.
    """
    return hide_for_all(length, needles=needles, depths=depths, questions=[question], answers=[answer], filler=filler,
                        introduction=introduction)[0]


def hide_for_all(
    length: int,
    *,
    needles: Sequence[Sequence[int]],
    depths: Sequence[float],
    questions: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    filler: Sequence[int],
    introduction: Sequence[int] = (),
) -> list[Haystack]:
    """An example as `hide` makes it for each of the questions about one text; the examples have a common prefix.

    Depths are shares of the filler in the example with the longest question and answer. The other examples have more filler before their
    question, so that all of them have `length` tokens. Raises what `hide` raises.
    """
    shortest = [min((len(part) for part in parts), default=0) for parts in (questions, answers, [filler])]
    if not all(shortest):
        raise ValueError("question, answer, filler: must have at least one token each, got {}, {}, {}".format(*shortest))
    if len(depths) != len(needles) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths={list(depths)} must be one number from 0 to 1 for each of the {len(needles)} needles")
    asked = [len(question) + len(answer) for question, answer in zip(questions, answers, strict=True)]
    needed = len(introduction) + sum(map(len, needles)) + max(asked)
    n_filler = length - needed
    if n_filler < 0:
        raise NoRoom(f"length={length} must be at least {needed}, the tokens of introduction, needles, question and answer")
    fill = np.resize(np.asarray(filler, np.int64), n_filler + max(asked) - min(asked))
    parts, spans, at, taken = [introduction], {}, len(introduction), 0
    for i in np.argsort(depths, kind="stable"):
        cut = round(depths[i] * n_filler)
        parts += [fill[taken:cut], needles[i]]
        at += cut - taken
        spans[i] = slice(at, at + len(needles[i]))
        at, taken = spans[i].stop, cut
    found = []
    for question, answer, n in zip(questions, answers, asked, strict=True):
        rest = [fill[taken : n_filler + max(asked) - n], question, answer]
        input_ids = np.concatenate([np.asarray(part, np.int64) for part in parts + rest])
        found.append(Haystack(input_ids, slice(length - len(answer), length), tuple(spans[i] for i in range(len(needles)))))
    return found


def noise(encode: Callable[[str], Sequence[int]]) -> np.ndarray:
    """Token ids of the passkey task's own filler, five sentences without information; `hide` repeats them."""
    return np.asarray(encode(NOISE), np.int64)
