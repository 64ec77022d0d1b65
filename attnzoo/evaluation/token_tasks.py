"""Associative recall, copying and induction heads by length: the tasks of attnzoo.data.synthetic that are made of tokens, not of text.

They need a model that was trained on them (`python train.py data=recall`). With any seed the rows differ from those of training and
validation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from attnzoo.data.synthetic import copying as copying_task
from attnzoo.data.synthetic import induction as induction_task
from attnzoo.data.synthetic import recall as recall_task
from attnzoo.evaluation.answers import answer, answer_rows
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.retrieval import is_text

METRICS = ("accuracy", "exact_match", "reciprocal_rank", "loss")
EVALUATION = 2  # a part of the seeds, where training has 0 and validation 1


def recall(model: torch.nn.Module, data, *, lengths: Sequence[int], n_pairs: int | None = None, **options) -> Plan:
    """Multi-query associative recall: the share of queries that are answered right.

    n_pairs: the number of keys with a value, each asked for once; None takes a sixteenth of the length, as published, and at least 1.
    options: see `_token_task`. `power` and `random_fill` are those of a run that was trained on this task.
    """
    own = _own(data, recall_task)
    fixed = {key: own[key] for key in ("power", "random_fill") if key in own}
    return _token_task(recall_task, model, data, lengths, lambda length: {**fixed, "n_pairs": n_pairs or max(1, length // 16)}, **options)


def copying(model: torch.nn.Module, data, *, lengths: Sequence[int], n_tokens: int | None = None, **options) -> Plan:
    """Copying: the share of tokens that are right.

    n_tokens: the number of tokens to copy, at random places among blanks; None takes the run's, or else half the length, without blanks.
    """
    own = _own(data, copying_task).get("n_tokens")
    n_tokens = own if n_tokens is None else n_tokens
    return _token_task(copying_task, model, data, lengths, lambda length: {"n_tokens": n_tokens}, **options)


def induction(model: torch.nn.Module, data, *, lengths: Sequence[int], **options) -> Plan:
    """Induction heads: the share of rows in which the model predicts the token that followed the special token the first time."""
    return _token_task(induction_task, model, data, lengths, lambda length: {}, **options)


def _own(data, task: ModuleType) -> dict[str, Any]:
    """The keyword arguments for `example` of a run that was trained on this task; {} for other runs."""
    return data.example_options() if getattr(data, "task", None) is task else {}


def _token_task(
    task: ModuleType,
    model: torch.nn.Module,
    data,
    lengths: Sequence[int],
    arguments: Callable[[int], dict[str, Any]],
    *,
    context: int | None = None,
    vocab_size: int | None = None,
    examples: int = 100,
    seed: int = 0,
    batch_tokens: int = 8192,
) -> Plan:
    """vocab_size: None takes the run's, or else the published one, but at most the model's. examples: the number of rows at each length.
    batch_tokens: tokens that are read at once."""
    name = task.__name__.rpartition(".")[2]
    if data.objective != "lm":
        return refusal(name, "needs a causal language model")
    if examples < 1:
        raise ValueError(f"examples={examples} must be at least 1")
    if vocab_size is None and is_text(data):
        return refusal(name, f"needs a model of numbers, and the run's data are text: train one with data={name}, or set vocab_size")
    if vocab_size is None:
        published = task.example.__kwdefaults__["vocab_size"]
        vocab_size = _own(data, task).get("vocab_size", min(published, model.vocab_size))

    def measure(length: int, options: dict[str, Any], advance: Callable[[int], None]) -> list[Row]:
        rows = [task.example(length, vocab_size=vocab_size, seed=(seed, EVALUATION, length, i), **options) for i in range(examples)]
        answers = answer(model, rows, batch_tokens=batch_tokens, advance=advance)
        said = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        return answer_rows(answers, METRICS, task=name, length=length, note=said)

    settings = {"vocab_size": vocab_size, "examples": examples, "seed": seed, "batch_tokens": batch_tokens}
    return Plan([
        Measurement(name, partial(measure, length, options), {**settings, **options}, examples * length, length)
        for length in sorted(lengths)
        for options in [arguments(length)]
    ])
