"""The zoo's own results: what runs of experiment=extrapolation, recall_zoology and listops and their evaluations measured, in three
CSV files, two figures and the tables of README.md and docs/results.md.

    python -m benchmarks.zoo collect runs/zoo outputs/zoo_eval    # folders of runs (train.py) and of evaluations (eval.py)
    python -m benchmarks.zoo show                                 # from the CSV files alone

`collect` names each run after its attention and positions; the folder's name, which must differ, joins the evaluations to it. Runs of
ListOps with tags=[listops_speed] say how fast, those without how well.
"""

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from omegaconf import OmegaConf

from attnzoo.errors import UserError
from attnzoo.evaluation.plots import COLOURS, LINES, MARKERS

RESULTS = Path(__file__).parent / "results"
TRAINING = ("experiment", "variant", "seed", "parameters", "steps", "tokens", "tokens_per_second", "train_loss", "val_accuracy", "val_loss",
            "learning_rate", "context", "device", "torch", "triton", "commit")
EVALUATION = ("variant", "reading", "impl", "seed", "task", "length", "depth", "metric", "value", "count", "stderr", "note")
CURVES = ("experiment", "variant", "seed", "learning_rate", "length", "pairs", "step", "accuracy")
SPEED = "listops_speed"
OMITTED = ("rope_factor=4", "rope_factor=32", "attention=sdpa", "local_size=128")  # in the figure and README.md, for room
SHOWN = {"passkey": "exact_match", "perplexity_windows": "loss"}
COSTS = (
    ("Seconds to read one sequence", "prefill_seconds", 4), ("GB of memory at most", "peak_memory_gb", 2),
    ("Tokens a second behind it", "decode_tokens_per_second", 0), ("Training, tokens a second", "training_tokens_per_second", 0),
    ("Training, GB of memory at most", "training_memory_gb", 1),
)  # fmt: skip
METRICS = {"loss", "exact_match", "accuracy", *(metric for _, metric, _ in COSTS)}


def variant(record: dict) -> str:
    """What a run is called: its attention, with what is not the default, and its positions."""
    attention = record["attention"]
    name = attention["_target_"].split(".")[-2]
    if name == "differential":
        name += f" V{attention['version']}" + ("" if attention["norm"] else " without norm")
    if record["model"].get("positions") == "alibi":
        name += " ALiBi"
    return name


def collect(folders: Sequence[str], into: Path) -> None:
    """Writes zoo-training.csv, zoo-curves.csv and zoo-evaluations.csv from everything below these folders."""
    runs = {}
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("record.json"))):
        if runs.setdefault(path.parent.name, path.parent).resolve() != path.parent.resolve():
            raise UserError(f"{runs[path.parent.name]} and {path.parent} have the same name; evaluations are joined by it: rename one")
    records = {name: json.loads((folder / "record.json").read_text()) for name, folder in runs.items()}
    training, curves = [], []
    for name, folder in runs.items():
        if not (folder / "metrics.csv").exists():
            continue
        config, metrics = OmegaConf.load(folder / "config.yaml"), _read(folder / "metrics.csv")
        training.append(_training(records[name], config, metrics))
        curves += [
            (config.tags[0], variant(records[name]), config.seed, config.optimizer.lr, config.data.seq_len, config.data.get("n_pairs", ""),
             int(row["step"]) + 1, row["val/accuracy"])
            for row in metrics if row.get("val/accuracy") and config.tags[0] not in ("extrapolation", SPEED)
        ]
    rows = {}
    for path in sorted(path for folder in folders for path in Path(folder).rglob("results.csv")):
        for row in _read(path):
            if row["value"] and row["metric"] in METRICS and _wanted(row) and row["run"] in records:
                record = records[row["run"]]
                reading, impl = _reading(row["overrides"], record["attention"].get("impl"))
                kept = (variant(record), reading, impl, *(row[key] for key in EVALUATION[3:]))
                rows.setdefault((row["run"], *kept[:8]), kept)
    _write(into / "zoo-training.csv", TRAINING, training)
    _write(into / "zoo-curves.csv", CURVES, curves)
    _write(into / "zoo-evaluations.csv", EVALUATION, rows.values())


