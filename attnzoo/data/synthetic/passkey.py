"""Passkey retrieval (Mohtashami & Jaggi 2023, arXiv:2305.16300): a number is hidden in filler, and asked for at the end."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnzoo.data.synthetic import haystack

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = " {key}"
KEYS = (1, 50000)
# if a text has several keys, each belongs to one of these names, and a question is about one name
NAMES = ("Accra", "Bern", "Cairo", "Delhi", "Essen", "Faro", "Graz", "Hanoi")
NAMES += ("Izmir", "Jaffa", "Kyoto", "Lima", "Miami", "Nice", "Oslo", "Paris")
NAMED_NEEDLE = "\nThe pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.\n"
NAMED_QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is"


def example(length: int, *, depth: float | None, encode: Callable[[str], Sequence[int]], seed: int | Sequence[int],
            **options: Any) -> haystack.Haystack:
    """A text with a single key that is asked for. The arguments are those of `examples`, with one depth in place of several."""
    return examples(length, depths=[depth], encode=encode, seed=seed, **options)[0]


def examples(
    length: int,
    *,
    depths: Sequence[float | None],
    encode: Callable[[str], Sequence[int]],
    seed: int | Sequence[int],
    filler: Sequence[int] | None = None,
    keys: tuple[int, int] = KEYS,
    introduction: str = INTRODUCTION,
    distractors: int = 0,
) -> list[haystack.Haystack]:
    """One text with a key at each depth, and one example for each key, with the question about it. The examples have a common prefix.

    An example has `length` tokens: introduction, filler with the keys' sentences in it, question and answer (a space and the key's digits).

    Args:
        length: tokens of an example, the answer included.
        depths: share of the filler before each key, from 0 to 1; None draws it.
        encode: text to token ids, without special tokens; each piece is encoded by itself.
        seed: the seed of all that is drawn: an int, or a sequence of ints such as (run, split, row).
        filler: token ids, cut or repeated to the room there is; None takes the task's own five sentences.
        keys: the smallest and the largest key.
        distractors: number of further keys at random depths, which are not asked for. If a text has several keys, each has a name (NAMES).

    Raises:
        ValueError: `length` has no room for the sentences (NoRoom), or an argument is out of its range.
    """
    low, high = keys
    if not 0 <= low <= high:
        raise ValueError(f"keys={list(keys)} must be the smallest and the largest key, whole numbers from 0 on")
    if not 0 <= distractors <= len(NAMES) - len(depths):
        raise ValueError(f"distractors={distractors} must lie between 0 and {len(NAMES) - len(depths)}")
    rng = np.random.default_rng(seed)
    asked = [int(rng.integers(low, high, endpoint=True)) for _ in depths]
    places = [*(rng.random() if depth is None else depth for depth in depths), *rng.random(distractors)]
    if len(places) > 1:
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: len(places)]]
        others = rng.integers(low, high, size=distractors, endpoint=True)
        needles = [NAMED_NEEDLE.format(name=name, key=key) for name, key in zip(names, (*asked, *others), strict=True)]
        questions = [NAMED_QUESTION.format(name=name) for name in names[: len(depths)]]
    else:
        needles, questions = [NEEDLE.format(key=asked[0])], [QUESTION]
    return haystack.hide_for_all(
        length,
        introduction=encode(introduction),
        needles=[encode(needle) for needle in needles],
        depths=places,
        questions=[encode(question) for question in questions],
        answers=[encode(ANSWER.format(key=key)) for key in asked],
        filler=haystack.noise(encode) if filler is None else filler,
    )
