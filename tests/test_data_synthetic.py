"""Tasks made by rule: what they promise about every example, for bytes and for a tokenizer of words."""

import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from attnzoo.data.synthetic import copying, haystack, induction, listops, passkey, recall
from attnzoo.data.tokenizers import ByteTokenizer

TOKEN_TASKS = {"recall": (recall.example, {"n_pairs": 4}), "copying": (copying.example, {}), "induction": (induction.example, {})}


@pytest.fixture(params=["bytes", "words"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    text = passkey.INTRODUCTION + passkey.NEEDLE + passkey.QUESTION + haystack.NOISE
    pieces = [piece for piece, _ in pre_tokenizers.ByteLevel().pre_tokenize_str(text + "0123456789")]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *pre_tokenizers.ByteLevel.alphabet()]))}
    words = Tokenizer(models.BPE(vocab, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    class Words:
        def encode(self, text):
            return words.encode(text).ids

        def decode(self, ids):
            return "".join(words.id_to_token(int(i)) for i in ids).replace("Ġ", " ").replace("Ċ", "\n")

    return Words()


@pytest.mark.parametrize("task", TOKEN_TASKS)
def test_seed_decides_everything(task):
    example, options = TOKEN_TASKS[task]
    first, again, other = (np.stack(example(64, seed=seed, **options)) for seed in ((0, 1), (0, 1), (0, 2)))
    assert first.shape == (2, 64) and first.dtype == np.int64
    assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(("seq_len", "n_pairs", "vocab_size"), [(64, 4, 8192), (16, 4, 10), (128, 8, 40)])
def test_recall_asks_each_key_once_for_its_value(seq_len, n_pairs, vocab_size):
    for row in range(20):
        input_ids, labels = recall.example(seq_len, n_pairs=n_pairs, vocab_size=vocab_size, seed=(0, row))
        keys, values = input_ids[0 : 2 * n_pairs : 2], input_ids[1 : 2 * n_pairs : 2]
        assert len(set(keys)) == len(set(values)) == n_pairs
        assert keys.min() >= 1 and keys.max() < vocab_size // 2 <= values.min() and values.max() < vocab_size
        asked = np.flatnonzero(labels != -100)
        assert (asked >= 2 * n_pairs).all() and (asked % 2 == 0).all()
        assert sorted(input_ids[asked]) == sorted(keys)
        value_of = dict(zip(keys, values, strict=True))
        assert [value_of[key] for key in input_ids[asked]] == list(labels[asked])


@pytest.mark.parametrize("random_fill", [False, True])
def test_recall_fills_the_rest_as_told(random_fill):
    rows = [recall.example(64, n_pairs=4, seed=(0, row), random_fill=random_fill) for row in range(5)]
    rest = np.concatenate([input_ids[8:][labels[8:] == -100] for input_ids, labels in rows])
    assert (len(set(rest)) > 200) if random_fill else (rest == 0).all()


def test_recall_gaps_follow_the_power_law():
    """The first key's gap: g + 1 has probability ~ (g + 1)^(power - 1), within four standard deviations in each of 4000 draws' bins."""
    n_rows, power = 4000, 0.01
    counts = np.zeros(28)
    for row in range(n_rows):
        input_ids, labels = recall.example(64, n_pairs=4, seed=(0, row))
        counts[(np.flatnonzero((input_ids == input_ids[0]) & (labels != -100))[0] - 8) // 2] += 1
    p = np.arange(1, 29) ** (power - 1)
    p /= p.sum()
    assert (abs(counts - n_rows * p) < 4 * np.sqrt(n_rows * p * (1 - p))).all()


@pytest.mark.parametrize(("seq_len", "n_tokens"), [(8, None), (9, None), (2, None), (32, 5), (31, 1)])
def test_copying_repeats_the_tokens_in_order(seq_len, n_tokens):
    input_ids, labels = copying.example(seq_len, seed=3, n_tokens=n_tokens)
    n = n_tokens or seq_len // 2
    begin = seq_len - n
    tokens = input_ids[:begin][input_ids[:begin] > copying.BLANK]
    assert len(tokens) == n and list(labels[begin:]) == list(tokens)
    assert input_ids[begin] == copying.SEPARATOR and list(input_ids[begin + 1 :]) == list(tokens[:-1])
    assert (labels[:begin] == -100).all()


@pytest.mark.parametrize("seq_len", [3, 4, 256])
def test_induction_asks_what_followed_the_special_token(seq_len):
    for row in range(20):
        input_ids, labels = induction.example(seq_len, seed=(0, row))
        first, last = np.flatnonzero(input_ids == induction.SPECIAL)
        assert last == seq_len - 1 and labels[-1] == input_ids[first + 1] != induction.SPECIAL
        assert (labels[:-1] == -100).all()


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [333, 1000])
def test_passkey_meets_length_and_depth(tokenizer, length, depth):
    made = passkey.example(length, depth=depth, encode=tokenizer.encode, seed=(0, length))
    assert len(made.input_ids) == len(made.labels) == length and made.answer.stop == length
    (needle,) = made.needles
    key = tokenizer.decode(made.answer_ids).strip()
    assert 1 <= int(key) <= 50000
    assert tokenizer.decode(made.input_ids[needle]) == passkey.NEEDLE.format(key=key)
    assert tokenizer.decode(made.prompt).startswith(passkey.INTRODUCTION) and tokenizer.decode(made.prompt).endswith(passkey.QUESTION)
    before = needle.start - len(tokenizer.encode(passkey.INTRODUCTION))
    after = made.answer.start - len(tokenizer.encode(passkey.QUESTION)) - needle.stop
    assert abs(before - depth * (before + after)) <= 0.5
    asked = np.flatnonzero(made.labels != -100)
    assert list(made.labels[asked]) == list(made.answer_ids) and list(made.input_ids[asked[1:]]) == list(made.answer_ids[:-1])


def test_passkey_fits_exactly_or_says_what_it_needs(tokenizer):
    with pytest.raises(ValueError, match="length=5 must be at least") as raised:
        passkey.example(5, depth=0.5, encode=tokenizer.encode, seed=0)
    needed = int(str(raised.value).split("at least ")[1].split(",")[0])
    made = passkey.example(needed, depth=0.5, encode=tokenizer.encode, seed=0)
    assert len(made.input_ids) == needed
    with pytest.raises(ValueError, match="must be at least"):
        passkey.example(needed - 1, depth=0.5, encode=tokenizer.encode, seed=0)


def test_distractors_have_names_and_the_question_asks_for_the_first():
    made = passkey.example(2000, depth=0.5, encode=ByteTokenizer().encode, seed=3, distractors=5)
    needles = [bytes(made.input_ids[needle].astype("uint8")).decode() for needle in made.needles]
    found = [re.fullmatch(r"\nThe pass key of (\w+) is (\d+)\. Remember it\. \2 is the pass key of \1\.\n", needle) for needle in needles]
    names = [match[1] for match in found]
    assert len(set(names)) == 6 and set(names) <= set(passkey.NAMES)
    prompt, answer = bytes(made.prompt.astype("uint8")).decode(), bytes(made.answer_ids.astype("uint8")).decode()
    assert prompt.endswith(f"\nWhat is the pass key of {names[0]}? The pass key of {names[0]} is") and answer == f" {found[0][2]}"
    assert len({needle.start for needle in made.needles}) == 6
    with pytest.raises(ValueError, match="distractors=16 must lie between 0 and 15"):
        passkey.example(2000, depth=0.5, encode=ByteTokenizer().encode, seed=3, distractors=16)


@pytest.mark.parametrize(("questions", "distractors"), [(1, 0), (5, 2), (40, 8)])
def test_a_quiz_asks_for_each_key_once_and_behind_it(tokenizer, questions, distractors):
    if not isinstance(tokenizer, ByteTokenizer):
        pytest.skip("its vocabulary lacks the names")
    needle = re.compile(r"\nThe pass key of (\w+) is (\d+)\. Remember it\. \2 is the pass key of \1\.\n")
    question = re.compile(r"\nWhat is the pass key of (\w+)\? The pass key of \1 is (\d+)(\n|$)")
    for row in range(3):
        input_ids, labels = passkey.quiz(9000, questions=questions, distractors=distractors, encode=tokenizer.encode, seed=(0, row))
        assert input_ids.shape == labels.shape == (9000,) and input_ids.dtype == labels.dtype == np.int64
        text = tokenizer.decode(input_ids)
        hidden = {match[1]: match for match in needle.finditer(text)}
        asked = list(question.finditer(text))
        assert len(hidden) == questions + distractors and len({match[1] for match in asked}) == len(asked) == questions
        assert asked[-1].end() == len(text)
        targets = np.full(9000, -100)
        for match in asked:
            assert match[2] == hidden[match[1]][2] and match.start() >= hidden[match[1]].end()
            targets[match.start(2) - 2 : match.end(2) - 1] = input_ids[match.start(2) - 1 : match.end(2)]  # the space and the digits
        assert np.array_equal(labels, targets)
    with pytest.raises(ValueError, match="questions=120, distractors=9 must be at least 1 and 0, and together at most 128"):
        passkey.quiz(9000, questions=120, distractors=9, encode=tokenizer.encode, seed=0)


def test_passkey_takes_any_filler():
    tokenizer = ByteTokenizer()
    made = passkey.example(600, depth=None, encode=tokenizer.encode, seed=5, filler=[120, 121], introduction="")
    (needle,) = made.needles
    filler = np.concatenate([made.input_ids[: needle.start], made.input_ids[needle.stop : -len(passkey.QUESTION) - len(made.answer_ids)]])
    assert list(filler) == [120, 121] * (len(filler) // 2) + [120] * (len(filler) % 2)


def test_several_needles_keep_their_order_and_places():
    made = haystack.hide(
        20, needles=[[101, 102], [103], [104]], depths=[1.0, 0.0, 0.5], question=[7], answer=[9, 9], filler=range(10), introduction=[5]
    )
    assert list(made.input_ids) == [5, 103, 0, 1, 2, 3, 4, 5, 104, 6, 7, 8, 9, 0, 1, 101, 102, 7, 9, 9]
    assert [list(made.input_ids[needle]) for needle in made.needles] == [[101, 102], [103], [104]]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (recall.example, {"seq_len": 15, "n_pairs": 2}, "seq_len=15 must be even"),
        (recall.example, {"seq_len": 12, "n_pairs": 4}, "at least 4 n_pairs = 16"),
        (recall.example, {"seq_len": 12, "n_pairs": 0}, "n_pairs=0"),
        (recall.example, {"seq_len": 16, "n_pairs": 4, "vocab_size": 9}, "vocab_size=9 must be at least 2 n_pairs"),
        (recall.example, {"seq_len": 16, "n_pairs": 4, "power": 0}, "power=0 must be above 0"),
        (copying.example, {"seq_len": 8, "n_tokens": 5}, "n_tokens=5 must be from 1 to seq_len // 2 = 4"),
        (copying.example, {"seq_len": 1}, "seq_len=1 must be at least 2"),
        (copying.example, {"seq_len": 8, "vocab_size": 3}, "vocab_size=3"),
        (induction.example, {"seq_len": 2}, "seq_len=2 must be at least 3"),
        (induction.example, {"seq_len": 8, "vocab_size": 2}, "vocab_size=2"),
        (passkey.example, {"length": 400, "depth": 1.5, "encode": ByteTokenizer().encode}, r"depths=\[1.5\]"),
        (passkey.example, {"length": 400, "depth": 0, "encode": ByteTokenizer().encode, "keys": (9, 1)}, r"keys=\[9, 1\]"),
        (passkey.example, {"length": 400, "depth": 0, "encode": ByteTokenizer().encode, "filler": []}, "filler: must have"),
    ],
)
def test_bad_sizes_are_named(make, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(**options, seed=0)
    assert "\n" not in str(raised.value)


def evaluate(words):
    """An expression's value, by recursion."""
    word = words.pop(0)
    if word.isdecimal():
        return int(word)
    arguments = []
    while words[0] != "X":
        arguments.append(evaluate(words))
    words.pop(0)
    return {"MIN": min, "MAX": max, "MED": lambda x: int(np.median(x)), "SM": lambda x: sum(x) % 10}[word](arguments)


@pytest.mark.parametrize("sizes", [{}, {"min_length": 3, "max_length": 30}, {"min_length": 0, "max_length": 3, "max_args": 2}])
def test_listops_says_what_its_expression_is(sizes):
    for row in range(20):
        ids, value = listops.example(seed=(0, row), **sizes)
        words = [listops.TOKENS[i] for i in ids]
        assert sizes.get("min_length", 500) < len(words) < sizes.get("max_length", 2000)
        assert evaluate(words) == value and words == []
        assert np.array_equal(ids, listops.example(seed=(0, row), **sizes)[0])


def test_listops_has_the_published_distribution():
    """Short trees, each count within four standard deviations: operations, arguments, digits and depth, of an unconditioned draw."""

    def walk(words, depth):
        word = words.pop(0)
        counts["nodes"] += 1
        deepest[0] = max(deepest[0], depth)
        if word.isdecimal():
            counts["digit " + word] += 1
            return
        counts[word] += 1
        n_arguments = 0
        while words[0] != "X":
            walk(words, depth + 1)
            n_arguments += 1
        words.pop(0)
        counts[f"{n_arguments} arguments"] += 1

    n_trees, counts, deepest = 8000, Counter(), [0]
    for row in range(n_trees):
        words = [listops.TOKENS[i] for i in listops.example(seed=row, min_length=0, max_length=10**4, max_depth=2)[0]]
        walk(words, 1)
    operations = sum(counts[name] for name in ("MIN", "MAX", "MED", "SM"))

    def expect(count, n, p):
        assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5

    expect(operations, n_trees, listops.OPERATION_P)  # with this depth only the root can be one
    for name in ("MIN", "MAX", "MED", "SM"):
        expect(counts[name], operations, 1 / 4)
    for n in range(2, 11):
        expect(counts[f"{n} arguments"], operations, 1 / 9)
    for digit in range(10):
        expect(counts[f"digit {digit}"], counts["nodes"] - operations, 1 / 10)
    assert deepest == [2]


def test_listops_lengths_are_those_of_a_plain_recursion():
    """The published recursion, trees of depth 4 that fit: mean length of 500 draws each, within four standard errors."""
    rng = np.random.default_rng(0)

    def length(depth):
        if depth == 4 or rng.random() > listops.OPERATION_P:
            return 1
        return 2 + sum(length(depth + 1) for _ in range(rng.integers(2, 11)))

    theirs = []
    while len(theirs) < 500:
        if 5 < (n := length(1)) < 60:
            theirs.append(n)
    ours = [len(listops.example(seed=row, min_length=5, max_length=60, max_depth=4)[0]) for row in range(500)]
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * np.sqrt((np.var(ours) + np.var(theirs)) / 500)


def test_listops_gives_up_where_there_is_next_to_nothing(monkeypatch):
    monkeypatch.setattr(listops, "TRIES", 100)
    with pytest.raises(ValueError, match="none of 100 expressions was between"):
        listops.example(seed=0, min_length=1220, max_length=1223, max_depth=4)
