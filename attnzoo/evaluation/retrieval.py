"""A key is hidden in filler and asked for at the end, over a grid of lengths and depths (format: attnzoo.data.synthetic.passkey).

`passkey` hides it in five repeated sentences without information (Mohtashami and Jaggi 2023, arXiv:2305.16300), `needle` in the validation
text. A length includes everything, also the answer. Both tasks need a model that has learned to answer: `python train.py data=passkey`
makes one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from attnzoo.data.synthetic import passkey as task
from attnzoo.evaluation.answers import LLAMA2_AT_4K, answer, answer_rows, effective_length, explain_zeros
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.perplexity import SPLIT
from attnzoo.evaluation.results import Row, over_depths

METRICS = ("exact_match", "accuracy", "reciprocal_rank", "loss")


def passkey(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int],
    context: int | None = None,
    depths: int | Sequence[float] = 11,
    examples: int = 10,
    keys: tuple[int, int] | None = None,
    distractors: int = 0,
    one_text: bool = False,
    seed: int = 0,
    batch_tokens: int = 8192,
    effective_threshold: float = LLAMA2_AT_4K,
) -> Plan:
    """Whether greedy decoding finds the key at every length and depth, and how likely the key's tokens are.

    data: a data module; its `tokenizer` is used. depths: shares of the filler before the key, or the number of evenly spaced depths from 0
    to 1. examples: the number of examples at each length and depth. keys: the smallest and the largest key; None takes those of `data`, or
    the published ones if it has none. distractors: the number of further keys at random depths; each key then has a name, and the task is
    called passkey_<number of keys>_keys.
    one_text: a text has a key at every depth, each with a name. It is read once and asked for all keys. `examples` then counts texts, and
    the task is called passkey_one_text. Models that do not read in parts (see `Transformer.reads_in_parts`) read it for each question.
    batch_tokens: tokens that are read at once. effective_threshold: the share of right answers above which a length counts as effective.
    """
    if (refused := _refused("passkey", data)) is not None:
        return refused
    return _grid("passkey", model, data, lengths, depths, examples, keys, distractors, one_text, seed, batch_tokens, effective_threshold,
                 lambda length, rng: None)


def needle(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int],
    context: int | None = None,
    depths: int | Sequence[float] = 11,
    examples: int = 10,
    keys: tuple[int, int] | None = None,
    distractors: int = 0,
    one_text: bool = False,
    seed: int = 0,
    batch_tokens: int = 8192,
    effective_threshold: float = LLAMA2_AT_4K,
) -> Plan:
    """As `passkey`, with the validation text as filler, from a random place on; at its end it continues with its beginning."""
    if (refused := _refused("needle", data)) is not None:
        return refused
    text = np.concatenate(list(data.documents(SPLIT)["input_ids"]))

    def filler(length: int, rng: np.random.Generator) -> np.ndarray:
        return text[(rng.integers(len(text)) + np.arange(length)) % len(text)]

    return _grid("needle", model, data, lengths, depths, examples, keys, distractors, one_text, seed, batch_tokens, effective_threshold,
                 filler)


def _refused(name: str, data) -> Plan | None:
    if data.objective != "lm":
        return refusal(name, "needs a causal language model that goes on from a question")
    if not is_text(data):
        return refusal(name, "needs a model of text, and the run's data are numbers; see evaluation=recall, copying, induction")
    return None


def is_text(data) -> bool:
    """Whether a data module's documents are text: they have a number of bytes."""
    return hasattr(data, "documents") and "n_bytes" in data.documents(SPLIT).column_names


def _grid(
    name: str,
    model: torch.nn.Module,
    data,
    lengths: Sequence[int],
    depths: int | Sequence[float],
    examples: int,
    keys: Sequence[int] | None,
    distractors: int,
    one_text: bool,
    seed: int,
    batch_tokens: int,
    effective_threshold: float,
    filler: Callable[[int, np.random.Generator], np.ndarray | None],
) -> Plan:
    if examples < 1:
        raise ValueError(f"examples={examples} must be at least 1")
    keys = tuple(keys or getattr(data, "keys", task.KEYS))
    settings = {"examples": examples, "keys": list(keys), "seed": seed, "batch_tokens": batch_tokens}
    options = {"encode": data.tokenizer.encode}
    depths = spread(depths)
    if distractors:
        name = f"{name}_{distractors + 1}_keys"
        settings["distractors"] = options["distractors"] = distractors
    if one_text:
        name = f"{name}_one_text"
        if len(depths) + distractors > len(task.NAMES):
            raise ValueError(f"depths={depths}, distractors={distractors}: with one_text they must be at most {len(task.NAMES)} together")

    def measure(length: int, depths: Sequence[float], advance: Callable[[int], None]) -> list[Row]:
        # first try the longest key, so that a length either has room for all keys or is refused
        task.examples(length, depths=depths, seed=0, filler=[0], keys=(keys[-1], keys[-1]), **options)
        texts = []
        for i in range(examples):
            seeds = (seed, length, i) if one_text else (seed, length, round(1e6 * depths[0]), i)
            text = filler(length, np.random.default_rng((*seeds, 1)))
            made = task.examples(length, depths=depths, seed=seeds, filler=text, keys=keys, **options)
            texts.append([(one.input_ids, one.labels) for one in made])
        if one_text:
            answers = [answer(model, text, batch_tokens=batch_tokens, advance=advance, one_text=True) for text in texts]
        else:
            answers = [[one] for one in answer(model, [row for (row,) in texts], batch_tokens=batch_tokens, advance=advance)]
        by_depth = zip(depths, zip(*answers, strict=True), strict=True)
        return [row for depth, found in by_depth for row in answer_rows(found, METRICS, task=name, length=length, depth=depth)]

    settings["one_text"] = one_text
    measurements = [
        Measurement(name, partial(measure, length, together), {**settings, "depths": together}, examples * length, length)
        for length in sorted(lengths)
        for together in ([depths] if one_text else [[depth] for depth in depths])
    ]

    def conclude(rows: list[Row]) -> list[Row]:
        means = explain_zeros(over_depths(rows))
        return means + effective_length(means, name, METRICS[0], effective_threshold)

    return Plan(measurements, conclude)


def spread(depths: int | Sequence[float]) -> list[float]:
    """Depths from 0 to 1 in ascending order: a number of evenly spaced ones, or the given ones without duplicates."""
    if isinstance(depths, int):
        if depths < 1:
            raise ValueError(f"depths={depths} must be a number of depths, at least 1, or a list of depths from 0 to 1")
        return [0.5] if depths == 1 else [round(i / (depths - 1), 6) for i in range(depths)]
    if not depths or any(not isinstance(depth, int | float) or not 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths={list(depths)} must hold numbers from 0 to 1, or be a number of depths")
    return sorted({float(depth) for depth in depths})
