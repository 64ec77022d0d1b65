"""What benchmarks.zoo collected, as numbers by variant, task and length and as Markdown tables."""

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

SPEED = "listops_speed"  # runs that were timed in turn
ARENA = "lra"  # the name of the files of Long Range Arena
READINGS = "readings"  # the name of the files of checkpoints that were read in many ways
OMITTED = ("rope_factor=4", "rope_factor=32", "attention=sdpa", "local_size=128")  # in the figure and README.md, for room
SHOWN = {"passkey": "exact_match", "perplexity_windows": "loss"}
COSTS = (
    ("Seconds to read one sequence", "prefill_seconds", 4), ("GB of memory at most", "peak_memory_gb", 2),
    ("Tokens a second behind it", "decode_tokens_per_second", 0), ("Training, tokens a second", "training_tokens_per_second", 0),
    ("Training, GB of memory at most", "training_memory_gb", 1),
)  # fmt: skip


def read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Table:
    """The rows of <name>-evaluations.csv, -training.csv and -curves.csv."""

    def __init__(self, folder: Path, name: str = "zoo"):
        self.training = read(folder / f"{name}-training.csv")
        self.curves = [] if name == READINGS else read(folder / f"{name}-curves.csv")
        rows = read(folder / f"{name}-evaluations.csv")
        cell = ("variant", "reading", "impl", "seed", "task", "length")
        broken = {tuple(row[key] for key in cell) for row in rows if row["value"] == "nan"}  # then no other metric of it counts either
        # of two paths of an operator the named one is taken
        self.rows = sorted((row for row in rows if tuple(row[key] for key in cell) not in broken), key=lambda row: row["impl"])

    def lines(self, task: str = "perplexity_windows") -> list[tuple[str, str]]:
        """(variant, reading) of everything that this was measured of."""
        found = dict.fromkeys((row["variant"], row["reading"]) for row in self.rows if row["task"] == task)
        names = list(dict.fromkeys(row["variant"] for row in self.training + self.rows))
        return sorted(found, key=lambda line: (names.index(line[0]), line[1] != ""))

    def values(self, line: tuple[str, str], task: str, length: int | None = None, metric: str = "", depth: str = "") -> list[float]:
        """Of each seed, over the operator's paths that gave a number."""
        return [float(row["value"]) for row in self._of_seeds(line, task, length, metric, depth)]

    def _of_seeds(self, line: tuple[str, str], task: str, length: int | None, metric: str, depth: str = "") -> list[dict]:
        metric = metric or SHOWN.get(task, "exact_match" if task.startswith("needle") else "loss")
        found = {
            row["seed"]: row for row in self.rows
            if (row["variant"], row["reading"]) == line and (row["task"], row["metric"], row["depth"]) == (task, metric, depth)
            and (length is None or row["length"] == str(length))
        }
        return list(found.values())

    def answered(self, line: tuple[str, str], task: str, length: int | None = None) -> str:
        """Questions answered of those asked, over all seeds, and of each seed where they differ: 80 of 100 (50, 30)."""
        rows = self._of_seeds(line, task, length, "")
        asked, right = [int(row["count"]) for row in rows], [round(float(row["value"]) * int(row["count"])) for row in rows]
        each = f" ({', '.join(map(str, right))})" if len(set(right)) > 1 else ""
        return f"{sum(right)} of {sum(asked)}{each}" if rows else ""

    def lengths(self, line: tuple[str, str], task: str) -> list[int]:
        return sorted({int(row["length"]) for row in self.rows if (row["variant"], row["reading"], row["task"]) == (*line, task)})

    def runs(self, name: str, experiment: str = "extrapolation") -> list[dict]:
        return [row for row in self.training if (row["variant"], row["experiment"]) == (name, experiment)]

    def rate(self, name: str, experiment: str = "extrapolation") -> float | None:
        """Training tokens a second, the fastest run's: others shared their GPU."""
        return max((float(row["tokens_per_second"]) for row in self.runs(name, experiment) if row["tokens_per_second"]), default=None)


def label(line: tuple[str, str]) -> str:
    """For people: flash, read with dual_chunk."""
    name, reading = line
    return name + (f", read with {_short(reading)}" if reading else "")


def reading_label(line: tuple[str, str]) -> str:
    """Where the model is named elsewhere."""
    return _short(line[1]) or "as trained"


def _short(reading: str) -> str:
    return reading.replace("attention=", "").replace("attention.", "").replace("model.", "").replace("'", "")


