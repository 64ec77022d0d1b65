"""Retrieval, token tasks, RULER and cost, on models whose answers are known beforehand."""

import re
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnzoo.attention.sdpa import SDPAttention
from attnzoo.batch import IGNORED
from attnzoo.data.synthetic import copying as copying_task
from attnzoo.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from attnzoo.evaluation import ruler_tasks
from attnzoo.evaluation.answers import answer
from attnzoo.evaluation.cost import cost
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.retrieval import needle, passkey, spread
from attnzoo.evaluation.ruler import ruler
from attnzoo.evaluation.ruler_tasks import NIAH, TASKS, ask, prompts, score
from attnzoo.evaluation.token_tasks import EVALUATION, copying, induction, recall
from attnzoo.models import BERT, GPT

BYTES = ByteTokenizer()


class Copier(nn.Module):
    """Goes on as after the longest earlier match of the last tokens, if that ends within `reach` tokens; so it finds passkeys and pairs."""

    def __init__(self, vocab_size: int = BYTES.vocab_size, reach: int = 10**6):
        super().__init__()
        self.device = nn.Parameter(torch.zeros(()))
        self.vocab_size, self.reach = vocab_size, reach

    def predict(self, tokens: list[int]) -> int:
        last, best = len(tokens) - 1, (0, 0)
        for end in range(max(0, last - self.reach), last):
            n = 0
            while n <= end and n < 40 and tokens[end - n] == tokens[last - n]:
                n += 1
            best = max(best, (n, end))
        return tokens[best[1] + 1] if best[0] else 0

    def forward(self, input_ids, logits_at):
        rows = input_ids.tolist()
        length = input_ids.shape[1]
        predicted = [self.predict(rows[at // length][: at % length + 1]) for at in logits_at.tolist()]
        return 5.0 * F.one_hot(torch.tensor(predicted), self.vocab_size)


def text(words: str = "one two three four five six seven eight nine ten. ", tokenizer=BYTES, objective: str = "lm", **attributes):
    ids = [np.array(tokenizer.encode(words * n)) for n in (20, 30)]
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "n_bytes": [len(words) * n for n in (20, 30)]}).with_format("numpy")
    return SimpleNamespace(tokenizer=tokenizer, objective=objective, documents=lambda split: dataset, **attributes)


@pytest.fixture(scope="module")
def bpe():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["The grass is green. The pass key is. One of the special magic numbers for"] * 9, trainer)
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()
    return HuggingFaceTokenizer(backend, "bpe", {"eos": "<eos>"})


def run(plan) -> list[Row]:
    rows = [row for one in plan.measurements for row in one.measure(lambda tokens: None)]
    return rows + plan.conclude(rows)


def table(rows: list[Row], metric: str) -> dict[tuple, float]:
    return {(row.length, row.depth): row.value for row in rows if row.metric == metric}


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    model = GPT(vocab_size=BYTES.vocab_size, dim=32, n_layers=2, n_heads=2, attention=SDPAttention, train_context=32)
    for parameter in model.parameters():  # far enough from uniform that greedy decoding is no tie
        parameter.data *= 3
    return model.eval().double()


def test_nan_is_no_answer():
    class Broken(nn.Module):
        vocab_size = 7

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, logits_at):
            return torch.zeros(len(logits_at), 7).index_fill(0, torch.tensor([1]), torch.nan)

    whole, half = np.array([0, IGNORED, IGNORED, IGNORED]), np.array([IGNORED, 0, IGNORED, 0])
    right, broken = answer(Broken(), [(np.zeros(4, np.int64), labels) for labels in (whole, half)], batch_tokens=8)
    assert (right.exact_match, right.accuracy, right.reciprocal_rank) == (1.0, 1.0, 1.0)
    assert np.isnan([broken.exact_match, broken.accuracy, broken.reciprocal_rank, broken.loss]).all()


def test_an_exact_match_is_what_greedy_decoding_writes(gpt):
    prompts = torch.randint(256, (6, 20), generator=torch.Generator().manual_seed(0))
    written = gpt.generate(prompts, 5, temperature=0.0)
    examples = []
    for i, row in enumerate(written.numpy()):
        row, labels = row.copy(), np.full(25, IGNORED)
        if i % 2:
            row[20 + i - 1] = (row[20 + i - 1] + 1) % 256
        labels[19:24] = row[20:]
        examples.append((row, labels))
    answers = answer(gpt, examples, batch_tokens=60)
    assert [one.exact_match for one in answers] == [1.0, 0.0] * 3
    # not of the first token alone, which is the blank before every key where tokens are bytes
    assert [one.reciprocal_rank == 1.0 for one in answers] == [True, False] * 3
    logits = gpt(torch.from_numpy(examples[1][0])[None])[0, 19:24].float()
    targets = torch.from_numpy(examples[1][1][19:24])
    assert answers[1].loss == pytest.approx(F.cross_entropy(logits, targets).item())
    ranks = [1 + (row > row[target]).sum().item() for row, target in zip(logits, targets, strict=True)]
    assert max(ranks) > 1 and answers[1].reciprocal_rank == pytest.approx(sum(1 / rank for rank in ranks) / 5)


