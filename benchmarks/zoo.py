"""The zoo's own results: what runs of experiment=extrapolation, recall_zoology and listops and their evaluations measured, in three
CSV files, two figures and the tables of README.md and docs/results.md.

    python -m benchmarks.zoo collect runs/zoo outputs/zoo_eval    # folders of runs (train.py) and of evaluations (eval.py)
    python -m benchmarks.zoo show                                 # from the CSV files alone
    python -m benchmarks.zoo show --name readings                 # one checkpoint in many ways: a table for each model, and a figure
    python -m benchmarks.zoo show --name lra                      # Long Range Arena

`collect` names each run after its attention, its positions and its tags behind the first one; folders of unlike names join the evaluations
to the runs. Runs of ListOps with tags=[listops_speed] say how fast, those without how well.
"""

import argparse
import csv
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from attnzoo.errors import UserError
from attnzoo.evaluation.results import with_new_names
from benchmarks.zoo_figures import draw, draw_costs, draw_readings
from benchmarks.zoo_tables import ARENA, COSTS, READINGS, SPEED, Table, arena, markdown, read, readings, tables

RESULTS = Path(__file__).parent / "results"
TRAINING = ("experiment", "variant", "seed", "parameters", "steps", "tokens", "tokens_per_second", "train_loss", "val_accuracy", "val_loss",
            "learning_rate", "context", "device", "torch", "triton", "commit")
EVALUATION = ("variant", "reading", "impl", "seed", "task", "length", "depth", "metric", "value", "count", "stderr", "note")
CURVES = ("experiment", "variant", "seed", "learning_rate", "length", "pairs", "step", "accuracy")
METRICS = {"loss", "longppl", "exact_match", "accuracy", "training_steps_per_second", *(metric for _, metric, _ in COSTS)}


def variant(record: dict) -> str:
    """What a run is called: its attention, with what is not the default, and its positions."""
    attention = record["attention"]
    name = attention["_target_"].split(".")[-2]
    if name == "differential":
        name += f" V{attention['version']}" + ("" if attention["norm"] else " without norm")
    if kind := attention.get("kind"):
        name += f" {kind}"
    if pattern := attention.get("pattern"):
        by_layer = pattern if isinstance(pattern, list) else [pattern]
        name += " " + " and ".join(one if isinstance(one, str) else one["name"] for one in by_layer)
    if record["model"].get("positions") == "alibi":
        name += " ALiBi"
    if record["model"].get("qk_norm"):
        name += " with QK-norm"
    if pattern := (record["model"].get("layers") or {}).get("pattern"):
        name += f" in layers {', '.join(dict.fromkeys(pattern))}"
    return name


def collect(folders: Sequence[str], into: Path, name: str = "zoo") -> None:
    """Writes <name>-training.csv, -evaluations.csv and, but for readings, -curves.csv from everything below these folders."""
    runs = dict.fromkeys(path.parent.resolve() for folder in folders for path in sorted(Path(folder).rglob("record.json")))
    runs = {folder: json.loads((folder / "record.json").read_text()) for folder in runs}
    names, training, curves = {}, [], []
    for folder, record in runs.items():
        config = OmegaConf.load(folder / "config.yaml")
        names[folder] = " ".join([variant(record), *config.tags[1:]])
        if not config.tags or not (folder / "metrics.csv").exists():  # without tags it is of no experiment
            continue
        metrics = read(folder / "metrics.csv")
        training.append(_training(names[folder], record, config, metrics))
        curves += [
            (config.tags[0], names[folder], config.seed, config.optimizer.lr, config.data.seq_len, config.data.get("n_pairs", ""),
             int(row["step"]) + 1, row["val/accuracy"])
            for row in metrics if row.get("val/accuracy") and config.tags[0] not in ("extrapolation", SPEED)
        ]
    rows, lost = {}, set()
    for path in sorted(path for folder in folders for path in Path(folder).rglob("results.csv")):
        found = [with_new_names(row) for row in read(path)]
        base = _base({row["run"] for row in found}, runs, path)
        for row in found:
            if row["value"] and row["metric"] in METRICS and _wanted(row, name):
                if base is None or (folder := base / row["run"]) not in runs:
                    lost.add(f"{row['run']} in {path}")
                    continue
                reading, impl = _reading(row["reading"], runs[folder]["attention"].get("impl"))
                kept = (names[folder], reading, impl, *(row[key] for key in EVALUATION[3:]))
                rows.setdefault((folder, *kept[:8]), kept)
    for missing in sorted(lost):
        print(f"left out, no run of that name is below these folders: {missing}", file=sys.stderr)
    into.mkdir(parents=True, exist_ok=True)
    _write(into / f"{name}-training.csv", TRAINING, training)
    if name != READINGS:
        _write(into / f"{name}-curves.csv", CURVES, curves)
    _write(into / f"{name}-evaluations.csv", EVALUATION, rows.values())


