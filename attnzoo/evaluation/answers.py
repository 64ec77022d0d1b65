"""How well a model answers questions in a sequence, measured in one forward pass without decoding.

Greedy decoding produces an answer exactly if each of its tokens is the likeliest one after the prompt and the answer's earlier tokens. One
forward pass over prompt and answer therefore tells whether it would, for variants with and without a KV cache.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from attnzoo.batch import IGNORED
from attnzoo.evaluation.results import SHARES, Row, mean_row
from attnzoo.models.decoding import read_once

WRONG = "zero: every answer is wrong, and no input was cut off"
LLAMA2_AT_4K = 0.856  # RULER's threshold: what Llama 2 7B scores at its training length


@dataclass(frozen=True)
class Answer:
    """The scores of one example, over its answer tokens.

    exact_match: 1 if all of them are the likeliest token, else 0. accuracy: the share of them that are. reciprocal_rank: the mean of
    1 / rank in the vocabulary, where the likeliest token has rank 1. loss: the mean negative log-likelihood in nats.
    """

    exact_match: float
    accuracy: float
    reciprocal_rank: float
    loss: float


@torch.inference_mode()
def answer(
    model: torch.nn.Module,
    examples: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    batch_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
    one_text: bool = False,
) -> list[Answer]:
    """Scores the examples (input_ids, labels), two int64 arrays of shape (length,); all examples have the same length.

    labels[t] is the token that must be predicted at position t, or -100 where nothing is asked.

    model: causal, called as model(input_ids (batch, length), logits_at=(n,)) -> logits (n, vocab_size). batch_tokens: about as many
    tokens are in a batch. one_text: the common beginning of all examples is read once and its KV cache reused, if the model
    `reads_in_parts`.
    """
    device = next(model.parameters()).device
    length = len(examples[0][0])
    rows = min(max(1, batch_tokens // length), len(examples))
    answers, begun, caches = [], 0, {}
    if one_text and getattr(model, "reads_in_parts", False):
        begun = min(common_beginning([ids for ids, _ in examples]), *(int((labels != IGNORED).argmax()) for _, labels in examples))
    if begun:
        beginning = torch.from_numpy(examples[0][0][:begun])
        _check_vocabulary(model, beginning)
        caches = {"cache": read_once(model, beginning.to(device), rows, length)}
        advance(begun)
    for i in range(0, len(examples), rows):
        input_ids, labels = (torch.from_numpy(np.stack(parts)[:, begun:]) for parts in zip(*examples[i : i + rows], strict=True))
        _check_vocabulary(model, input_ids)
        for cache in caches.get("cache", ()):
            cache.length = begun
            if cache.batch > len(input_ids):
                cache.take(torch.arange(len(input_ids), device=device))
        at = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        targets = labels.flatten()[at].to(device)
        logits = model(input_ids.to(device), logits_at=at.to(device), **caches).float()
        nothing = torch.where(logits.isnan().any(-1), torch.nan, 0.0)  # without this, argmax of NaN logits would count as an answer
        right = nothing + (logits.argmax(-1) == targets)
        rank = nothing + 1 + (logits > logits.gather(1, targets[:, None])).sum(-1)
        loss = F.cross_entropy(logits, targets, reduction="none")
        sizes = (labels != IGNORED).sum(1).tolist()
        for hits, ranks, losses in zip(*(values.cpu().double().split(sizes) for values in (right, rank, loss)), strict=True):
            answers.append(Answer(hits.min().item(), hits.mean().item(), (1 / ranks).mean().item(), losses.mean().item()))
        advance(input_ids.numel())
    return answers


def common_beginning(rows: Sequence[np.ndarray]) -> int:
    """The length of the longest common prefix of the rows, each (length,)."""
    same = (np.stack(rows) == rows[0]).all(axis=0)
    return len(same) if same.all() else int(same.argmin())


def _check_vocabulary(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
    if (largest := int(input_ids.max())) >= model.vocab_size:
        raise ValueError(f"the task has token {largest}, the model only {model.vocab_size} tokens; set vocab_size, or train on the task")


def answer_rows(answers: Sequence[Answer], metrics: Sequence[str], **columns) -> list[Row]:
    """The mean of each metric over the examples; the first of `metrics` is the one that is shown."""
    return explain_zeros(mean_row([getattr(one, metric) for one in answers], metric=metric, **columns) for metric in metrics)


def explain_zeros(rows: Iterable[Row], reason: str = WRONG) -> list[Row]:
    """The rows, with a note added where a share of right answers is zero. Rows without room or with NaN have notes of their own."""
    return [
        replace(row, note="; ".join(filter(None, (row.note, reason)))) if row.metric in SHARES and row.value == 0 else row for row in rows
    ]


def effective_length(rows: Sequence[Row], task: str, metric: str, threshold: float = LLAMA2_AT_4K) -> list[Row]:
    """RULER's effective length (Hsieh et al. 2024, arXiv:2404.06654): the longest length, in tokens, at which the share of right answers
    exceeds the threshold. The returned row has no length, and its metric is the task. There is no row where the task has no value.

    rows: only those of `task` and `metric` that stand for all depths together (depth None) are used.
    """
    own = [row for row in rows if (row.task, row.metric, row.depth) == (task, metric, None)]
    shares = {row.length: row.value for row in own if row.value is not None}
    if not shares:
        return []
    longest = max((length for length, share in shares.items() if share > threshold), default=0)
    note = f"the longest length with more than {threshold:.1%} right answers"
    if all(map(math.isnan, shares.values())):
        return [Row(task="effective_length", metric=task, value=math.nan, count=len(shares), note="no share of right answers is a number")]
    if not longest:
        note = f"zero: at no length more than {threshold:.1%} of the answers are right"
    elif longest == max(shares):
        note += ", and the longest that was measured"
    return [Row(task="effective_length", metric=task, value=float(longest), count=len(shares), note=note)]
