"""RULER's retrieval and tracing tasks by length: the model continues the prompt greedily, and its text is searched for the answers.

A length includes the prompt and the tokens to be generated. Their number is the published one, or twice that of the answer's tokens if this
is larger. ruler_tasks.py defines the tasks and says how they differ from the published ones; every row's note repeats it (DEVIATIONS).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from attnzoo.evaluation.answers import LLAMA2_AT_4K, WRONG, common_beginning, effective_length, explain_zeros
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.perplexity import SPLIT
from attnzoo.evaluation.results import Row, mean_row
from attnzoo.evaluation.retrieval import is_text
from attnzoo.evaluation.ruler_tasks import DEPTHS, MULTIKEY, NEW_TOKENS, TASKS, ask, prompts, score

METRIC = "string_match"
# these come in addition to the differences of the texts that ruler_tasks.py lists
DEVIATIONS = (
    "not comparable with published RULER: at most 9 of its 13 tasks, fewer examples, validation text for essays, shorter word lists, no "
    "worked example in vt; lengths count this model's tokens, bytes for a byte tokenizer, and the room of the answer"
)
SILENT = "zero: nothing was written before the end of the text"


def ruler(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int],
    context: int | None = None,
    tasks: Sequence[str] | None = None,
    examples: int = 20,
    questions: int = 1,
    seed: int = 0,
    batch_tokens: int = 8192,
    effective_threshold: float = LLAMA2_AT_4K,
) -> Plan:
    """The mean share of answers found, by task and length, and the mean over the tasks.

    data: a data module; its `tokenizer` and `documents(split)` are used. tasks: some of TASKS, None for all. examples: the number of
    questions of each task at each length. questions: for the tasks of MULTIKEY, how many of these questions each text is asked, each about
    another key; published: 1. With several, a text is read once if the model reads in parts (see `Transformer.reads_in_parts`).
    batch_tokens: tokens that are read at once. effective_threshold: the share of answers above which a length counts as effective, by
    default RULER's own.
    """
    names = list(TASKS) if tasks is None else list(tasks)
    if unknown := set(names) - set(TASKS):
        raise ValueError(f"tasks: {', '.join(sorted(unknown))} is none of {', '.join(TASKS)}")
    if examples < 1 or not names:
        raise ValueError(f"examples={examples} must be at least 1, and tasks={names} must name at least one")
    if not 1 <= questions <= len(DEPTHS):
        raise ValueError(f"questions={questions} must lie between 1 and {len(DEPTHS)}")
    if data.objective != "lm":
        return refusal("ruler", "needs a causal language model that goes on from a question")
    if not is_text(data):
        return refusal("ruler", "needs a model of text, and the run's data are numbers")
    text = np.concatenate(list(data.documents(SPLIT)["input_ids"]))
    settings = {"examples": examples, "seed": seed, "batch_tokens": batch_tokens}
    measurements = [
        Measurement(
            f"ruler_{name}",
            partial(_measure, model, data.tokenizer, text, name, length, examples, asked, seed, batch_tokens),
            {**settings, "questions": asked},
            examples * length,
            length,
        )
        for length in sorted(lengths)
        for name in names
        for asked in [questions if name in MULTIKEY else 1]
    ]
    return Plan(measurements, partial(_conclude, names, effective_threshold))


@torch.inference_mode()
def _measure(
    model: torch.nn.Module,
    tokenizer,
    text: np.ndarray,
    name: str,
    length: int,
    examples: int,
    questions: int,
    seed: int,
    batch_tokens: int,
    advance: Callable[[int], None],
) -> list[Row]:
    device = next(model.parameters()).device
    of_text = [min(questions, examples - i) for i in range(0, examples, questions)]
    # every length has the same questions, at other places
    groups = [ask(name, np.random.default_rng((seed, TASKS.index(name), i)), n) for i, n in enumerate(of_text)]
    rngs = [np.random.default_rng((seed, TASKS.index(name), i, length)) for i in range(len(groups))]
    asked = [one for group in groups for one in group]
    n_new = max(NEW_TOKENS[name], *(2 * len(tokenizer.encode(one.answer)) for one in asked))
    made = [prompts(name, group, length, n_new, encode=tokenizer.encode, text=text, rng=rng)
            for group, rng in zip(groups, rngs, strict=True)]
    together = getattr(model, "reads_in_parts", False) and questions > 1
    rows = questions if together else max(1, batch_tokens // length)
    input_rows = [row for group in made for row in group]
    scores, texts = [], []
    for i in range(0, examples, rows):
        batch = input_rows[i : i + rows]
        input_ids = torch.from_numpy(np.stack(batch)).to(device)
        shared = {"shared": min(common_beginning(batch), len(batch[0]) - 1)} if together else {}
        written = model.generate(input_ids, n_new, temperature=0.0, **shared)[:, input_ids.shape[1] :].tolist()
        for one, ids in zip(asked[i : i + rows], written, strict=True):
            end = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
            texts.append(tokenizer.decode(ids[:end]))
            scores.append(score(one.references, texts[-1]))
        advance(input_ids.shape[0] * length)
    note = DEVIATIONS if questions == 1 else f"{DEVIATIONS}; each text is asked {questions} questions"
    row = mean_row(scores, task=f"ruler_{name}", length=length, metric=METRIC, note=note)
    return explain_zeros([row], WRONG if "".join(texts).strip() else SILENT)


def _conclude(names: Sequence[str], effective_threshold: float, rows: list[Row]) -> list[Row]:
    means = _mean_over_tasks(len(names), rows)
    (shown,) = [f"ruler_{name}" for name in names] if len(names) == 1 else ["ruler"]
    return means + effective_length(means or rows, shown, METRIC, effective_threshold)


def _mean_over_tasks(n_tasks: int, rows: list[Row]) -> list[Row]:
    """The mean over several tasks, for each length at which every task has a value."""
    means = []
    for length in sorted({row.length for row in rows if row.value is not None}):
        here = [row for row in rows if row.length == length and row.value is not None]
        if 1 < n_tasks == len(here):
            errors = [row.stderr for row in here]
            stderr = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / n_tasks
            value, count = sum(row.value for row in here) / n_tasks, sum(row.count for row in here)
            note = f"mean of {n_tasks} tasks; {DEVIATIONS}"
            means.append(Row(task="ruler", length=length, metric=METRIC, value=value, count=count, stderr=stderr, note=note))
    return means
