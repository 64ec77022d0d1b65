"""Perplexity by context length: what a model gains from more context, and where it breaks.

Lengths are comparable only if they predict the same tokens. The targets therefore depend only on the data and the longest length: they are
tokens with at least that many tokens before them in their own document. Every length of every model predicts exactly these targets. No
window reaches into another document. Two protocols differ in their windows; both count each target once:

- `perplexity_windows`: non-overlapping windows of `length` tokens; a target sees 1 to `length` tokens ("nonoverlapping inference", Press et
  al. 2021, arXiv:2012.15832).
- `perplexity_sliding`: windows of `length` tokens that advance by a stride, where only the last `stride` predictions count; a target
  sees `length - stride + 1` to `length` tokens (Baevski and Auli 2019, arXiv:1809.10853).

Two more views have targets of their own:

- `perplexity_documents`: whole documents, each read once from its first token. `length` stands for the documents of at most `length`
  tokens that are longer than the previous length in the list. Lengths have different documents, so this compares models, not lengths.
- `loss_by_position`: the loss in the non-overlapping windows by the number of tokens of context.

Each of the first three also has LongPPL, over those of its targets that need a long context (longppl.py): `longppl_windows` and so on.

A length that leaves fewer than `min_tokens` targets, because few documents are that long, gets a row that says so and does not narrow the
targets of the others. The standard errors treat documents as independent samples. As all runs predict the same tokens, differences
between runs have smaller errors than these.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.batch import IGNORED
from attnzoo.evaluation import together
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.results import Row, language_model_rows
from attnzoo.models.transformer import Transformer

if TYPE_CHECKING:
    from attnzoo.evaluation.longppl import LongPPL, Reader

SPLIT = "validation"
PROTOCOLS = ("windows", "sliding", "documents")


@dataclass(frozen=True)
class Span:
    """Tokens [first, end) of one document, to be predicted."""

    document: int
    first: int
    end: int


@dataclass(frozen=True)
class Window(Span):
    """A span to be predicted by a model that reads the document from token `start` on."""

    start: int


@dataclass(frozen=True)
class Scores:
    """For each of n predicted tokens: its document, its number of context tokens, its negative log-likelihood in nats (float64); all
    (n,)."""

    document: Tensor
    context: Tensor
    nll: Tensor


def default_lengths(contexts: Sequence[int]) -> list[int]:
    """From a quarter of the shortest training context to eight times the longest, doubling."""
    lengths = [max(1, min(contexts) // 4)]
    while lengths[-1] * 2 <= 8 * max(contexts):
        lengths.append(lengths[-1] * 2)
    return lengths


def choose_targets(sizes: Sequence[int], length: int, max_tokens: int | None = None) -> list[Span]:
    """The tokens of documents of these sizes that have at least `length` tokens before them, in spans of at most `length`.

    max_tokens: keep about this many tokens, in spans taken at regular intervals over all documents; None keeps all.
    """
    spans = [Span(i, first, min(first + length, size)) for i, size in enumerate(sizes) for first in range(length, size, length)]
    return _thin(spans, max_tokens)


def place_windows(spans: Sequence[Span], length: int, stride: int) -> list[Window]:
    """Windows of `length` tokens whose last `stride` predictions cover the spans, each target once."""
    return [
        Window(span.document, first, min(first + stride, span.end), start=first + stride - 1 - length)
        for span in spans
        for first in range(span.first, span.end, stride)
    ]


@torch.inference_mode()
def score(
    model: torch.nn.Module,
    documents: Mapping[int, Sequence[int]],
    windows: Sequence[Window],
    length: int,
    *,
    batch_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Scores:
    """The likelihood of every target of the windows, which the model reads in dense batches of about batch_tokens tokens, one row at least.

    model: causal, called as model(input_ids (batch, length) int64, logits_at=(n,) int64) -> logits (n, vocab_size).
    documents: token ids by the numbers that the windows use. advance: told how many tokens were read.
    """
    rows = max(1, batch_tokens // length)
    parts = []
    for i in range(0, len(windows), rows):
        batch = windows[i : i + rows]
        # a window that is shorter than `length` is padded on the right: the model is causal, and padding is not scored
        input_ids = torch.zeros(len(batch), length, dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORED)
        for row, window in enumerate(batch):
            tokens = torch.as_tensor(documents[window.document][window.start : window.end])
            input_ids[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, window.first - window.start - 1 : len(tokens) - 1] = tokens[window.first - window.start :]
        nll = together.losses(model, input_ids, labels, _losses)
        at = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        document = torch.tensor([window.document for window in batch])[at // length]
        parts.append((document, at % length + 1, nll.double()))
        advance(input_ids.numel())
    return Scores(*map(torch.cat, zip(*parts, strict=True)))


def _losses(model: torch.nn.Module, input_ids: Tensor, at: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
    """Losses, float32, shape of targets. A Transformer of attnzoo computes them without all logits, the largest tensor at 128k tokens."""
    ours = getattr(model, "module", model)
    if isinstance(ours, Transformer) and ours.head_matrix.dtype != torch.float64:  # the kernels take no float64
        return model(input_ids, logits_at=at, targets=targets, reduction="none", **inputs)
    return F.cross_entropy(model(input_ids, logits_at=at, **inputs).float(), targets, reduction="none")


def mean_and_stderr(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """The mean over all tokens and its standard error, from the sum and the number of tokens of each independent part, (parts,) float64.

    The tokens of a document are correlated, so a standard error over single tokens would be too small. It is None for fewer than two parts.
    """
    parts, total = len(sums), counts.sum()
    mean = sums.sum() / total
    if parts < 2:
        return mean.item(), None
    spread = (sums - mean * counts).square().sum()
    return mean.item(), (parts / (parts - 1) * spread).sqrt().item() / total.item()


def by_length(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int],
    context: int,
    protocols: Sequence[str] = PROTOCOLS,
    stride: float = 0.5,
    min_tokens: int = 4096,
    max_tokens: int | None = 32768,
    batch_tokens: int = 8192,
    longppl: "LongPPL | None" = None,
    reader: "Reader | None" = None,
) -> Plan:
    """Loss, perplexity and bits per byte at every length, and the loss by position, as the module's docstring defines them.

    data: a data module; its `objective` and `documents(split)` are used. lengths: in tokens. context: the training context, in tokens.
    protocols: of windows, sliding, documents. stride: of the sliding windows, a float for a share of the length, an int for tokens.
    min_tokens: a length with fewer targets is not run. max_tokens: use about this many targets, None for all. batch_tokens: tokens that
    the model reads at once. longppl: the options of LongPPL; None leaves it out. reader: loads the evaluator that longppl names.
    """
    if unknown := set(protocols) - set(PROTOCOLS):
        raise ValueError(f"protocols: {', '.join(sorted(unknown))} is none of {', '.join(PROTOCOLS)}")
    if not (0 < stride <= 1 if isinstance(stride, float) else stride >= 1):
        raise ValueError(f"stride={stride} must be a share of the length (above 0.0, up to 1.0) or a whole number of tokens")
    for name, value in {"min_tokens": min_tokens, "max_tokens": max_tokens, "batch_tokens": batch_tokens}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if data.objective != "lm":
        return refusal("perplexity", "needs a causal language model; a masked one is compared by its validation loss")
    dataset = data.documents(SPLIT)
    if "n_bytes" not in dataset.column_names:
        return refusal("perplexity", "needs documents of text, and the run's data are numbers")
    sizes = [len(tokens) for tokens in dataset["input_ids"]]
    bytes_per_token = torch.as_tensor(dataset["n_bytes"][:], dtype=torch.float64) / torch.tensor(sizes)
    lengths = sorted(lengths)
    settings = {"lengths": lengths, "stride": stride, "min_tokens": min_tokens, "max_tokens": max_tokens, "batch_tokens": batch_tokens}
    long = None
    if longppl is not None:
        settings["longppl"] = longppl.settings(reader)
        long = partial(longppl.rows, model, reader, context=context, batch_tokens=batch_tokens)
    measurements = []
    for task, length, windows in _plan(sizes, lengths, protocols, stride, min_tokens, max_tokens):
        if isinstance(windows, str):
            measure, tokens = partial(_no_windows, task, length, windows), 0
        else:
            measure = partial(_measure, model, dataset, bytes_per_token, task, length, windows, context, batch_tokens, long)
            tokens = len(windows) * length
        measurements.append(Measurement(task, measure, {**settings, "context": context}, tokens, length))
    return Plan(measurements)


def _no_windows(task: str, length: int, reason: str, advance: Callable) -> list[Row]:
    return [Row(task=task, length=length, note=reason)]


def _measure(model, dataset, bytes_per_token, task, length, windows, context, batch_tokens, long, advance) -> list[Row]:
    documents = {i: dataset[i]["input_ids"] for i in sorted({window.document for window in windows})}
    scores = score(model, documents, windows, length, batch_tokens=batch_tokens, advance=advance)
    ratio = bytes_per_token[scores.document].mean().item()
    count, note = len(scores.nll), f"{len(scores.nll)} tokens of {len(documents)} document(s)"
    rows = language_model_rows(*mean_loss(scores), ratio, task=task, length=length, count=count, note=note)
    if task == "perplexity_windows":
        rows += loss_by_position(length, scores, unit=context)
    if long is not None:
        rows += long(task.replace("perplexity", "longppl"), length, documents, windows, scores)
    return rows


def loss_by_position(length: int, scores: Scores, unit: int) -> list[Row]:
    """The mean loss by tokens of context, in groups. `depth` is the largest number of tokens in a group.

    Up to a quarter of `unit` a group is an octave (its end is twice its start); beyond that each octave has four groups of equal width.
    unit: the training context. A group ends there, so that a jump of the loss beyond it is visible.
    """
    octaves = range(-math.ceil(math.log2(unit)), math.ceil(math.log2(length / unit)) + 1)
    ends = {round(unit * 2.0**octave * quarter / 4) for octave in octaves for quarter in ((4, 5, 6, 7) if octave >= -2 else (4,))}
    ends = torch.tensor(sorted({end for end in ends if 0 < end <= length} | {length}))
    groups = torch.bucketize(scores.context, ends)
    rows = []
    for group in groups.unique().tolist():
        here = groups == group
        loss, stderr = mean_loss(scores, here)
        rows.append(Row(task="loss_by_position", length=length, depth=ends[group].item(), value=loss, stderr=stderr, count=int(here.sum())))
    return rows


def _plan(sizes, lengths, protocols, stride, min_tokens, max_tokens) -> Iterator[tuple[str, int, list[Window] | str]]:
    """(task, length, its windows or why there are none) for every protocol and length."""
    available = {length: sum(max(0, size - length) for size in sizes) for length in lengths}
    usable = [length for length in lengths if available[length] >= min_tokens]
    spans = choose_targets(sizes, usable[-1], max_tokens) if usable else []
    for protocol in protocols:
        for shorter, length in zip([1, *lengths], lengths, strict=False):
            if protocol == "documents":
                windows = [Window(i, 1, size, start=0) for i, size in enumerate(sizes) if shorter < size <= length]
                if sum(window.end - window.first for window in windows) < min_tokens:
                    windows = f"too few documents hold {shorter + 1} to {length} tokens ({len(windows)}); min_tokens={min_tokens}"
                else:
                    windows = _thin(windows, max_tokens)
            elif length not in usable:
                windows = (
                    f"only {available[length]} tokens have {length} before them in their document, min_tokens={min_tokens}; "
                    f"the longest document holds {max(sizes, default=0)}"
                )
            else:
                step = length if protocol == "windows" else round(stride * length) if isinstance(stride, float) else stride
                windows = place_windows(spans, length, min(max(step, 1), length))
            yield f"perplexity_{protocol}", length, windows


def _thin(spans: list, max_tokens: int | None) -> list:
    """Spans at regular intervals, so that about max_tokens tokens remain."""
    total = sum(span.end - span.first for span in spans)
    if max_tokens is None or total <= max_tokens:
        return spans
    keep = max(1, round(len(spans) * max_tokens / total))
    return [spans[i * len(spans) // keep] for i in range(keep)]


def mean_loss(scores: Scores, here: Tensor | slice = slice(None)) -> tuple[float, float | None]:
    """The mean negative log-likelihood in nats over the tokens `here`, bool (n,), and its standard error over documents."""
    _, document = scores.document[here].unique(return_inverse=True)
    return mean_and_stderr(torch.bincount(document, weights=scores.nll[here]), torch.bincount(document).double())