def _reading(overrides: str, trained: str | None) -> tuple[str, str]:
    """What was overridden beside the operator's path, and that path ("": the fastest that runs)."""
    before, found, impl = overrides.partition("attention.impl=")
    if not found:
        return overrides, trained or ""
    impl, _, rest = impl.partition(" ")
    return f"{before}{rest}".strip(), "" if impl == "None" else impl


def _wanted(row: dict) -> bool:
    """Depths of keys are averaged in rows of their own; of losses by position the longest windows' are kept."""
    return not row["depth"] or (row["task"] == "loss_by_position" and row["length"] == "32768")


def _training(record: dict, config, metrics: list[dict]) -> tuple:
    def last(key: str) -> str:
        return next((row[key] for row in reversed(metrics) if row.get(key)), "")

    rates = [float(row["perf/tokens_per_second"]) for row in metrics if row.get("perf/tokens_per_second")]
    losses = [float(row["train/loss"]) for row in metrics if row.get("train/loss")]
    steps = 1 + max((int(row["step"]) for row in metrics if row.get("step")), default=-1)
    step_tokens = config.data.batch_size * config.data.seq_len
    if "classes" in record.get("data", {}):  # sequences of unlike length, without padding
        split = record["data"]["splits"]["train"]
        step_tokens = config.data.batch_size * split["tokens"] / split["documents"]
    return (
        config.tags[0], variant(record), config.seed, record["parameters"], steps, round(steps * step_tokens),
        round(statistics.median(rates)) if rates else "", round(statistics.mean(losses[-4:]), 5) if losses else "", last("val/accuracy"),
        last("val/loss"), config.optimizer.lr, config.data.seq_len, record["device"], record["versions"]["torch"],
        record["versions"].get("triton", ""), (record["git"] or {}).get("commit", "")[:12],
    )


def _read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


class Table:
    """The rows of zoo-evaluations.csv, zoo-training.csv and zoo-curves.csv."""

    def __init__(self, folder: Path):
        self.training, self.curves = _read(folder / "zoo-training.csv"), _read(folder / "zoo-curves.csv")
        rows = _read(folder / "zoo-evaluations.csv")
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
        metric = metric or SHOWN.get(task, "exact_match" if task.startswith("needle") else "loss")
        found = {
            row["seed"]: float(row["value"]) for row in self.rows
            if (row["variant"], row["reading"]) == line and (row["task"], row["metric"], row["depth"]) == (task, metric, depth)
            and (length is None or row["length"] == str(length))
        }
        return list(found.values())

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
    short = reading.replace("attention=", "").replace("attention.", "").replace("model.", "").replace("'", "")
    return name + (f", read with {short}" if reading else "")


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
        cells += [_cell(table.values(line, "passkey", n), 2) for n in (1024, 2048)]
        cells += [_cell(table.values(line, "needle_6_keys", 1024), 3), "" if rate is None else f"{rate / 1e6:.2f} M"]
        if longest:
            cells += [_cell(table.values(line, "cost", longest, metric), 2) for metric in ("prefill_seconds", "peak_memory_gb")]
        parts.append([label(line), str(len(table.values(line, "perplexity_windows", lengths[0]))), *cells])
    return _grid(head, parts)


def tables(table: Table) -> dict[str, str]:
    """The tables of docs/results.md by their titles."""
    made = {
        "Loss by context length": _by_length(table, "perplexity_windows", 3),
        "Passkeys found, by context length": _by_length(table, "passkey", 2),
        "Loss by position, in windows of 32768": _by_position(table),
        "Losses and keys within the training context": _within(table),
        "ListOps": _listops(table),
        "Associative recall": _recall(table),
    }
    for title, metric, digits in COSTS:
        made[title] = _by_length(table, "cost", digits, metric)
    return made