@pytest.mark.parametrize("task", [passkey, needle])
def test_the_grid_shows_how_far_a_model_looks_back(task):
    rows = run(task(Copier(reach=180), text(), lengths=[260, 400], depths=[0.0, 1.0], examples=3))
    found = table(rows, "exact_match")
    assert found[400, 1.0] == 1.0 and found[400, 0.0] == 0.0
    assert found[400, None] == 0.5 and found[260, None] == (found[260, 0.0] + found[260, 1.0]) / 2
    assert {row.count for row in rows if row.depth is not None} == {3}
    assert {row.count for row in rows if row.length and row.depth is None} == {6}
    assert [(row.metric, row.value) for row in rows if row.task == "effective_length"] == [(task.__name__, 260.0)]
    assert all(value == 1.0 for value in table(run(task(Copier(), text(), lengths=[400], depths=3, examples=2)), "exact_match").values())


def test_passkeys_of_bpe_models(bpe):
    rows = run(passkey(Copier(bpe.vocab_size), text(tokenizer=bpe), lengths=[300], depths=2, examples=2))
    assert table(rows, "exact_match") == {(300, 0.0): 1.0, (300, 1.0): 1.0, (300, None): 1.0}


@pytest.mark.parametrize("task", [passkey, needle])
def test_distractors_make_a_task_of_their_own(task):
    rows = run(task(Copier(), text(), lengths=[700], depths=[0.5], examples=3, distractors=3))
    assert {row.task for row in rows} == {f"{task.__name__}_4_keys", "effective_length"}
    # it goes on as after the longest earlier match, which holds the name
    assert table(rows, "exact_match")[700, 0.5] == 1.0


def test_the_runs_own_keys_are_asked_for():
    wrong = run(passkey(Copier(), text(keys=(7, 7)), lengths=[400], depths=1, examples=1))
    (asked,) = passkey(Copier(), text(keys=(7, 7)), lengths=[400], depths=1, examples=1).measurements
    assert asked.settings["keys"] == [7, 7] and table(wrong, "exact_match")[400, 0.5] == 1.0


def test_a_length_without_room_for_the_question_says_how_much_it_needs():
    (one,) = passkey(Copier(), text(), lengths=[32], depths=1).measurements
    with pytest.raises(ValueError, match="length=32 must be at least 2"):
        one.measure(lambda tokens: None)


@pytest.mark.parametrize("depths, expected", [(3, [0.0, 0.5, 1.0]), (1, [0.5]), ([1, 0.25], [0.25, 1.0])])
def test_depths(depths, expected):
    assert spread(depths) == expected


@pytest.mark.parametrize("depths", [0, [], [2.0], ["deep"]])
def test_wrong_depths(depths):
    with pytest.raises(ValueError, match="depths="):
        spread(depths)


def token_data(task=None, **options):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    return SimpleNamespace(objective="lm", task=task, example_options=lambda: options, documents=lambda split: dataset)


def test_recall_and_induction_of_a_model_that_copies():
    for task, vocab_size in ((recall, 8192), (induction, 16)):
        rows = run(task(Copier(vocab_size), token_data(), lengths=[16, 64], examples=5))
        assert table(rows, "accuracy") == {(16, None): 1.0, (64, None): 1.0}
    # a reach of 8 tokens: only a query right behind the pairs can be answered
    short = table(run(recall(Copier(8192, reach=8), token_data(), lengths=[64], n_pairs=8, examples=20)), "accuracy")[64, None]
    assert 0 < short < 0.5
    notes = {row.note for row in run(recall(Copier(8192), token_data(), lengths=[32], examples=1))}
    assert notes == {"n_pairs=2"}


def test_copying_counts_the_tokens_that_are_right():
    model = Copier(64)
    (row,) = [row for row in run(copying(model, token_data(), lengths=[24], examples=6)) if row.metric == "accuracy"]
    hits = []
    for i in range(6):
        ids, labels = copying_task.example(24, seed=(0, EVALUATION, 24, i))
        at = np.flatnonzero(labels != IGNORED)
        hits.append(np.mean([model.predict(ids[: t + 1].tolist()) == labels[t] for t in at]))
    assert row.value == pytest.approx(np.mean(hits)) and 0 < row.value < 1
    assert row.stderr == pytest.approx(np.std(hits, ddof=1) / 6**0.5)


