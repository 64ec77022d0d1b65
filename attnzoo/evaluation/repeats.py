"""Loss on tokens that repeat what stands earlier in the context, and on the others: the split by which associative recall shows.

A token is a repetition if it ends an n-gram that stands in the window already ("AR hits": Arora et al. 2023, arXiv:2312.04927; Ye et al.
2024, arXiv:2410.05258). They count rare n-grams only; here all of them count, also those that a model knows by heart.
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
    """The loss of repeated_tokens, other_tokens and all_tokens, in windows of the training context that move on by half of it.

    data: a data module of text. context: the training context. ngram: tokens, the repeated one included; eight bytes are about two words'
    tokens. max_tokens: about as many are predicted, None for all. batch_tokens: read at once. lengths: not used, all tasks are given them.
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
    """Of each token whether it ends an n-gram that ended earlier in tokens (n,) too; bool (n,)."""
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
    # score's order: window by window, and in each from its first target on
    repeated = torch.from_numpy(np.concatenate([
        is_repeated(documents[one.document][one.start : one.end], ngram)[one.first - one.start :] for one in windows
    ]))
    said, rows = f"n-grams of {ngram} tokens", []
    for task, here in (("repeated_tokens", repeated), ("other_tokens", ~repeated), ("all_tokens", torch.ones_like(repeated))):
        if n := int(here.sum()):
            loss, stderr = mean_loss(scores, here)
            rows.append(Row(task=task, length=context, value=loss, stderr=stderr, count=n, note=said))
    return rows