def markdown(table: Table, lengths: Sequence[int] = (1024, 4096, 32768)) -> str:
    """A line a variant and reading: losses by length, passkeys, six keys, rates and (where measured) reading; means over seeds."""
    head = ["variant", "seeds", *(f"loss at {n}" for n in lengths), *(f"passkey at {n}" for n in (1024, 2048))]
    head += ["one of 6 keys", "training tokens/s"]
    longest = max((n for line in table.lines("cost") for n in table.lengths(line, "cost")), default=None)
    if longest:
        head += [f"s to read {longest}", "GB"]
    parts = []
    for line in table.lines():
        if line[1].endswith(OMITTED):
            continue
        rate = None if line[1] else table.rate(line[0])
        cells = [_cell(table.values(line, "perplexity_windows", n), 3) for n in lengths]
        cells += [table.answered(line, "passkey", n) for n in (1024, 2048)]
        cells += [table.answered(line, "needle_6_keys", 1024), "" if rate is None else f"{rate / 1e6:.2f} M"]
        if longest:
            cells += [_cell(table.values(line, "cost", longest, metric), 2) for metric in ("prefill_seconds", "peak_memory_gb")]
        parts.append([label(line), str(len(table.values(line, "perplexity_windows", lengths[0]))), *cells])
    return _grid(head, parts)


def tables(table: Table) -> dict[str, str]:
    """The tables of docs/results.md by their titles."""
    made = {
        **_by_length(table, "Loss by context length", "perplexity_windows", 3),
        **_by_length(table, "LongPPL by context length", "longppl_windows", 3, "longppl"),
        **_by_length(table, "Passkeys found, by context length", "passkey"),
        **_by_length(table, "One key of four found, by context length", "needle_4_keys"),
        **_by_position(table, "Loss by position, in windows of 32768"),
        "Losses and keys within the training context": _within(table),
        "ListOps": _listops(table),
        "Associative recall": _recall(table),
    }
    for title, metric, digits in COSTS:
        made |= _by_length(table, title, "cost", digits, metric)
    return made


def readings(table: Table, lengths: Sequence[int] = (1024, 4096, 32768)) -> dict[str, str]:
    """A line for each model or reading: losses, LongPPL, keys found in percent, milliseconds; means over seeds."""
    head = ["seeds", *(f"loss at {n}" for n in lengths), *(f"LongPPL at {n}" for n in lengths[1:]),
            *(f"{name}, {n}" for name in ("passkeys", "one key of four") for n in lengths), f"ms for {lengths[-1]}"]

    def cells(line: tuple[str, str]) -> list[str]:
        milliseconds = [1e3 * value for value in table.values(line, "cost", lengths[-1], "prefill_seconds")]
        return [str(len(table.values(line, "perplexity_windows", lengths[-1]))),
                *(_cell(table.values(line, "perplexity_windows", n), 3) for n in lengths),
                *(_cell(table.values(line, "longppl_windows", n, "longppl"), 2) for n in lengths[1:]),
                *(_share(table.values(line, task, n)) for task in ("passkey", "needle_4_keys") for n in lengths),
                f"{statistics.mean(milliseconds):.0f}" if milliseconds else ""]

    return _trained_and_read("Trained", head, table.lines(), cells)


def _trained_and_read(title: str, head: Sequence[str], lines: Sequence[tuple[str, str]],
                      cells: Callable[[tuple[str, str]], list[str]]) -> dict[str, str]:
    """A table of the models as they were trained, and one of checkpoints that were read otherwise, below themselves as trained."""
    made = {title: _grid(["", *head], ([line[0], *cells(line)] for line in lines if not line[1]))}
    for name in dict.fromkeys(line[0] for line in lines if line[1]):
        read_otherwise = ([reading_label(line), *cells(line)] for line in lines if line[0] == name)
        made[f"{title}; the checkpoints of {name}, read otherwise"] = _grid(["", *head], read_otherwise)
    return made


def _by_length(table: Table, title: str, task: str, digits: int | None = None, metric: str = "") -> dict[str, str]:
    """Without digits: questions answered."""
    def cell(line: tuple[str, str], n: int) -> str:
        return table.answered(line, task, n) if digits is None else _cell(table.values(line, task, n, metric), digits)

    lines = [line for line in table.lines(task) if table.values(line, task, metric=metric)]
    lengths = sorted({n for line in lines for n in table.lengths(line, task) if table.values(line, task, n, metric)})
    return _trained_and_read(title, [str(n) for n in lengths], lines, lambda line: [cell(line, n) for n in lengths])


def _by_position(table: Table, title: str, ends: Sequence[int] = (256, 1024, 1280, 1536, 2048, 4096, 8192, 16384, 32768)) -> dict[str, str]:
    """Groups of positions by their last one; one begins behind the group before it in the CSV file, not in the table."""
    lines = [line for line in table.lines("loss_by_position") if not line[1].endswith(OMITTED)]
    return _trained_and_read(title, [f"up to {end}" for end in ends], lines, lambda line: [
        _cell(table.values(line, "loss_by_position", 32768, depth=str(end)), 3) for end in ends])


