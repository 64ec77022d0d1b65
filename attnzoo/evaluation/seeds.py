"""Averages over runs that differ only in their seed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from attnzoo.evaluation.results import Row, frame

# keys of a run's configuration that do not change what is computed
PLACES = ("run_dir", "ckpt_path", "resume", "tags", "logger", "debug", "activation_checkpointing", "fused_loss")
# callbacks that only observe; any other may change what is trained, or which weights are kept
WATCHING = (
    "attnzoo.training.checkpointing.LastCheckpoint", "attnzoo.training.throughput.Throughput", "attnzoo.training.progress.StepProgress",
    "attnzoo.training.record.RunRecord", "attnzoo.training.plot.LossPlot", "attnzoo.training.sample.Sample",
)
GROUP = ["settings", "reading", "task", "length", "depth", "metric"]
FACTOR = 2.0  # if the values of the seeds differ by more than this factor, a note says so


def average(rows: Sequence[Row]) -> list[Row]:
    """The mean of each number over runs with equal `settings` and different seeds; empty if there are no such runs.

    The stderr of these rows is the standard deviation between the runs. A number that only one seed has is left out.
    """
    table = frame(row for row in rows if row.value is not None and row.settings and row.seed is not None)
    groups = table.groupby(GROUP, sort=False, dropna=False)
    return [_mean(group) for _, group in groups if group["seed"].nunique() > 1]


def shown(rows: Sequence[Row], averages: Sequence[Row]) -> list[Row]:
    """The rows that represent all runs in one plot: the averages, and the rows of the runs that are not part of an average."""
    averaged = {(row.settings, row.reading) for row in averages}
    return [*averages, *(row for row in rows if (row.settings, row.reading) not in averaged)]


def _mean(group: pd.DataFrame) -> Row:
    first, values = Row(**group.iloc[0]), group["value"].astype(float)
    data = first.data if group["data"].nunique() == 1 else f"{first.data.partition('@')[0]} of each seed"
    note = f"mean of {len(values)} runs"
    if (n_nan := int(values.isna().sum())):
        note += f", {n_nan} of which are NaN"
    elif values.max() > FACTOR * values.min() > 0:
        note += f" that differ by a factor of {values.max() / values.min():.3g}"
    mean, spread = float(values.mean(skipna=False)), float(values.std(skipna=False))
    return replace(first, run=first.settings, seed=None, data=data, value=mean, stderr=spread, count=len(values), note=note)


def name_settings(configs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """A name for each run's configuration: the variant, and the values of those keys, other than seeds, in which the runs differ.

    configs: plain dicts by run. A run without a configuration (None) gets the name "". Other runs get the same name only if their
    configurations are equal except for seeds, places (PLACES) and callbacks that only observe.
    """
    flat = {run: _leaves(config) for run, config in configs.items() if config is not None}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    unlike = [key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1 and not _is_implied(key, flat)]
    names = {}
    for run, values in flat.items():
        target = values.get("attention._target_")
        variant = target.split(".")[-2] if isinstance(target, str) and "." in target else ""
        said = [_said(key, values[key]) for key in unlike if key in values and key != "attention._target_"]
        names[run] = " ".join(filter(None, [variant, *said]))
    return {run: names.get(run, "") for run in configs}


def _said(key: str, value: Any) -> str:
    group, _, option = key.partition(".")
    if group == "callbacks" and option.endswith("._target_"):
        return f"with {option.removesuffix('._target_')}"
    return f"{key}={value}"


def _is_implied(key: str, flat: Mapping[str, Mapping]) -> bool:
    """Whether a key is an option of the variant or of a callback that has the same value in all runs with this variant or callback.

    Then the variant or callback, which is part of the name, already determines the value.
    """
    group, *names = key.split(".")
    target = {"attention": "attention._target_", "callbacks": f"callbacks.{names[0]}._target_"}.get(group) if names else None
    if target in (None, key):
        return False
    by_target: dict[Any, set] = {}
    for values in flat.values():
        by_target.setdefault(values.get(target), set()).add(repr(values.get(key)))
    return all(len(found) == 1 for found in by_target.values())


def _leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, without seeds, places, callbacks that only observe, and callbacks' paths below the run folder.

    Keys that only repeat others are left out too: model.attention, layers and trainer.default_root_dir.
    """
    callbacks = {
        name: {key: value for key, value in options.items() if not str(value).startswith(f"{config.get('run_dir')}/")}
        for name, options in (config.get("callbacks") or {}).items() if options and options.get("_target_") not in WATCHING
    }
    return _flat({**config, "callbacks": callbacks})


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if name == "seed" or key in PLACES or key in ("model.attention", "layers", "trainer.default_root_dir"):
            continue
        if isinstance(value, Mapping):
            leaves |= _flat(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves
