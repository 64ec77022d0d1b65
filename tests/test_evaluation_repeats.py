"""Loss on repeated tokens: what counts as a repetition, and that the parts make up the whole."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnzoo.data.tokenizers import ByteTokenizer
from attnzoo.evaluation.perplexity import by_length
from attnzoo.evaluation.repeats import is_repeated, repeats

CONTEXT = 64


class Unigram(nn.Module):
    """The same logits everywhere."""

    vocab_size = 12

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(-1, 2, self.vocab_size))

    def forward(self, input_ids, logits_at):
        return self.logits.expand(len(logits_at), -1)


def documents(*tokens, objective="lm"):
    dataset = datasets.Dataset.from_dict({"input_ids": list(tokens), "n_bytes": [len(ids) for ids in tokens]}).with_format("numpy")
    return SimpleNamespace(tokenizer=ByteTokenizer(), objective=objective, documents=lambda split: dataset)


def run(plan):
    return {row.task: row for one in plan.measurements for row in one.measure(lambda tokens: None)}


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 4, 5, 200])
def test_a_repetition_ends_an_ngram_that_ended_earlier(ngram, n):
    tokens = np.random.default_rng(n).integers(3, size=n)
    grams = [tuple(tokens[max(0, i - ngram + 1) : i + 1]) for i in range(n)]
    assert is_repeated(tokens, ngram).tolist() == [len(gram) == ngram and gram in grams[:i] for i, gram in enumerate(grams)]


def test_the_parts_are_those_of_the_windows_and_make_up_the_whole():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(12, size=n) for n in (300, 150, 40)]
    found = run(repeats(Unigram(), documents(*tokens), context=CONTEXT, ngram=3))
    nll = -F.log_softmax(Unigram().logits.detach().double(), 0).numpy()
    expected = {True: [], False: []}
    for ids in tokens:
        for first in range(CONTEXT, len(ids), CONTEXT):  # spans of a context's length, in windows that predict half of it
            end = min(first + CONTEXT, len(ids))
            for at in range(first, end, CONTEXT // 2):
                start = at + CONTEXT // 2 - 1 - CONTEXT
                window = ids[start : min(at + CONTEXT // 2, end)]
                for i in range(at - start, len(window)):
                    gram = window[i - 2 : i + 1].tolist()
                    expected[any(window[j - 2 : j + 1].tolist() == gram for j in range(2, i))].append(nll[window[i]])
    assert expected[True] and expected[False]
    for task, values in (("repeated_tokens", expected[True]), ("other_tokens", expected[False])):
        assert found[task].count == len(values) and found[task].value == pytest.approx(np.mean(values), rel=1e-6)
    both = expected[True] + expected[False]
    assert found["all_tokens"].count == len(both) and found["all_tokens"].value == pytest.approx(np.mean(both), rel=1e-6)
    options = {"lengths": [CONTEXT], "context": CONTEXT, "protocols": ["sliding"], "max_tokens": None, "min_tokens": 1}
    plan = by_length(Unigram(), documents(*tokens), **options)
    (whole,) = [row for one in plan.measurements for row in one.measure(lambda tokens: None) if row.metric == "loss"]
    assert whole.value == found["all_tokens"].value


def test_what_it_cannot_do_it_says():
    (row,) = run(repeats(Unigram(), documents(np.arange(10)), context=CONTEXT)).values()
    assert row.value is None and "no document has more than 64 tokens" in row.note
    (row,) = run(repeats(Unigram(), documents(np.arange(90), objective="mlm"), context=CONTEXT)).values()
    assert "causal language model" in row.note
    with pytest.raises(ValueError, match="ngram=1 must be at least 2"):
        repeats(Unigram(), documents(np.arange(90)), context=CONTEXT, ngram=1)