def _base(names: set[str], runs: Iterable[Path], path: Path) -> Path | None:
    """The folder that an evaluation names its runs from: that with the most of them below it."""
    held = Counter(base for folder in runs for name in names if (base := _above(folder, Path(name).parts)))
    best = [base for base, n in held.items() if n == max(held.values())]
    if len(best) > 1:
        raise UserError(f"{path} can be an evaluation of the runs in {best[0]} and of those in {best[1]}: give runs names of their own")
    return best[0] if best else None


def _above(folder: Path, parts: Sequence[str]) -> Path | None:
    return folder.parents[len(parts) - 1] if folder.parts[-len(parts) :] == parts else None


def _reading(line: str, trained: str | None) -> tuple[str, str]:
    """The reading beside the operator's path, and that path ("": the fastest that runs)."""
    before, found, impl = line.partition("attention.impl=")
    if not found:
        return line, trained or ""
    impl, _, rest = impl.partition(" ")
    return f"{before}{rest}".strip(), "" if impl == "None" else impl


def _wanted(row: dict, name: str) -> bool:
    """Depths of keys are averaged in rows of their own; of losses by position the longest windows' are kept, but for many readings."""
    return not row["depth"] or (row["task"] == "loss_by_position" and row["length"] == "32768" and name != READINGS)


def _training(name: str, record: dict, config, metrics: list[dict]) -> tuple:
    def last(key: str) -> str:
        return next((row[key] for row in reversed(metrics) if row.get(key)), "")

    rates = [float(row["perf/tokens_per_second"]) for row in metrics if row.get("perf/tokens_per_second")]
    losses = [float(row["train/loss"]) for row in metrics if row.get("train/loss")]
    steps = 1 + max((int(row["step"]) for row in metrics if row.get("step")), default=-1)
    step_tokens = config.get("batch_tokens") or config.data.batch_size * config.data.seq_len
    if "classes" in record.get("data", {}):  # sequences of unlike length, without padding
        split = record["data"]["splits"]["train"]
        step_tokens = config.data.batch_size * split["tokens"] / split["documents"]
    return (
        config.tags[0], name, config.seed, record["parameters"], steps, round(steps * step_tokens),
        round(statistics.median(rates)) if rates else "", round(statistics.mean(losses[-4:]), 5) if losses else "", last("val/accuracy"),
        last("val/loss"), config.optimizer.lr, config.data.seq_len, record["device"], record["versions"]["torch"],
        record["versions"].get("triton", ""), (record["git"] or {}).get("commit", "")[:12],
    )


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("collect", "show"))
    parser.add_argument("folders", nargs="*", help="of runs and evaluations, for collect")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--name", default="zoo",
                        help="what the files begin with; readings: checkpoints read in many ways; lra: Long Range Arena (zoo)")
    given = parser.parse_args(arguments)
    if (given.what == "collect") != bool(given.folders):
        parser.error("collect needs the folders of runs and evaluations, show takes none")
    if given.what == "collect":
        try:
            collect(given.folders, given.output, given.name)
        except UserError as error:
            parser.error(str(error))
    table = Table(given.output, given.name)
    if given.name == READINGS:
        for title, text in readings(table).items():
            print(f"\n{title}\n\n{text}")
        draw_readings(table, given.output / f"{given.name}.png")
        return
    if given.name == ARENA:
        print(arena(table))
        return
    print(markdown(table))
    for title, text in tables(table).items():
        print(f"\n{title}\n\n{text or 'not measured'}")
    draw(table, given.output / f"{given.name}.png")
    if table.lines("cost"):
        draw_costs(table, given.output / f"{given.name}-cost.png")


if __name__ == "__main__":
    main()
