"""Averages over runs that differ in nothing but their seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnzoo.evaluation.results import Row

# of a run's configuration, what does not change what is computed
PLACES = ("run_dir", "ckpt_path", "resume", "tags", "logger", "callbacks", "debug")


def average(rows: Sequence[Row]) -> list[Row]:
    """For every group of runs with unlike seeds and equal `settings`, each number's mean over the seeds; empty without such groups.

    stderr of these rows is the standard deviation between the seeds. A number that only one seed has is left out.
    """
    seeds: dict[tuple[str, str], set] = {}
    for row in rows:
        if row.settings and row.seed is not None:
            seeds.setdefault((row.settings, row.reading), set()).add(row.seed)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.value is not None and len(seeds.get((row.settings, row.reading), ())) > 1:
            groups.setdefault((row.settings, row.reading, row.task, row.length, row.depth, row.metric), []).append(row)
    return [_mean(found) for found in groups.values() if len({row.seed for row in found}) > 1]


def shown(rows: Sequence[Row], averages: Sequence[Row]) -> list[Row]:
    """What stands for all runs in one plot: the averages, and the rows of the runs that are in none."""
    averaged = {(row.settings, row.reading) for row in averages}
    return [*averages, *(row for row in rows if (row.settings, row.reading) not in averaged)]


def _mean(rows: Sequence[Row]) -> Row:
    values = [row.value for row in rows]
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else None
    note = f"mean of {len(values)} runs"
    data = rows[0].data if len({row.data for row in rows}) == 1 else f"{rows[0].data.partition('@')[0]} of each seed"
    return replace(rows[0], run=rows[0].settings, seed=None, data=data, value=mean, stderr=spread, count=len(values), note=note)


def name_settings(configs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """What each run's configuration is called beside the others': the variant, and the keys in which the runs differ other than by seed.

    configs: plain dicts by run, None for a run without one, which gets "". Runs get the same name only if their configurations are equal.
    """
    flat = {run: _flat(config) for run, config in configs.items() if config is not None}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    unlike = [key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1]
    names = {}
    for run, values in flat.items():
        target = values.get("attention._target_")
        variant = target.split(".")[-2] if isinstance(target, str) and "." in target else ""
        said = [f"{key}={values[key]}" for key in unlike if key in values and key != "attention._target_" and not _of_variant(key, flat)]
        names[run] = " ".join(filter(None, [variant, *said]))
    return {run: names.get(run, "") for run in configs}


def _of_variant(key: str, flat: Mapping[str, Mapping]) -> bool:
    """Whether it is an option of one variant whose runs all agree in it: its name says as much."""
    if not key.startswith("attention."):
        return False
    by_variant: dict[Any, set] = {}
    for values in flat.values():
        by_variant.setdefault(values.get("attention._target_"), set()).add(repr(values.get(key)))
    return all(len(found) == 1 for found in by_variant.values())


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key, without seeds, places, and the attention that the model repeats."""
    leaves = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if name == "seed" or key in PLACES or key in ("model.attention", "trainer.default_root_dir"):
            continue
        if isinstance(value, Mapping):
            leaves |= _flat(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves
