"""Loss on tokens that repeat earlier context, and on the other tokens. The difference shows how well a model recalls from its context.

A token is a repetition if it ends an n-gram that also occurs earlier in the window ("AR hits": Arora et al. 2023, arXiv:2312.04927; Ye et
al. 2024, arXiv:2410.05258). These papers count rare n-grams only. Here all n-grams count, also frequent ones that a model has memorised.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.perplexity import SPLIT, Window, choose_targets, mean_loss, place_windows, score
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.retrieval import is_text


def repeats(
    model: torch.nn.Module, data, *, lengths: Sequence[int] = (), context: int, ngram: int = 8, max_tokens: int | None = None,
    batch_tokens: int = 8192,
) -> Plan:
    """The loss of repeated_tokens, other_tokens and all_tokens, in windows of the training context with a stride of half of it.

    data: a data module of text. context: the training context. ngram: its length in tokens, the repeated one included; with bytes, 8
    is about two words. max_tokens: predict about this many, None for all. batch_tokens: read at once. lengths: not used, all tasks are
    given them.
    """
    if ngram < 2:
        raise ValueError(f"ngram={ngram} must be at least 2")
    if data.objective != "lm" or not is_text(data):
        return refusal("repeats", "needs a causal language model of text")
    dataset = data.documents(SPLIT)
    sizes = [len(tokens) for tokens in dataset["input_ids"]]
    windows = place_windows(choose_targets(sizes, context, max_tokens), context, max(1, context // 2))
    if not windows:
        return refusal("repeats", f"no document has more than {context} tokens")
    settings = {"ngram": ngram, "max_tokens": max_tokens, "batch_tokens": batch_tokens, "context": context}
    measure = partial(_measure, model, dataset, windows, context, ngram, batch_tokens)
    return Plan([Measurement("repeats", measure, settings, len(windows) * context, context)])


def is_repeated(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """For each of tokens (n,) whether the n-gram that it ends also occurs earlier in tokens; bool (n,)."""
    found = np.zeros(len(tokens), bool)
    if len(tokens) >= ngram:
        grams = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens), ngram)
        _, first, which = np.unique(grams, axis=0, return_index=True, return_inverse=True)
        found[ngram - 1 :] = first[which.ravel()] < np.arange(len(grams))
    return found


def _measure(
    model, dataset, windows: Sequence[Window], context: int, ngram: int, batch_tokens: int, advance: Callable[[int], None]
) -> list[Row]:
    documents = {i: dataset[i]["input_ids"] for i in sorted({window.document for window in windows})}
    scores = score(model, documents, windows, context, batch_tokens=batch_tokens, advance=advance)
    # in the order of score: by window, and in a window from its first target on
    repeated = torch.from_numpy(np.concatenate([
        is_repeated(documents[one.document][one.start : one.end], ngram)[one.first - one.start :] for one in windows
    ]))
    said, rows = f"n-grams of {ngram} tokens", []
    for task, here in (("repeated_tokens", repeated), ("other_tokens", ~repeated), ("all_tokens", torch.ones_like(repeated))):
        if n := int(here.sum()):
            loss, stderr = mean_loss(scores, here)
            rows.append(Row(task=task, length=context, value=loss, stderr=stderr, count=n, note=said))
    return rows
