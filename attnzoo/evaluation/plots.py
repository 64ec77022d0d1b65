"""Plots of a results table. Colour (Okabe and Ito), marker and line change together, so that grey and colour-blind eyes tell runs apart."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from attnzoo.evaluation.results import Row, comparable_metric

# numbers without a common divisor: 280 runs before a style repeats
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

TITLES = {
    "perplexity_windows": "non-overlapping windows",
    "perplexity_sliding": "sliding windows",
    "perplexity_documents": "whole documents, by their size",
    "loss_by_position": "loss by position in the longest windows",
}
UNITS = {"loss": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}


def draw(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draws what the rows hold as PNG files in folder and returns their paths."""
    rows = [row for row in rows if row.value is not None]
    metric = comparable_metric(rows)
    drawn = []
    if chosen := [row for row in rows if row.task == "validation" and row.metric == metric]:
        drawn.append(_validation(chosen, folder / "validation.png"))
    if chosen := [row for row in rows if row.task.startswith("perplexity_") and row.metric == metric]:
        drawn.append(_curves(chosen, "length", "context length (tokens)", folder / "perplexity_by_length.png"))
    if chosen := [row for row in rows if row.task == "loss_by_position"]:
        drawn.append(_curves(chosen, "depth", "tokens of context", folder / "loss_by_position.png"))
    return drawn


def _curves(rows: Sequence[Row], x: str, xlabel: str, path: Path) -> Path:
    """One panel a task, one line a run with bars of one standard error, dotted vertical lines at the training contexts."""
    from matplotlib.ticker import LogFormatter

    tasks, labels = list(dict.fromkeys(row.task for row in rows)), _labels(rows)
    figure = _figure(5 * len(tasks), 3.8 + 0.2 * len(labels))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        for i, (run, label) in enumerate(labels.items()):
            line = sorted((row for row in rows if row.task == task and row.run == run), key=lambda row: getattr(row, x))
            panel.errorbar(
                [getattr(row, x) for row in line],
                [row.value for row in line],
                [row.stderr or 0 for row in line],
                label=label,
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle=LINES[i % len(LINES)],
                markersize=5,
                capsize=2,
            )
        for context in {row.context for row in rows if row.context is not None}:
            panel.axvline(context, color="0.4", linestyle=":", linewidth=1, label="_training context")
        panel.set(title=TITLES.get(task, task), xlabel=xlabel)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(UNITS[rows[0].metric])
    values = [row.value for row in rows]
    if max(values) > 3 * min(values) > 0:  # a run that breaks would flatten all others
        panels[0].set_yscale("log")
        for set_formatter in (panels[0].yaxis.set_major_formatter, panels[0].yaxis.set_minor_formatter):
            set_formatter(LogFormatter(minor_thresholds=(2, 0.5)))  # 20 and not 2 x 10^1
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return _save(figure, path)


def _validation(rows: Sequence[Row], path: Path) -> Path:
    """The runs below each other, each with a bar of one standard error."""
    labels = _labels(rows)
    figure = _figure(6, 1.2 + 0.35 * len(rows))
    panel = figure.subplots()
    for i, row in enumerate(rows):
        panel.errorbar(row.value, i, xerr=row.stderr or 0, color=COLOURS[0], marker="o", capsize=3)
    panel.set_yticks(range(len(rows)), [labels[row.run] for row in rows])
    panel.set(title="validation split", xlabel=UNITS[rows[0].metric], ylim=(len(rows) - 0.5, -0.5))
    panel.grid(alpha=0.3)
    return _save(figure, path)


def _labels(rows: Iterable[Row]) -> dict[str, str]:
    """What the plots call each run: its variant, its folder, its overrides."""
    names = {row.run: (row.run if row.attention in row.run else f"{row.attention} ({row.run})", row.overrides) for row in rows}
    return {run: " ".join(filter(None, parts)) for run, parts in names.items()}


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
