"""How well a model answers what is asked in a sequence: by the likeliest token at every asked place, in one pass.

Greedy decoding gives an answer exactly if each of its tokens is the likeliest one after the prompt and the tokens before it; so one pass
over prompt and answer says whether it would, for variants with a KV cache and without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from attnzoo.batch import IGNORED
from attnzoo.evaluation.results import Row, mean_row


@dataclass(frozen=True)
class Answer:
    """One example's: whether all asked tokens are the likeliest, the share of them that are, the mean of 1 / rank in the vocabulary (1 for
    the likeliest) and of the negative log-likelihood in nats over them."""

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
) -> list[Answer]:
    """The answers to examples of (input_ids, labels), int64 (length,) each of one length; labels[t] is to be predicted at t, or -100.

    model: causal, called as model(input_ids (batch, length), logits_at=(n,)) -> logits (n, vocab_size). batch_tokens: read at once, about.
    """
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // len(examples[0][0]))
    answers = []
    for i in range(0, len(examples), rows):
        input_ids, labels = (torch.from_numpy(np.stack(parts)) for parts in zip(*examples[i : i + rows], strict=True))
        _check_vocabulary(model, input_ids)
        at = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        targets = labels.flatten()[at].to(device)
        logits = model(input_ids.to(device), logits_at=at.to(device)).float()
        nothing = torch.where(logits.isnan().any(-1), torch.nan, 0.0)  # of NaN the first token would be the likeliest
        right = nothing + (logits.argmax(-1) == targets)
        rank = nothing + 1 + (logits > logits.gather(1, targets[:, None])).sum(-1)
        loss = F.cross_entropy(logits, targets, reduction="none")
        sizes = (labels != IGNORED).sum(1).tolist()
        for hits, ranks, losses in zip(*(values.cpu().double().split(sizes) for values in (right, rank, loss)), strict=True):
            answers.append(Answer(hits.min().item(), hits.mean().item(), (1 / ranks).mean().item(), losses.mean().item()))
        advance(input_ids.numel())
    return answers


def _check_vocabulary(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
    if (largest := int(input_ids.max())) >= model.vocab_size:
        raise ValueError(f"the task has token {largest}, the model only {model.vocab_size} tokens; set vocab_size, or train on the task")


def answer_rows(answers: Sequence[Answer], metrics: Sequence[str], **columns) -> list[Row]:
    """The mean of each metric over the examples; the first of `metrics` is the one that is shown."""
    return [mean_row([getattr(one, metric) for one in answers], metric=metric, **columns) for metric in metrics]