def _within(table: Table) -> str:
    tasks = {"all": "all_tokens", "repeated": "repeated_tokens", "others": "other_tokens"}
    keys = {"1 key": "needle", "2 keys": "needle_2_keys", "4 keys": "needle_4_keys", "6 keys": "needle_6_keys"}
    parts = []
    for line in table.lines("all_tokens"):
        losses = [float(row["train_loss"]) for row in table.runs(line[0])]
        cells = [_cell(table.values(line, task), 4) for task in tasks.values()]
        cells += [table.answered(line, task, 1024) for task in keys.values()]
        parts.append([label(line), *cells, _cell(losses, 4), str(len(losses))])
    return _grid(["", *tasks, *keys, "last train loss", "seeds"], parts)


def _listops(table: Table) -> str:
    """Accuracies of the long runs; speed of those that were timed in turn, if there are any, else of the long ones."""
    timed = SPEED if any(row["experiment"] == SPEED for row in table.training) else "listops"
    parts = []
    for name in dict.fromkeys(row["variant"] for row in table.training if row["experiment"] in ("listops", SPEED)):
        runs, speeds = table.runs(name, "listops"), [run for run in table.runs(name, timed) if run["tokens_per_second"]]
        best = [max(float(row["accuracy"]) for row in table.curves if _is_of(row, run)) for run in runs]
        test = table.values((name, ""), "classification", metric="accuracy")
        rates = [float(run["tokens_per_second"]) for run in speeds]
        steps = [rate * int(run["steps"]) / int(run["tokens"]) for rate, run in zip(rates, speeds, strict=True)]
        rate = _cell([rate / 1e6 for rate in rates], 2) + " M" if rates else ""
        parts.append([name, runs[0]["steps"] if runs else "", _percent(test), _percent(best), str(len(runs)), rate, _cell(steps, 1)])
    return _grid(["", "steps", "test accuracy", "best on validation", "seeds", "tokens/s", "steps/s"], parts)


def arena(table: Table) -> str:
    """Long Range Arena, a line for each variant and task: accuracies, and what a step of training costs."""
    parts = []
    for name in dict.fromkeys(row["variant"] for row in table.training if row["experiment"] == ARENA):
        runs, of_test = table.runs(name, ARENA), [(name, ""), "classification", None]
        best = [max(float(row["accuracy"]) for row in table.curves if _is_of(row, run)) for run in runs]
        parts.append([name, ", ".join(dict.fromkeys(run["steps"] for run in runs)), _percent(table.values(*of_test, "accuracy")),
                      _percent(best), str(len(runs)), _cell(table.values(*of_test, "training_steps_per_second"), 1),
                      _cell(table.values(*of_test, "training_memory_gb"), 1)])
    return _grid(["", "steps", "test accuracy", "best on validation", "seeds", "steps/s", "GB"], parts)


def _is_of(row: dict, run: dict) -> bool:
    return all(row[key] == run[key] for key in ("experiment", "variant", "seed", "learning_rate"))


def _recall(table: Table) -> str:
    """Accuracy at the end, and the first validation above 99 %."""
    curves = [row for row in table.curves if row["experiment"] == "recall_zoology"]
    sizes = sorted({(int(row["length"]), int(row["pairs"])) for row in curves})
    parts = []
    for run in sorted({(row["variant"], row["seed"], row["learning_rate"]) for row in curves}):
        cells = []
        for length, pairs in sizes:
            here = [row for row in curves if (row["variant"], row["seed"], row["learning_rate"], row["length"]) == (*run, str(length))
                    and row["pairs"] == str(pairs)]
            first = next((f" ({row['step']})" for row in here if float(row["accuracy"]) > 0.99), "")
            cells.append(f"{100 * float(here[-1]['accuracy']):.1f} % of {here[-1]['step']}{first}" if here else "")
        parts.append([*run, *cells])
    return _grid(["", "seed", "learning rate", *(f"{length}, {pairs} pairs" for length, pairs in sizes)], parts)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]) if rows else ""


def _percent(values: Sequence[float]) -> str:
    return _cell([100 * value for value in values], 1) + " %" if values else ""


def _share(values: Sequence[float]) -> str:
    """Mean in percent, and the least and the greatest of several seeds."""
    if not values:
        return ""
    least, greatest = (round(100 * value) for value in (min(values), max(values)))
    return f"{100 * statistics.mean(values):.0f} %" + (f" ({least} to {greatest})" if least < greatest else "")


def _cell(values: Sequence[float], digits: int) -> str:
    """Mean, and half of the range of several seeds."""
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