def test_options_of_the_run_are_the_default():
    plan = copying(Copier(8), token_data(copying_task, n_tokens=3, vocab_size=8), lengths=[24])
    (one,) = plan.measurements
    assert one.settings["n_tokens"] == 3 and one.settings["vocab_size"] == 8
    (one,) = copying(Copier(8), token_data(copying_task, n_tokens=3, vocab_size=8), lengths=[24], n_tokens=5).measurements
    assert one.settings["n_tokens"] == 5


def test_tokens_that_the_model_does_not_have():
    (one,) = recall(Copier(100), token_data(), lengths=[64], vocab_size=8192).measurements
    with pytest.raises(ValueError, match="the model only 100 tokens"):
        one.measure(lambda tokens: None)


@pytest.mark.parametrize("task", [passkey, needle, recall, copying, induction, ruler])
def test_masked_models_and_numbers_are_refused_in_one_row(task):
    (row,) = run(task(Copier(), text(objective="mlm"), lengths=[64]))
    assert row.value is None and "causal" in row.note
    if task in (passkey, needle, ruler):
        (row,) = run(task(Copier(), token_data(), lengths=[64]))
        assert row.value is None and "numbers" in row.note
    else:
        (row,) = run(task(Copier(), text(), lengths=[64]))
        assert row.value is None and "the run's data are text: train one with data=" in row.note


class Reader(nn.Module):
    """Answers RULER's questions from the last `reach` characters of a prompt."""

    def __init__(self, tokenizer=BYTES, reach: int = 10**6):
        super().__init__()
        self.device, self.tokenizer, self.reach = nn.Parameter(torch.zeros(())), tokenizer, reach

    def answer(self, text: str) -> str:
        text = text[-self.reach :]
        if asked := re.search(r"assigned the value (\d+) in", text):
            known = {asked[1]}
            for name, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text):
                known |= {name} if value in known else set()
            return " ".join(sorted(known - {asked[1]})).lower()
        needles = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.", text)
        (query,) = re.findall(r"The special magic \w+ for ([^.]*) mentioned in the provided text (?:is|are)$", text)
        wanted = set(re.split(r", and |, ", query))
        return ", ".join(value for key, value in needles if key in wanted)

    def generate(self, input_ids, max_new_tokens, *, temperature):
        assert temperature == 0
        rows = []
        for row in input_ids.tolist():
            ids = self.tokenizer.encode(" " + self.answer(self.tokenizer.decode(row)))
            assert len(ids) < max_new_tokens
            rows.append(row + ids + [self.tokenizer.eos_id] * (max_new_tokens - len(ids)))
        return torch.tensor(rows)


def test_ruler_of_a_model_that_reads_all_or_only_the_end(bpe):
    for tokenizer in (BYTES, bpe):
        rows = run(ruler(Reader(tokenizer), text(tokenizer=tokenizer), lengths=[1024], examples=3))
        assert {row.task for row in rows} == {"ruler", "effective_length", *(f"ruler_{name}" for name in TASKS)}
        assert {row.value for row in rows if row.length} == {1.0}
    blind = {row.task: row.value for row in run(ruler(Reader(reach=600), text(), lengths=[2048], examples=8))}
    assert blind["ruler"] == pytest.approx(sum(blind[f"ruler_{name}"] for name in TASKS) / len(TASKS))
    assert 0 < blind["ruler"] < 0.7


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_of_the_published_form_and_of_the_asked_length(name):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        (asked,) = ask(name, rng)
        (ids,) = prompts(name, [asked], 1500, 100, encode=BYTES.encode, text=np.array(BYTES.encode("lorem ipsum ")), rng=rng)
        written = BYTES.decode(ids)
        assert len(ids) == 1400 and written.startswith(asked.introduction) and written.endswith(asked.question)
        places = [written.index(sentence) for sentence in asked.sentences]
        assert len(set(asked.references)) == len(asked.references) == {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5}.get(name, 1)
        if name == "vt":
            assert places == sorted(places)
            continue
        needles = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.\n", written)
        task = NIAH[name]
        expected = task.n_keys * task.n_values
        assert len(needles) == expected if task.haystack != "needles" else len(needles) > 5
        assert len({value for _, value in needles}) == len(needles)


