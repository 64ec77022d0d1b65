"""Why a result is zero, or none: wrong answers, silence, no room, inputs that were cut off, logits that are not numbers."""

import csv
import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from test_evaluation_tasks import Copier, Reader, run, text, token_data
from tiny_run import compose_tiny
from torch import nn

from attnzoo import runner
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.data.synthetic import haystack
from attnzoo.data.tokenizers import ByteTokenizer
from attnzoo.errors import NoRoom
from attnzoo.evaluation import compare, ruler
from attnzoo.evaluation.answers import LLAMA2_AT_4K, WRONG, effective_length
from attnzoo.evaluation.logits import mark_nan, watched
from attnzoo.evaluation.measurement import Measurement
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.retrieval import passkey
from attnzoo.evaluation.token_tasks import recall
from attnzoo.models import GPT

BYTES = ByteTokenizer()


def gpt(overflow: bool) -> GPT:
    """With finite weights, whose logits are NaN if they overflow."""
    torch.manual_seed(0)
    model = GPT(vocab_size=BYTES.vocab_size, dim=16, n_layers=1, n_heads=2, attention=SDPAttention, train_context=32).eval()
    if overflow:
        model.blocks[0].mlp.up_proj.weight.data.fill_(3e38)  # times normalised numbers beyond 1.2 and below -1.2: inf - inf
        assert all(weight.isfinite().all() for weight in model.parameters())
    return model


def measure(one: Measurement, model: nn.Module) -> list[Row]:
    """As a comparison does it."""
    subject = SimpleNamespace(model=model, broken="", device=torch.device("cpu"))
    return compare._measure(one, subject, SimpleNamespace(advance=lambda tokens: None))


@pytest.mark.parametrize("overflow", [True, False])
def test_ruler_notices_nan_logits_of_finite_weights(overflow):
    model = gpt(overflow)
    (one,) = ruler.ruler(model, text(), lengths=[700], tasks=["niah_single_1"], examples=2).measurements
    (row,) = measure(one, model)
    assert math.isnan(row.value) == overflow
    assert ("NaN logits in" in row.note and "weights are finite" in row.note) == overflow


@pytest.fixture
def harness_model(monkeypatch):
    """The adapter's class; the harness itself is a stand-in, whose parts these tests do not use."""
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(TemplateLM=object))
    monkeypatch.setitem(sys.modules, "lm_eval.utils", SimpleNamespace(get_rolling_token_windows=None, make_disjoint_window=None))
    monkeypatch.delitem(sys.modules, "attnzoo.evaluation.harness_model", raising=False)
    yield importlib.import_module("attnzoo.evaluation.harness_model").HarnessModel
    sys.modules.pop("attnzoo.evaluation.harness_model")  # the next one that asks for it has the real harness


@pytest.mark.parametrize("overflow", [True, False])
def test_the_harness_notices_nan_logits_of_finite_weights(harness_model, overflow):
    model = gpt(overflow)
    adapter = harness_model(model, BYTES, max_length=24, batch_tokens=60)

    def answer(advance) -> list[Row]:
        (_, greedy), = adapter._loglikelihood_tokens([(None, BYTES.encode("ab"), BYTES.encode("c"))])
        return [Row(task="lm_eval_a", metric="acc", value=float(greedy))]

    (row,) = measure(Measurement("lm_eval_a", answer, {}), model)
    assert math.isnan(row.value) == overflow and ("NaN logits in 1 of 1" in row.note) == overflow


def test_inputs_that_the_harness_cuts_off_are_counted(harness_model):
    adapter = harness_model(gpt(False), BYTES, max_length=24, batch_tokens=60)
    assert adapter.limits() == ""
    adapter._loglikelihood_tokens([(None, [1] * 10, [2]), (None, [1] * 24, [2])])
    assert adapter.limits() == ""
    adapter._loglikelihood_tokens([(None, [1] * 25, [2])])
    assert adapter.limits() == "1 of 3 inputs are longer than max_length=24 allows and were read without their beginning"
    adapter._generate("short", {"max_gen_toks": 30})
    assert adapter.limits().endswith("1 of 4 inputs are longer than max_length=24 allows and left the answer less room than the task gives")


def test_the_model_is_left_without_the_watch():
    model = gpt(True)
    with watched(model) as broken:
        assert broken() == ""
        model(torch.zeros(1, 4, dtype=torch.int64))
        model.generate(torch.zeros(1, 4, dtype=torch.int64), 2, temperature=0.0)
        assert broken().startswith("NaN logits in") and "of 3 passes" in broken()
    assert not model._forward_hooks


def test_a_measurement_that_shows_its_nan_keeps_its_other_rows():
    finite, broken, without = mark_nan([Row(value=1.0), Row(value=math.nan, stderr=math.nan), Row(note="too long")], "why")
    assert (finite, without) == (Row(value=1.0), Row(note="too long"))
    assert math.isnan(broken.value) and (broken.stderr, broken.note) == (None, "why")
    unseen = mark_nan([Row(value=0.0, stderr=0.1), Row(note="too long")], "why")
    assert math.isnan(unseen[0].value) and unseen[0].stderr is None and unseen[0].note == "why" and unseen[1] == Row(note="too long")


def test_wrong_answers_are_called_wrong_and_right_ones_nothing():
    blind = run(passkey(Copier(reach=20), text(), lengths=[400], depths=[0.0], examples=2))
    zeros = [row for row in blind if row.metric == "exact_match"]
    assert len(zeros) == 2 and all(row.value == 0 and row.note == WRONG for row in zeros)
    found = run(passkey(Copier(), text(), lengths=[400], depths=[0.0], examples=2))
    assert not any(row.note for row in found if row.task == "passkey")
    (shown, *_) = run(recall(Copier(8192, reach=1), token_data(), lengths=[64], n_pairs=8, examples=2))
    assert shown.value == 0 and shown.note == f"n_pairs=8; {WRONG}"


