"""LongPPL: which tokens are chosen, by whom, and what is measured on them."""

import csv
import math

import pytest
import torch
import torch.nn.functional as F
from test_evaluation_perplexity import VOCAB, Counter, measured, only, text
from tiny_run import compose_tiny
from torch import nn

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.evaluation.longppl import LongPPL
from attnzoo.evaluation.perplexity import Scores, by_length


def scores(nll: list[float], context: list[int]) -> Scores:
    return Scores(torch.zeros(len(nll), dtype=torch.int64), torch.tensor(context), torch.tensor(nll))


def test_key_tokens_by_hand():
    long = scores([9.0, 0.5, 2.5, 1.0, 0.1, 0.1], [2, 8, 9, 10, 11, 3])
    short = scores([3.0, 5.0, 2.5, 2.2, 4.0], [4, 4, 5, 5, 4])
    position = torch.tensor([2, 8, 9, 10, 11, 7])
    # LSD: too short, 2.5, 2.5, 1.5, 2.1, 3.9 of a context that is not longer; LCL: -, -0.5, -2.5, -1, -0.1, -0.1
    assert LongPPL().key_tokens(long, short, position, 4).tolist() == [False, True, False, False, True, False]
    assert LongPPL(alpha=2.2).key_tokens(long, short, position, 4).tolist() == [False, True, False, False, False, False]
    assert LongPPL(alpha=1.0, beta=-3.0).key_tokens(long, short, position, 4).tolist() == [False, True, True, True, True, False]


class Late(nn.Module):
    """Knows that token t is followed by t + 1 only behind `need` tokens of context, and counts what it reads."""

    def __init__(self, need: int, sharpness: float = 4.0):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(sharpness))
        self.need, self.read = need, 0

    @property
    def known(self) -> float:
        return math.log(math.exp(self.sharpness.item()) + VOCAB - 1) - self.sharpness.item()

    def forward(self, input_ids, logits_at):
        self.read += input_ids.numel()
        logits = F.one_hot((input_ids + 1) % VOCAB, VOCAB) * self.sharpness
        logits[:, : self.need] = 0
        return logits.flatten(0, 1)[logits_at]


def reader_of(*models: nn.Module, loaded: list | None = None):
    """Gives the models by their numbers as paths of checkpoints."""
    def reader(ckpt_path, attention, model):
        def load():
            (loaded if loaded is not None else []).append(ckpt_path)
            return models[int(attention["number"])]
        return f"{attention}", load
    return reader


OPTIONS = {"lengths": [16, 64, 128], "context": 16, "min_tokens": 1, "max_tokens": None}


@pytest.mark.parametrize("protocol", ["windows", "sliding"])
def test_a_model_that_needs_long_contexts(protocol):
    model = Late(need=20)
    rows = measured(by_length(model, text(300, 200), protocols=[protocol], longppl=LongPPL(), **OPTIONS))
    mine = only(rows, task=f"longppl_{protocol}")
    assert {row.length for row in mine} == {64, 128}, "at 16 few contexts are longer than the short ones of 12 to 15 tokens"
    for length in (64, 128):
        value, loss, share = (only(mine, length=length, metric=metric)[0] for metric in ("longppl", "loss", "key_token_share"))
        assert value.value == pytest.approx(math.exp(model.known)) and loss.value == pytest.approx(model.known)
        assert value.count == loss.count == round(share.value * share.count) and share.count == 300 - 128 + 200 - 128
        assert "chosen by the model itself" in value.note and "12 to 15 tokens" in value.note
    if protocol == "windows":  # two spans of 128 and 44, 72 tokens, in windows of 64: those behind 20 others
        assert only(mine, length=64, metric="longppl")[0].count == 2 * 44 + 24 + 44 + 0


def test_whole_documents():
    model = Late(need=20)
    rows = measured(by_length(model, text(17, 100), protocols=["documents"], longppl=LongPPL(), **OPTIONS))
    (value,) = only(rows, task="longppl_documents", metric="longppl")
    assert (value.length, value.count, value.value) == (128, 99 - 20, pytest.approx(math.exp(model.known)))


