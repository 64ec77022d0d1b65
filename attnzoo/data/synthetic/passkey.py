"""Passkey retrieval (Mohtashami & Jaggi 2023, arXiv:2305.16300): a number hidden in filler, and asked for at the end."""

from collections.abc import Callable, Sequence

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
# with distractors each key belongs to one of these, and the question names one
NAMES = ("Accra", "Bern", "Cairo", "Delhi", "Essen", "Faro", "Graz", "Hanoi")
NAMES += ("Izmir", "Jaffa", "Kyoto", "Lima", "Miami", "Nice", "Oslo", "Paris")
NAMED_NEEDLE = "\nThe pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.\n"
NAMED_QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is"


def example(
    length: int,
    *,
    depth: float | None,
    encode: Callable[[str], Sequence[int]],
    seed: int | Sequence[int],
    filler: Sequence[int] | None = None,
    keys: tuple[int, int] = KEYS,
    introduction: str = INTRODUCTION,
    distractors: int = 0,
) -> haystack.Haystack:
    """`length` tokens: introduction, filler with the key's sentence in it, question and answer (a blank and the key's digits).

    Args:
        length: of everything in tokens, the answer included.
        depth: share of the filler before the key, 0 to 1; None draws it.
        encode: text to token ids, without special tokens; pieces are encoded one by one.
        seed: of the key (and depth): an int, or several such as (run, split, row).
        filler: token ids, cut or repeated to what is needed; None takes the task's own five sentences.
        keys: the smallest and the largest key.
        distractors: further keys at depths of their own. Each key then has a name (NAMES), and that of the first is asked for.

    Raises:
        ValueError: `length` has no room for the sentences, or an argument is out of its range.
    """
    low, high = keys
    if not 0 <= low <= high:
        raise ValueError(f"keys={list(keys)} must be the smallest and the largest key, whole numbers from 0 on")
    if not 0 <= distractors < len(NAMES):
        raise ValueError(f"distractors={distractors} must lie between 0 and {len(NAMES) - 1}")
    rng = np.random.default_rng(seed)
    key = int(rng.integers(low, high, endpoint=True))
    depths = [rng.random() if depth is None else depth, *rng.random(distractors)]
    if distractors:
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: distractors + 1]]
        others = rng.integers(low, high, size=distractors, endpoint=True)
        needles = [NAMED_NEEDLE.format(name=name, key=other) for name, other in zip(names, (key, *others), strict=True)]
        question = NAMED_QUESTION.format(name=names[0])
    else:
        needles, question = [NEEDLE.format(key=key)], QUESTION
    return haystack.hide(
        length,
        introduction=encode(introduction),
        needles=[encode(needle) for needle in needles],
        depths=depths,
        question=encode(question),
        answer=encode(ANSWER.format(key=key)),
        filler=haystack.noise(encode) if filler is None else filler,
    )