class Silent(Reader):
    """Ends the text at once, or says something else."""

    def __init__(self, words: str):
        super().__init__()
        self.words = words

    def answer(self, text: str) -> str:
        return self.words

    def generate(self, input_ids, max_new_tokens, *, temperature):
        written = self.tokenizer.encode(self.words)
        rows = [[*row, *written, *[self.tokenizer.eos_id] * (max_new_tokens - len(written))] for row in input_ids.tolist()]
        return torch.tensor(rows)


@pytest.mark.parametrize(("words", "reason"), [("", ruler.SILENT), ("nothing", WRONG)])
def test_ruler_tells_silence_from_wrong_answers_and_says_how_it_differs(words, reason):
    row, effective = run(ruler.ruler(Silent(words), text(), lengths=[700], tasks=["niah_single_1"], examples=2))
    assert row.value == 0 and row.note == f"{ruler.DEVIATIONS}; {reason}"
    assert (effective.task, effective.metric, effective.value) == ("effective_length", "ruler_niah_single_1", 0.0)


@pytest.mark.parametrize(
    "plan",
    [
        passkey(Copier(), text(), lengths=[32], depths=1),
        recall(Copier(8192), token_data(), lengths=[16], n_pairs=8),
        ruler.ruler(Reader(), text(), lengths=[64], tasks=["vt"]),
    ],
)
def test_a_length_without_room_says_so(plan):
    (one,) = plan.measurements
    (row,) = measure(one, gpt(False))
    assert row.value is None and row.note.startswith("no room: ") and "at least" in row.note


def test_only_a_lack_of_room_is_one():
    with pytest.raises(NoRoom):
        haystack.hide(3, needles=[[1]], depths=[0], question=[2, 3], answer=[4], filler=[5])
    with pytest.raises(ValueError) as error:
        haystack.hide(3, needles=[[1]], depths=[2], question=[2], answer=[4], filler=[5])
    assert not isinstance(error.value, NoRoom)


def shares(*values: float | None) -> list[Row]:
    return [Row(task="passkey", length=2**i, metric="exact_match", value=value) for i, value in enumerate(values, 10)]


@pytest.mark.parametrize(
    ("values", "length", "said"),
    [
        ((1.0, 0.9, LLAMA2_AT_4K), 2048, "more than 85.6% right answers"),
        ((1.0, 0.0, 0.9, None), 4096, "and the longest that was measured"),
        ((0.5, math.nan), 0, "zero: at no length more than 85.6%"),
    ],
)
def test_effective_length_is_the_longest_beyond_the_threshold(values, length, said):
    depths = [Row(task="passkey", length=2**20, depth=0.5, metric="exact_match", value=1.0)]
    others = [Row(task=task, length=2**20, metric=metric, value=1.0) for task, metric in (("passkey", "loss"), ("needle", "exact_match"))]
    (row,) = effective_length([*shares(*values), *depths, *others], "passkey", "exact_match")
    assert (row.task, row.metric, row.value, row.length) == ("effective_length", "passkey", length, None) and said in row.note
    assert effective_length(shares(None), "passkey", "exact_match") == []
    assert math.isnan(effective_length(shares(math.nan), "passkey", "exact_match")[0].value)
    assert effective_length(shares(0.6), "passkey", "exact_match", threshold=0.5)[0].value == 1024


@pytest.fixture
def trained(tmp_path):
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=2", "model.n_layers=1", "callbacks.sample=null", "callbacks.plot=null"))
    return tmp_path


def test_a_command_notices_nan_logits_of_finite_weights(trained):
    path = trained / "run" / "checkpoints" / "best.ckpt"
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.blocks.0.mlp.up_proj.weight"].fill_(1e38)
    torch.save(content, path)
    asked = ["evaluation=ruler", "evaluation.lengths=[700]", "evaluation.tasks.ruler.tasks=[niah_single_1]", "accelerator=cpu",
             "evaluation.tasks.ruler.examples=1", "precision=32"]
    runner.evaluate(compose_tiny(trained, f"run_dir={trained / 'result'}", f"ckpt_path={trained / 'run'}", *asked, config="eval"))
    with open(trained / "result" / "results.csv", newline="") as file:
        row, effective = csv.DictReader(file)
    assert (row["value"], effective["value"]) == ("nan", "nan") and "NaN logits in" in row["note"]


def test_effective_length_is_a_row_of_the_summary(trained):
    tmp_path = trained
    asked = ["evaluation=passkey", "evaluation.lengths=[32,320]", "evaluation.tasks.passkey.depths=1", "accelerator=cpu",
             "evaluation.tasks.passkey.examples=1", "evaluation.tasks.passkey.effective_threshold=0.5", "precision=32"]
    runner.evaluate(compose_tiny(tmp_path, f"run_dir={tmp_path / 'result'}", f"ckpt_path={tmp_path / 'run'}", *asked, config="eval"))
    with open(tmp_path / "result" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (effective,) = [row for row in rows if row["task"] == "effective_length"]
    assert (effective["metric"], float(effective["value"])) == ("passkey", 0.0) and "more than 50.0%" in effective["note"]
    summary = (tmp_path / "result" / "summary.md").read_text()
    assert "## effective_length" in summary and "no room: length=32 must be at least" in summary and WRONG in summary
    assert np.isfinite([float(row["value"]) for row in rows if row["value"]]).all()
