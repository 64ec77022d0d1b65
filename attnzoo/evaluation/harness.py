"""Tasks of EleutherAI's lm-evaluation-harness on a checkpoint: `pip install -e '.[lm-eval]'`."""

import difflib
import glob
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnzoo.errors import UserError
from attnzoo.evaluation.answers import WRONG
from attnzoo.evaluation.measurement import Measurement, Plan, digest, refusal
from attnzoo.evaluation.results import Row

NOMINAL = 100  # examples assumed for the progress bar: the harness knows their number only when the task runs


def lm_eval(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int] = (),
    context: int,
    tasks: Sequence[str],
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    max_length: int | None = None,
    batch_tokens: int = 8192,
) -> Plan:
    """Every metric of every task, as the harness computes it.

    tasks: by the harness's names, or those of YAML files in include_path. num_fewshot: None for the task's own. limit: examples of each
    task, None for all. max_length: tokens read at once, None for the training context. lengths: not used.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"evaluation=lm_eval needs the lm-evaluation-harness ({error}): pip install -e '.[lm-eval]'") from error
    if data.objective != "lm":
        return refusal("lm_eval", "needs a causal language model")
    tasks = [tasks] if isinstance(tasks, str) else list(tasks)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks)) or "`lm_eval ls tasks` lists them"
            raise UserError(f"tasks: {name!r} is no task of the lm-evaluation-harness or of include_path={include_path}; {near}")
    if not tasks:
        raise UserError("tasks=[]: name at least one task of the lm-evaluation-harness")
    max_length = context if max_length is None else max_length
    settings = {"num_fewshot": num_fewshot, "limit": limit, "max_length": max_length, "batch_tokens": batch_tokens}
    settings |= {"include_path": include_path, "lm_eval": importlib.metadata.version("lm_eval")}
    return Plan([
        Measurement(
            f"lm_eval_{name}",
            partial(_measure, model, data.tokenizer, name, manager, num_fewshot, limit, max_length, batch_tokens),
            {**settings, "content": content(manager, name, include_path)},
            max_length * (limit if isinstance(limit, int) else NOMINAL),
            max_length,
        )
        for name in tasks
    ])


def content(manager: Any, name: str, include_path: str | None) -> str:
    """sha256 of the files that define a task: YAML and Python files in its folder and in include_path, and the local data that they
    name."""
    entry = manager.task_index[name]
    folders = [Path(path) for path in (include_path, entry.yaml_path and entry.yaml_path.parent) if path]
    files = {path.resolve() for folder in folders for path in folder.rglob("*") if path.suffix in (".yaml", ".py")}
    configs = [one.cfg or {} for one in manager.task_index.values() if one.yaml_path and one.yaml_path.resolve() in files]
    named = (text for config in configs for text in _texts([config.get("dataset_path"), config.get("dataset_kwargs")]))
    found = (Path(path).resolve() for text in named for path in glob.glob(text, recursive=True))
    files |= {path for place in found for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file()}
    return digest(*sorted(files))


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        yield from _texts(list(node.values()))
    elif isinstance(node, list | tuple):
        for one in node:
            yield from _texts(one)


def _measure(
    model: torch.nn.Module,
    tokenizer,
    name: str,
    manager: Any,
    num_fewshot: int | None,
    limit: int | float | None,
    max_length: int,
    batch_tokens: int,
    advance: Callable[[int], None],
) -> list[Row]:
    from lm_eval import simple_evaluate

    from attnzoo.evaluation.harness_model import HarnessModel

    adapter = HarnessModel(model, tokenizer, max_length=max_length, batch_tokens=batch_tokens)
    found = simple_evaluate(
        adapter, tasks=[name], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=1000
    )
    rows = []
    for task, results in found["results"].items():
        for label, value in results.items():
            metric, _, chosen_by = label.partition(",")
            if isinstance(value, int | float) and chosen_by and not metric.endswith("_stderr"):
                stderr = results.get(f"{metric}_stderr,{chosen_by}")
                rows.append(
                    Row(
                        task=f"lm_eval_{task}",
                        length=max_length,
                        metric=metric if chosen_by == "none" else f"{metric} ({chosen_by})",
                        value=float(value),
                        stderr=stderr if isinstance(stderr, float) else None,
                        count=found.get("n-samples", {}).get(task, {}).get("effective", 0),
                        note=adapter.limits() or (WRONG if value == 0 else ""),
                    )
                )
    return rows