def test_only_one_needle_has_the_key_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(ruler_tasks, "ADJECTIVES", ["red", "green"])
    monkeypatch.setattr(ruler_tasks, "NOUNS", ["owl", "moon"])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        (asked,) = ask("niah_multikey_2", rng)
        (ids,) = prompts("niah_multikey_2", [asked], 2500, 100, encode=BYTES.encode, text=np.arange(9), rng=rng)
        written = BYTES.decode(ids)
        hidden = written.split(asked.introduction)[1].removesuffix(asked.question)
        keys = re.findall(r"for ([\w-]+) is", hidden)
        (key,) = re.findall(r"for ([\w-]+) is", asked.sentences[0])
        assert keys.count(key) == 1 and len(keys) > 20


def test_references_are_found_in_any_case_and_counted():
    assert score(("ABC", "123"), "it is abc") == 0.5
    assert score(("ABC",), "nothing") == 0.0


@pytest.mark.parametrize(
    "task, options, message",
    [
        (ruler, {"tasks": ["niah"]}, "niah is none of"),
        (ruler, {"examples": 0}, "examples=0"),
        (ruler, {"questions": 0}, "questions=0 must lie between 1 and 40"),
        (passkey, {"one_text": True, "depths": 11, "distractors": 6}, "depths=.*, distractors=6: with one_text they must be at most 16"),
        (passkey, {"examples": 0}, "examples=0"),
        (recall, {"examples": 0}, "examples=0"),
        (cost, {"repeats": 0}, "repeats=0"),
        (cost, {"training_tokens": 0}, "training_tokens=0"),
    ],
)
def test_wrong_options_are_named(task, options, message):
    with pytest.raises(ValueError, match=message):
        task(Copier(), text(), lengths=[64], **options)


def test_ruler_without_room_says_how_much_it_needs():
    (one,) = ruler(Reader(), text(), lengths=[64], tasks=["vt"]).measurements
    with pytest.raises(ValueError, match=r"at least \d+: \d+ tokens of needles and question, \d+ of answer"):
        one.measure(lambda tokens: None)


def test_cost_of_each_length(gpt):
    read = []
    plan = cost(gpt, text(), lengths=[64, 8], batch_size=2, repeats=3)
    rows = [row for one in plan.measurements for row in one.measure(read.append)]
    assert [(row.length, row.metric) for row in rows if row.metric != "peak_memory_gb"] == [
        (length, metric) for length in (8, 64) for metric in ("tokens_per_second", "prefill_seconds", "decode_tokens_per_second")
    ]
    values = {(row.length, row.metric): row.value for row in rows}
    for length in (8, 64):
        assert values[length, "tokens_per_second"] == pytest.approx(2 * length / values[length, "prefill_seconds"])
        assert values[length, "decode_tokens_per_second"] > 0
    assert sum(read) == sum(one.tokens for one in plan.measurements)


def test_cost_of_training_leaves_the_model_as_it_was(gpt):
    before = {name: value.clone() for name, value in gpt.state_dict().items()}
    read, seen = [], []
    watch = gpt.register_forward_hook(lambda module, inputs, output: seen.append((tuple(inputs[0].shape), output.requires_grad)))
    plan = cost(gpt, text(), lengths=[8, 64], repeats=2, training_tokens=32)
    assert [len(one.settings) for one in plan.measurements] == [3, 2, 3, 2]
    with torch.inference_mode():  # as evaluations run
        rows = [row for one in plan.measurements[1::2] for row in one.measure(read.append)]
    watch.remove()
    rates = [(row.length, row.value) for row in rows if row.metric == "training_tokens_per_second"]
    assert [length for length, _ in rates] == [8, 64] and all(rate > 0 for _, rate in rates)
    assert seen == [((4, 8), True)] * 3 + [((1, 64), True)] * 3
    assert sum(read) == sum(one.tokens for one in plan.measurements[1::2])
    assert not gpt.training and all(parameter.grad is None for parameter in gpt.parameters())
    assert all(torch.equal(value, before[name]) for name, value in gpt.state_dict().items())


def test_cost_where_there_is_no_decoding():
    options = {"vocab_size": 20, "dim": 16, "n_layers": 1, "n_heads": 2, "attention": SDPAttention, "train_context": 16}
    rows = run(cost(BERT(**options).eval(), text(objective="mlm"), lengths=[8]))
    assert "decode_tokens_per_second" not in {row.metric for row in rows}
    learned = run(cost(GPT(**options, positions="learned").eval(), text(), lengths=[8]))
    (decoded,) = [row for row in learned if row.metric == "decode_tokens_per_second"]
    assert decoded.value is None and "max_positions=16" in decoded.note