def test_a_named_evaluator_chooses_for_all_and_reads_once():
    evaluator, loaded = Late(need=20), []
    longppl = LongPPL(attention={"number": 0}, short_context=12, stride=4)
    data, values = text(300, 200), []
    for model in (Late(need=30), Counter(reach=8)):
        plan = by_length(model, data, protocols=["windows"], longppl=longppl, reader=reader_of(evaluator, loaded=loaded), **OPTIONS)
        (value,) = only(measured(plan), task="longppl_windows", length=64, metric="longppl")
        values.append(value)
        assert "its checkpoint read with attention.number=0" in value.note
    read, (late, counter) = evaluator.read, values
    plan = by_length(Late(need=30), data, protocols=["windows"], longppl=longppl, reader=reader_of(evaluator, loaded=loaded), **OPTIONS)
    measured(plan)
    assert evaluator.read == read > 0 and loaded == [None]
    unknown, known = math.log(VOCAB), evaluator.known
    # three windows of 64 tokens and one of 44, all behind 20 others are key tokens; the late model knows those behind 30
    assert late.count == counter.count == 3 * 44 + 24
    assert math.log(late.value) == pytest.approx(((3 * 34 + 14) * known + 4 * 10 * unknown) / 156)
    assert math.log(counter.value) == pytest.approx(unknown)


def test_whatever_the_evaluator_cannot_do_leaves_the_loss_as_it_is():
    data = text(300, 200)
    cases = {Counter(reach=8, limit=20): "cannot read it: only 20 learned positions", Late(need=0): "none of 244 tokens",
             Late(need=0, sharpness=math.nan): "are NaN"}
    for evaluator, said in cases.items():
        longppl = LongPPL(attention={"number": 0})
        rows = measured(by_length(Late(need=20), data, protocols=["windows"], longppl=longppl, reader=reader_of(evaluator), **OPTIONS))
        refused = only(rows, task="longppl_windows")
        assert [row.value for row in refused] == [None, None] and all(said in row.note for row in refused)
        assert len(only(rows, task="perplexity_windows", metric="loss")) == 3


def test_who_chooses_is_part_of_what_names_a_measurement():
    def settings(**options) -> dict:
        plan = by_length(Late(need=20), text(300), longppl=LongPPL(**options), reader=reader_of(Late(1), Late(2)), **OPTIONS)
        return plan.measurements[0].settings["longppl"]

    assert settings() == {"alpha": 2.0, "beta": -2.0, "short_context": None, "stride": None, "evaluator": None}
    assert settings(attention={"number": 0})["evaluator"] != settings(attention={"number": 1})["evaluator"]


def test_an_evaluator_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="longppl.ckpt_path=.*gone.ckpt does not exist"):
        LongPPL(ckpt_path=str(tmp_path / "gone.ckpt"))


@pytest.mark.slow
def test_a_command_names_the_evaluator(tmp_path):
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=2", "model.n_layers=1", "callbacks.sample=null", "callbacks.plot=null"))
    run = tmp_path / "run"

    def evaluate(*overrides: str) -> list[dict]:
        quick = ["accelerator=cpu", "precision=32", "evaluation.lengths=[128]", "evaluation.tasks.validation=null",
                 "evaluation.tasks.perplexity.min_tokens=1", "evaluation.tasks.perplexity.max_tokens=500",
                 "evaluation.tasks.perplexity.protocols=[windows]", "evaluation.tasks.perplexity.longppl.alpha=-100",
                 "evaluation.tasks.perplexity.longppl.beta=-100"]
        runner.evaluate(compose_tiny(tmp_path, f"run_dir={tmp_path / 'result'}", f"ckpt_path={run}", *quick, *overrides, config="eval"))
        with open(tmp_path / "result" / "results.csv", newline="") as file:
            return [row for row in csv.DictReader(file) if row["task"] == "longppl_windows"]

    where = "evaluation.tasks.perplexity.longppl"
    itself = evaluate()
    other = evaluate(f"+attention@{where}.attention=dual_chunk", f"{where}.ckpt_path={run}")
    assert "chosen by the model itself" in itself[0]["note"]
    assert f"chosen by {run} read with attention=dual_chunk" in other[0]["note"]
    # with these thresholds every token is a key token, whoever chooses
    assert [row["value"] for row in itself] == [row["value"] for row in other] and float(itself[0]["value"]) > 1
    assert "## longppl_windows: longppl by length" in (tmp_path / "result" / "summary.md").read_text()
    (misfit,) = evaluate(f"+attention@{where}.attention=differential")
    assert misfit["value"] == "" and "cannot read it: the weights of" in misfit["note"]
