"""RULER's needle and variable tracking tasks (Hsieh et al. 2024, arXiv:2404.06654), with prompts of exact length for any tokenizer.

The sentences, the numbers of keys, values and queries, the places (40 depths, drawn without replacement) and the metric are as published.
These are the differences: the natural text is the run's validation text and not Paul Graham's essays; keys are from shorter lists of words;
needles may stand between any two tokens of the filler, not only between its sentences; the noise has no line breaks; variable tracking has
no worked example before it.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnzoo.data.synthetic import haystack
from attnzoo.errors import NoRoom

ADJECTIVES = (
    "able ancient bitter brave bright broken calm cheap clean clever cold curious damp dark dear deep distant dusty eager early easy "
    "empty fair fancy fast fierce fine firm flat fond fresh gentle glad golden grand green happy heavy hidden hollow honest huge humble "
    "icy idle jolly keen kind large lazy light little lively lonely loud lucky merry mild modest narrow neat noble odd old open pale "
    "patient plain polite proud quick quiet rapid rare red rich ripe rough round royal rude rusty sad safe salty sharp shiny short shy "
    "silent silver simple slow small smooth soft solid sour steady steep still strange strong sudden sweet swift tall tame tender thick "
    "thin tidy tiny tired true vast warm weak weary wet wide wild wise wooden young"
).split()
NOUNS = (
    "anchor apple arrow badge basket beach bell bird blanket boat bottle branch bread bridge brush bucket button cabin candle canyon "
    "carpet castle chain chair cherry circle clock cloud coat coin copper corner cotton crown curtain desert diamond door dragon drum "
    "eagle engine falcon feather fence field flag flame flower forest fountain garden gate glass glove guitar hammer harbor hill horse "
    "island jacket jewel kettle key kitchen kite ladder lake lamp lantern lemon letter lion magnet maple market meadow mirror monkey "
    "moon mountain needle nest ocean office onion orange otter oven owl palace paper parrot path pencil pepper piano pillow pirate "
    "planet pocket pond potato puzzle rabbit rainbow river rocket roof rope saddle sail salmon school shadow shelf ship silk smoke "
    "spider spoon spring square stable star stone storm summer table temple thread tiger timber tower trail train tunnel turtle valley "
    "velvet village violin wagon wallet water whale wheel whistle window winter wizard wolf"
).split()
DEPTHS = np.linspace(0, 1, 40)


@dataclass(frozen=True)
class Needles:
    """The needles of a task.

    haystack: "noise", "text", or "needles" (the filler consists of further needles). key, value: "words", "numbers" or "uuids".
    n_keys: the number of hidden keys. n_values: the number of values of each key. n_queries: the number of keys that are asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


NIAH = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", n_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", n_values=4),
    "niah_multiquery": Needles("text", n_keys=4, n_queries=4),
}
N_HOPS = 4
MULTIKEY = tuple(name for name in NIAH if "multikey" in name)
TASKS = (*NIAH, "vt")
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30}  # the number of tokens to generate, as published


@dataclass(frozen=True)
class Question:
    """A question about a text: the sentences to hide in filler, in this order if `ordered`, and the answers to find (`references`)."""

    introduction: str
    sentences: tuple[str, ...]
    question: str
    references: tuple[str, ...]
    ordered: bool = False

    @property
    def answer(self) -> str:
        return " " + ", ".join(self.references)


def ask(name: str, rng: np.random.Generator, questions: int = 1) -> list[Question]:
    """The questions of the task `name` about one text: one, or for a task of MULTIKEY `questions` of them, each about another key."""
    return [_track_variables(rng)] if name == "vt" else _ask_for_needles(NIAH[name], questions if name in MULTIKEY else 1, rng)