def _by_length(table: Table, task: str, digits: int, metric: str = "") -> str:
    lines = [line for line in table.lines(task) if table.values(line, task, metric=metric)]
    lengths = sorted({n for line in lines for n in table.lengths(line, task) if table.values(line, task, n, metric)})
    cells = ([label(line), *(_cell(table.values(line, task, n, metric), digits) for n in lengths)] for line in lines)
    return _grid(["", *map(str, lengths)], cells)


def _by_position(table: Table, ends: Sequence[int] = (256, 1024, 1280, 1536, 2048, 4096, 8192, 16384, 32768)) -> str:
    """Groups of positions by their last one; one begins behind the group before it in the CSV file, not in the table."""
    lines = [line for line in table.lines("loss_by_position") if not line[1].endswith(OMITTED)]
    cells = ([label(line), *(_cell(table.values(line, "loss_by_position", 32768, depth=str(end)), 3) for end in ends)] for line in lines)
    return _grid(["up to", *map(str, ends)], cells)


def _within(table: Table) -> str:
    tasks = {"all": "all_tokens", "repeated": "repeated_tokens", "others": "other_tokens"}
    keys = {"1 key": "needle", "2 keys": "needle_2_keys", "4 keys": "needle_4_keys", "6 keys": "needle_6_keys"}
    parts = []
    for line in table.lines("all_tokens"):
        losses = [float(row["train_loss"]) for row in table.runs(line[0])]
        cells = [_cell(table.values(line, task), 4) for task in tasks.values()]
        cells += [_cell(table.values(line, task), 3) for task in keys.values()]
        parts.append([label(line), *cells, _cell(losses, 4), str(len(losses))])
    return _grid(["", *tasks, *keys, "last train loss", "seeds"], parts)


def _listops(table: Table) -> str:
    """Accuracies of the long runs; speed of those that were timed in turn, if there are any, else of the long ones."""
    timed = SPEED if any(row["experiment"] == SPEED for row in table.training) else "listops"
    parts = []
    for name in dict.fromkeys(row["variant"] for row in table.training if row["experiment"] in ("listops", SPEED)):
        runs, speeds = table.runs(name, "listops"), table.runs(name, timed)
        best = [max(float(row["accuracy"]) for row in table.curves if _is_of(row, run)) for run in runs]
        test = table.values((name, ""), "classification", metric="accuracy")
        rates = [float(run["tokens_per_second"]) for run in speeds]
        steps = [rate * int(run["steps"]) / int(run["tokens"]) for rate, run in zip(rates, speeds, strict=True)]
        rate = _cell([rate / 1e6 for rate in rates], 2) + " M" if rates else ""
        parts.append([name, runs[0]["steps"] if runs else "", _percent(test), _percent(best), str(len(runs)), rate, _cell(steps, 1)])
    return _grid(["", "steps", "test accuracy", "best on validation", "seeds", "tokens/s", "steps/s"], parts)


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


def _cell(values: Sequence[float], digits: int) -> str:
    """Mean, and half of the range of several seeds."""
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def draw(table: Table, path: Path) -> None:
    """Loss and passkeys by length, loss against the speed of training and (where measured) of reading. Read in grey, too."""
    lines = _drawn(table)
    has_cost = bool(table.lines("cost"))
    figure = Figure(figsize=(12, 9.5) if has_cost else (14, 5.5), layout="constrained")
    panels = figure.subplots(2, 2).flatten() if has_cost else figure.subplots(1, 3)
    for panel, task in zip(panels, ("perplexity_windows", "passkey"), strict=False):
        _curves(panel, table, lines, task)
    panels[0].set(yscale="log", ylabel="loss (nats per byte), the same 400 k bytes", title="loss by length")
    panels[1].set(ylim=(-0.05, 1.05), ylabel="exact match", title="passkey")
    trained = {line: rate / 1e6 for line in lines if not line[1] and (rate := table.rate(line[0]))}
    _points(panels[2], table, lines, trained, 1024)
    panels[2].set(xlabel="training, million tokens a second (H200)", ylabel="loss at 1024 (nats per byte)", title="quality and training")
    if has_cost:
        read = {line: 1e3 * statistics.mean(found) for line in lines if (found := table.values(line, "cost", 32768, "prefill_seconds"))}
        panels[3].set(yscale="log", xlabel="milliseconds to read 32768 bytes (H200)", ylabel="loss at 32768 (nats per byte)")
        _points(panels[3], table, lines, read, 32768)
        panels[3].set_title("quality and reading")
    _finish(figure, panels, path)


