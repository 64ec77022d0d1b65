"""Passkey retrieval (Mohtashami & Jaggi 2023, arXiv:2305.16300): a number is hidden in filler, and asked for at the end.

`example` and `examples` are of that kind. `quiz` asks for many numbers of one text, so that more of its tokens are answers.
"""

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
# for texts with more keys than that
MANY_NAMES = (
    *NAMES, "Abuja", "Agra", "Aleppo", "Amman", "Ankara", "Antwerp", "Athens", "Baku", "Bamako", "Bari", "Basel", "Basra", "Bath",
    "Beirut", "Bergen", "Bogota", "Bonn", "Boston", "Brest", "Bristol", "Bruges", "Cadiz", "Calais", "Cardiff", "Chennai", "Chicago",
    "Cologne", "Cork", "Dakar", "Dallas", "Damascus", "Danzig", "Denver", "Derby", "Dhaka", "Dijon", "Doha", "Dover", "Dublin",
    "Durban", "Erfurt", "Exeter", "Fargo", "Fez", "Florence", "Geneva", "Genoa", "Ghent", "Glasgow", "Granada", "Hamburg", "Harare",
    "Havana", "Houston", "Jakarta", "Kabul", "Kampala", "Karachi", "Kiel", "Kiev", "Kigali", "Kobe", "Krakow", "Lagos", "Lahore",
    "Leeds", "Leiden", "Lisbon", "London", "Luanda", "Lusaka", "Lyon", "Madrid", "Malaga", "Mainz", "Malmo", "Manila", "Maputo",
    "Medina", "Memphis", "Metz", "Milan", "Minsk", "Mumbai", "Munich", "Nairobi", "Nantes", "Naples", "Odessa", "Osaka", "Ottawa",
    "Padua", "Perth", "Pisa", "Porto", "Prague", "Quito", "Rabat", "Riga", "Rome", "Salta", "Seoul", "Seville", "Siena", "Sofia",
    "Split", "Sydney", "Tampa", "Tehran", "Tokyo", "Tunis", "Turin")
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
    check_keys(keys)
    if not 0 <= distractors <= len(NAMES) - len(depths):
        raise ValueError(f"distractors={distractors} must lie between 0 and {len(NAMES) - len(depths)}")
    rng = np.random.default_rng(seed)
    asked = [int(rng.integers(*keys, endpoint=True)) for _ in depths]
    places = [*(rng.random() if depth is None else depth for depth in depths), *rng.random(distractors)]
    if len(places) > 1:
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: len(places)]]
        others = rng.integers(*keys, size=distractors, endpoint=True)
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


def quiz(
    length: int,
    *,
    questions: int,
    encode: Callable[[str], Sequence[int]],
    seed: int | Sequence[int],
    filler: Sequence[int] | None = None,
    keys: tuple[int, int] = KEYS,
    introduction: str = INTRODUCTION,
    distractors: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """A text of several keys, each with a name, that are asked for one by one at random places behind their own: `input_ids` and `labels`.

    Both are int64 `(length,)`; labels are the answers' tokens at the positions before their own, and -100 elsewhere. The last question and
    its answer end the text. A key and its question stand at two places that are drawn evenly, so that all distances occur.

    Args:
        questions: number of keys that are asked for.
        distractors: number of further keys, which are not asked for.
        length, encode, seed, filler, keys, introduction: as for `examples`.

    Raises:
        ValueError: `length` has no room for the sentences (NoRoom), or an argument is out of its range.
    """
    check_keys(keys)
    n_keys = questions + distractors
    if questions < 1 or distractors < 0 or n_keys > len(MANY_NAMES):
        raise ValueError(f"questions={questions}, distractors={distractors} must be at least 1 and 0, and together at most "
                         f"{len(MANY_NAMES)}")
    rng = np.random.default_rng(seed)
    hidden = rng.integers(*keys, size=n_keys, endpoint=True)
    names = [MANY_NAMES[i] for i in rng.permutation(len(MANY_NAMES))[:n_keys]]
    needles = [encode(NAMED_NEEDLE.format(name=name, key=key)) for name, key in zip(names, hidden, strict=True)]
    asked = [encode(NAMED_QUESTION.format(name=name)) for name in names[:questions]]
    answers = [encode(ANSWER.format(key=key)) for key in hidden[:questions]]
    end = encode("\n")
    places = np.sort(rng.random((questions, 2)))
    last = int(places[:, 1].argmax())
    others = [i for i in range(questions) if i != last]
    made = haystack.hide(
        length,
        introduction=encode(introduction),
        needles=[*needles, *([*asked[i], *answers[i], *end] for i in others)],
        depths=[*places[:, 0], *rng.random(distractors), *places[others, 1]],
        question=asked[last],
        answer=answers[last],
        filler=haystack.noise(encode) if filler is None else filler,
    )
    labels = made.labels
    for i, asking in zip(others, made.needles[n_keys:], strict=True):
        stop = asking.stop - len(end)
        labels[stop - len(answers[i]) - 1 : stop - 1] = answers[i]
    return made.input_ids, labels


def check_keys(keys: tuple[int, int]) -> None:
    if not 0 <= keys[0] <= keys[1]:
        raise ValueError(f"keys={list(keys)} must be the smallest and the largest key, whole numbers from 0 on")