def prompts(
    name: str,
    asked: Sequence[Question],
    length: int,
    n_new: int,
    *,
    encode: Callable[[str], Sequence[int]],
    text: np.ndarray,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """The prompt of each question about one text, int64 (length - n_new,): introduction, filler with the sentences in it, question.

    n_new: the number of tokens to generate after it. text: token ids of the natural text, read from a random place on. Raises NoRoom if
    `length` is too short.
    """
    kind = NIAH[name].haystack if name in NIAH else "noise"
    needles = [encode(f"\n{sentence}\n") for sentence in asked[0].sentences]
    introduction, questions = encode(asked[0].introduction), [encode(one.question) for one in asked]
    needed = sum(map(len, (introduction, max(questions, key=len), *needles)))
    if (room := length - n_new - needed) < 0:
        raise NoRoom(f"needs a length of at least {needed + n_new}: {needed} tokens of needles and question, {n_new} of answer")
    if kind == "needles":
        needles, depths = _among_others(needles, "".join(one.question for one in asked), NIAH[name], room, encode, rng)
    else:
        depths = rng.choice(DEPTHS, len(needles), replace=False)
        depths = np.sort(depths) if asked[0].ordered else depths
    filler = text[(rng.integers(len(text)) + np.arange(length)) % len(text)] if kind == "text" else haystack.noise(encode)
    # a haystack must have an answer: one token, which is not part of the prompt
    made = haystack.hide_for_all(length - n_new + 1, introduction=introduction, needles=needles, depths=list(map(float, depths)),
                                 questions=questions, answers=[[0]] * len(questions), filler=filler)
    return [one.prompt for one in made]


def score(references: Sequence[str], text: str) -> float:
    """The share of the references that occur in the text, without regard to case (RULER's string_match_all)."""
    return sum(reference.lower() in text.lower() for reference in references) / len(references)


def _among_others(
    needles: list, question: str, task: Needles, room: int, encode: Callable, rng: np.random.Generator
) -> tuple[list, list[float]]:
    """The needles at random places among as many further needles as there is room for, and their depths. No further needle has a key that
    is asked for. All depths are 0, so that the remaining filler comes after the needles."""
    others = []
    while True:
        key, value = _draw(task.key, rng), _draw(task.value, rng)
        if f" {key} " in question:  # the question would have two answers; among thousands of needles a pair of words does occur again
            continue
        other = encode(f"\n{_needle(task, key, value)}\n")
        room -= len(other)
        if room < 0:
            break
        others.append(other)
    for needle in needles:
        others.insert(int(rng.integers(len(others) + 1)), needle)
    return others, [0.0] * len(others)


def _needle(task: Needles, key: str, value: str) -> str:
    return f"One of the special magic {task.value} for {key} is: {value}."


def _ask_for_needles(task: Needles, questions: int, rng: np.random.Generator) -> list[Question]:
    n_keys = max(task.n_keys, questions * task.n_queries)
    keys = _distinct(task.key, n_keys, rng)
    values = _distinct(task.value, n_keys * task.n_values, rng)
    hidden = [(key, values[i * task.n_values + j]) for i, key in enumerate(keys) for j in range(task.n_values)]
    order = [keys[i] for i in rng.permutation(n_keys)]
    return [_needle_question(task, hidden, order[i * task.n_queries : (i + 1) * task.n_queries]) for i in range(questions)]


def _needle_question(task: Needles, hidden: Sequence[tuple[str, str]], asked: Sequence[str]) -> Question:
    query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    single = task.n_queries * task.n_values == 1
    kind, are = (task.value[:-1], "is") if single else (task.value, "are")
    return Question(
        introduction=f"{'A' if single else 'Some'} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n",
        sentences=tuple(_needle(task, key, value) for key, value in hidden),
        question=f"\nWhat {are}{'' if single else ' all'} the special magic {kind} for {query} mentioned in the provided text?"
        f" The special magic {kind} for {query} mentioned in the provided text {are}",
        references=tuple(value for key, value in hidden if key in asked),
    )


def _track_variables(rng: np.random.Generator) -> Question:
    names = _distinct("variables", N_HOPS + 1, rng)
    value = str(rng.integers(10000, 99999))
    return Question(
        introduction="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        sentences=(f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False))),
        question=f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) "
        f"of variable assignment in the text above, {len(names)} variables are assgined the value {value}, they are:",  # sic
        references=tuple(names),
        ordered=True,
    )


def _distinct(kind: str, n: int, rng: np.random.Generator) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < n:
        drawn[_draw(kind, rng)] = None
    return list(drawn)


def _draw(kind: str, rng: np.random.Generator) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "variables":
        return "".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