def draw_costs(table: Table, path: Path) -> None:
    """What a length costs, a panel for each thing that was measured."""
    wanted = {"prefill_seconds": "seconds to read one sequence", "peak_memory_gb": "GB of memory at most, reading it",
              "training_tokens_per_second": "tokens a second in training (not compiled)"}  # fmt: skip
    titles = {metric: title for metric, title in wanted.items() if any(table.values(line, "cost", metric=metric) for line in _drawn(table))}
    figure = Figure(figsize=(5 * len(titles), 5.5), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, (metric, title) in zip(panels, titles.items(), strict=True):
        _curves(panel, table, _drawn(table), "cost", metric)
        panel.set(yscale="log", title=title)
    _finish(figure, panels, path)


def _finish(figure: Figure, panels, path: Path) -> None:
    for panel in panels:
        panel.grid(alpha=0.3)
        if panel.get_yscale() == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)


def _drawn(table: Table) -> list[tuple[str, str]]:
    """In this order in every figure, so that a line looks the same in all."""
    return [line for line in dict.fromkeys(table.lines() + table.lines("cost")) if not line[1].endswith(OMITTED)]


def _style(lines: Sequence[tuple[str, str]], line: tuple[str, str]) -> dict:
    i = lines.index(line)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)]}


def _curves(panel, table: Table, lines: Sequence[tuple[str, str]], task: str, metric: str = "") -> None:
    for line in lines:
        if at := [n for n in table.lengths(line, task) if table.values(line, task, n, metric)]:
            means = [statistics.mean(table.values(line, task, n, metric)) for n in at]
            panel.plot(at, means, markersize=5, label=label(line), **_style(lines, line))
    panel.axvline(1024, color="0.4", linestyle=":", linewidth=1)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel("context length (bytes); trained at 1024")


def _points(panel, table: Table, lines: Sequence[tuple[str, str]], places: Mapping[tuple[str, str], float], length: int) -> None:
    """Losses at a length, each seed's, over these places on the x axis. Names stand above, or below where a neighbour is close above."""
    points = [(line, place, losses) for line, place in places.items() if (losses := table.values(line, "perplexity_windows", length))]
    for line, place, losses in points:
        panel.plot([place] * len(losses), losses, markersize=8, **{**_style(lines, line), "linestyle": ""})
    panel.margins(0.2, 0.15)
    panel.autoscale_view()
    to_axes = panel.transData + panel.transAxes.inverted()
    middles = [to_axes.transform((place, statistics.mean(losses))) for _, place, losses in points]
    for (line, place, losses), (x, y) in zip(points, middles, strict=True):
        is_below = any(abs(x - other_x) < 0.2 and 0 < other_y - y < 0.1 for other_x, other_y in middles)
        end, offset, side = (min(losses), -8, "top") if is_below else (max(losses), 8, "bottom")
        text = label(line).replace("flash, read with ", "")
        panel.annotate(text, (place, end), textcoords="offset points", xytext=(0, offset), fontsize=8, ha="center", va=side)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("collect", "show"))
    parser.add_argument("folders", nargs="*", help="of runs and evaluations, for collect")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if (given.what == "collect") != bool(given.folders):
        parser.error("collect needs the folders of runs and evaluations, show takes none")
    if given.what == "collect":
        collect(given.folders, given.output)
    table = Table(given.output)
    print(markdown(table))
    for title, text in tables(table).items():
        print(f"\n{title}\n\n{text or 'not measured'}")
    draw(table, given.output / "zoo.png")
    if table.lines("cost"):
        draw_costs(table, given.output / "zoo-cost.png")


if __name__ == "__main__":
    main()
