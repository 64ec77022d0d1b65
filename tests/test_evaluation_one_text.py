"""Many questions of one text: it is read once, and what comes out is what reading it for each question gives."""

import dataclasses

import numpy as np
import pytest
import torch
from test_evaluation_tasks import BYTES, Copier, Reader, run, table, text
from test_generation import SIZES, VARIANTS, build

from attnzoo.attention.sdpa import SDPAttention
from attnzoo.attention.supports import Supports
from attnzoo.data.synthetic import passkey as passkey_task
from attnzoo.evaluation.answers import answer, common_beginning
from attnzoo.evaluation.retrieval import needle, passkey
from attnzoo.evaluation.ruler import ruler
from attnzoo.evaluation.ruler_tasks import MULTIKEY, ask, prompts
from attnzoo.models import GPT


class Forgetful(SDPAttention):
    supports = Supports(cache=False)


OTHERWISE = {
    "frequencies by length": {"attention": SDPAttention, "rope_scaling": "dynamic", "rope_factor": 4.0},
    "no cache": {"attention": Forgetful},
}


def lengths_read(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of what the model is given from now on."""
    read, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, ids, **options: (read.append(tuple(ids.shape)), forward(self, ids, **options))[1])
    return read


def questions(vocab_size=53, length=120, n=5):
    """Examples whose first 100 tokens are the same, each with three tokens asked behind them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(vocab_size, size=(n, length))
    ids[:, :100], ids[:, 100] = ids[0, :100], np.arange(n)
    labels = np.full((n, length), -100)
    labels[:, -4:-1] = ids[:, -3:]
    return list(zip(ids, labels, strict=True))


def check_equal(answers, expected, device="cpu"):
    for one, other in zip(answers, expected, strict=True):
        assert dataclasses.astuple(one)[:3] == dataclasses.astuple(other)[:3]
        assert one.loss == pytest.approx(other.loss, rel=1e-6 if device == "cpu" else 1e-3)  # float64, and float32 by kernels


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_answers_are_those_of_reading_the_text_for_each_question(variant, device, monkeypatch):
    model = build(variant, "none" if variant == "forgetting" else "rotary", device)
    expected = answer(model, questions(), batch_tokens=1000)
    read = lengths_read(monkeypatch)
    advanced = []
    check_equal(answer(model, questions(), batch_tokens=240, advance=advanced.append, one_text=True), expected, device)  # two at once
    assert read == [(1, 100), (2, 20), (2, 20), (1, 20)] and sum(advanced) == 100 + 5 * 20


@pytest.mark.parametrize("name", OTHERWISE)
@torch.no_grad()
def test_what_reads_otherwise_in_parts_reads_the_whole_text_each_time(name, monkeypatch):
    torch.manual_seed(0)
    model = GPT(**SIZES | {"train_context": 64}, **OTHERWISE[name]).double().eval()
    assert not model.reads_in_parts
    expected = answer(model, questions(), batch_tokens=1000)
    read = lengths_read(monkeypatch)
    check_equal(answer(model, questions(), batch_tokens=1000, one_text=True), expected)
    assert read == [(5, 120)]
    with pytest.raises(ValueError, match="shared=3: this model has no cache, or reading a text in parts changes its results"):
        model.generate(torch.zeros(2, 9, dtype=torch.int64), 1, shared=3)


@pytest.mark.parametrize("variant, unlike", [("flash", False), ("flash", True), ("dual_chunk", False), ("nsa", True)])
def test_texts_that_begin_alike_go_on_as_when_each_is_read(variant, unlike, device, monkeypatch):
    model = build(variant, "rotary", device)
    ids = torch.from_numpy(np.stack([ids for ids, _ in questions(n=3)])).to(device)
    lengths = {"lengths": torch.tensor([104, 120, 101], device=device)} if unlike else {}
    expected = model.generate(ids, 8, temperature=0, samples=2, **lengths)
    read = lengths_read(monkeypatch)
    assert torch.equal(model.generate(ids, 8, temperature=0, samples=2, shared=100, **lengths), expected)
    assert read[:2] == [(1, 100), (3, 20)] and read[2][0] == 6


@pytest.mark.parametrize("options, message", [
    ({"shared": 9}, "shared=9: must be less than the shortest row's 9 tokens"),
    ({"shared": 4}, "shared=4: .* all rows must begin with the same tokens"),
    ({"shared": 3, "lengths": torch.tensor([9, 3])}, "shared=3: must be less than the shortest row's 3 tokens"),
])
def test_what_is_not_shared_is_refused(options, message):
    ids = torch.arange(9).expand(2, -1).clone()
    ids[1, 3] = 0
    with pytest.raises(ValueError, match=message):
        GPT(**SIZES, attention=SDPAttention).generate(ids, 1, **options)


def test_examples_of_one_text_begin_alike_and_ask_for_each_key():
    depths = [0.0, 0.3, 1.0]
    made = passkey_task.examples(900, depths=depths, encode=BYTES.encode, seed=4, distractors=2, keys=(1, 5000))
    shared = common_beginning([one.input_ids for one in made])
    assert shared >= max(needle.stop for needle in made[0].needles) and len(made) == 3
    for one, needle_, depth in zip(made, made[0].needles, depths, strict=False):
        sentence = BYTES.decode(one.input_ids[needle_])
        name, key = sentence.split()[4], sentence.split()[6].strip(".")
        assert len(one.input_ids) == 900 and one.needles == made[0].needles
        assert BYTES.decode(one.prompt).endswith(f"What is the pass key of {name}? The pass key of {name} is")
        assert BYTES.decode(one.answer_ids) == f" {key}"
        assert abs(needle_.start / 900 - depth) < 0.4
    assert [needle_.start for needle_ in made[0].needles[:3]] == sorted(needle_.start for needle_ in made[0].needles[:3])


@pytest.mark.parametrize("task", [passkey, needle])
def test_the_grid_of_one_text(task, gpt, monkeypatch):
    rows = run(task(Copier(), text(), lengths=[900], depths=3, examples=2, one_text=True))
    assert {row.task for row in rows} == {f"{task.__name__}_one_text", "effective_length"}
    assert table(rows, "exact_match") == dict.fromkeys([(900, 0.0), (900, 0.5), (900, 1.0), (900, None)], 1.0)
    read = lengths_read(monkeypatch)
    plan = task(gpt, text(), lengths=[900], depths=3, examples=2, one_text=True)
    once = run(plan)
    assert len(plan.measurements) == 1 and [shape[0] for shape in read] == [1, 3, 1, 3] and read[0][1] + read[1][1] == 900
    monkeypatch.setattr(type(gpt), "reads_in_parts", False)
    for one, other in zip(once, run(plan), strict=True):
        assert dataclasses.replace(one, value=0) == dataclasses.replace(other, value=0)
        assert one.value == pytest.approx(other.value, rel=1e-6)


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    return GPT(vocab_size=BYTES.vocab_size, dim=32, n_layers=2, n_heads=2, attention=SDPAttention, train_context=32).eval().double()


@pytest.mark.parametrize("name", MULTIKEY)
def test_ruler_asks_for_several_keys_of_one_text(name, gpt, monkeypatch):
    asked = ask(name, np.random.default_rng(0), 3)
    made = prompts(name, asked, 3000, 100, encode=BYTES.encode, text=np.array(BYTES.encode("lorem ipsum ")), rng=np.random.default_rng(1))
    assert {len(one) for one in made} == {2900} and len({one.references for one in asked}) == 3
    shared = BYTES.decode(made[0][: common_beginning(made)])
    assert all(sentence in shared for sentence in asked[0].sentences) and all(one.sentences == asked[0].sentences for one in asked)
    (row, _) = run(ruler(Reader(), text(), lengths=[3000], tasks=[name], examples=4, questions=3))
    assert row.value == 1.0 and row.count == 4 and row.note.endswith("each text is asked 3 questions")
    if name != MULTIKEY[0]:
        return
    monkeypatch.setattr("attnzoo.evaluation.ruler.NEW_TOKENS", {name: 6})
    plan = ruler(gpt, text(), lengths=[1200], tasks=[name], examples=4, questions=3)
    written, generate = [], GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda *a, **options: (written.append(generate(*a, **options)), written[-1])[1])
    read = lengths_read(monkeypatch)
    run(plan)
    assert read[0][0] == 1 and read[1][0] == 3 and read[1][1] < 400
    monkeypatch.setattr(GPT, "reads_in_parts", False)
    run(plan)
    assert torch.equal(torch.cat(written[:2]), torch.cat(written[2:]))
