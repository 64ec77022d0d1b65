"""Plots of a results table. Runs differ in colour (Okabe and Ito), marker and line style, so they are distinct in grey or if
colour-blind."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnzoo.evaluation.heatmaps import heat_map
from attnzoo.evaluation.results import SHARES, Row, shown_metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

TITLES = {
    "perplexity_windows": "non-overlapping windows",
    "perplexity_sliding": "sliding windows",
    "perplexity_documents": "whole documents, by their size",
    "loss_by_position": "loss by position in the longest windows",
    "longppl_windows": "tokens that need a long context, windows",
    "longppl_sliding": "tokens that need a long context, sliding",
    "longppl_documents": "tokens that need a long context, documents",
}
UNITS = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "longppl": "LongPPL",
    "exact_match": "exact match",
    "string_match": "share of answers found",
    "tokens_per_second": "tokens per second",
    "prefill_seconds": "prefill (s)",
    "peak_memory_gb": "peak memory (GB)",
    "decode_tokens_per_second": "decoded tokens per second",
    "training_tokens_per_second": "trained tokens per second",
    "training_memory_gb": "peak memory in training (GB)",
}
TRAINING_CONTEXT = "training context"  # what the legend calls the dotted lines
COST = "prefill_seconds"


def draw(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Draws what the rows hold as PNG files in folder and returns their paths."""
    rows = [row for row in rows if row.value is not None]
    shown = shown_metrics(rows)
    whole = [row for row in rows if row.depth is None and row.length is not None and row.metric == shown[row.task]]
    drawn = []
    if chosen := [row for row in whole if row.task == "validation"]:
        drawn.append(_validation(chosen, folder / "validation.png"))
    if chosen := [row for row in whole if row.task.startswith("perplexity_")]:
        drawn.append(_curves(chosen, "task", "length", "context length (tokens)", folder / "perplexity_by_length.png"))
    if chosen := [row for row in whole if row.task.startswith("longppl_")]:
        drawn.append(_curves(chosen, "task", "length", "context length (tokens)", folder / "longppl_by_length.png"))
    if chosen := _longest([row for row in rows if row.task == "loss_by_position"]):
        drawn.append(_curves(chosen, "task", "depth", "tokens of context", folder / "loss_by_position.png"))
    grids = dict.fromkeys(row.task for row in rows if row.depth is not None and row.metric in SHARES)
    for task in grids:
        chosen = [row for row in rows if row.task == task and row.depth is not None and row.metric == shown[task]]
        drawn.append(_save(heat_map(chosen, _labels(rows), task, UNITS.get(shown[task], shown[task])), folder / f"{task}.png"))
    if chosen := [row for row in whole if row.metric in SHARES]:
        drawn.append(_curves(chosen, "task", "length", "context length (tokens)", folder / "answers_by_length.png"))
    if cost := [row for row in rows if row.task == "cost"]:
        drawn.append(_curves(cost, "metric", "length", "context length (tokens)", folder / "cost_by_length.png"))
    without = ("validation", "cost", "perplexity_documents", "longppl_documents")
    quality = [row for row in whole if row.task not in without and not _is_part(row.task, whole)]
    if chosen := _against_cost(rows, quality):
        drawn.append(_quality_against_cost(chosen, folder / "quality_against_cost.png"))
    return drawn


def _is_part(task: str, rows: Sequence[Row]) -> bool:
    """Whether the rows also have the mean over a group that this task belongs to, such as ruler for ruler_vt."""
    return any(task.startswith(f"{row.task}_") for row in rows)


def _longest(rows: Sequence[Row]) -> list[Row]:
    """The rows of each run's longest length."""
    longest: dict[tuple, int] = {}
    for row in rows:
        longest[row.line] = max(row.length, longest.get(row.line, 0))
    return [row for row in rows if row.length == longest[row.line]]


def _curves(rows: Sequence[Row], panel_by: str, x: str, xlabel: str, path: Path) -> Path:
    """One panel per task (or metric) with one curve per run. Bars are one standard error; dotted lines mark the training contexts.

    A value that is not finite is drawn as a cross at the panel's upper edge, which the legend explains.
    """
    names, labels = list(dict.fromkeys(getattr(row, panel_by) for row in rows)), _labels_with_breaks(rows)
    contexts = sorted({row.context for row in rows if row.context is not None})
    together = len({row.metric for row in rows}) == 1  # panels with the same unit share an axis
    figure, panels = _panels(len(names), [*labels.values(), *[TRAINING_CONTEXT][: len(contexts)]], sharey=together)
    for panel, name in zip(panels, names, strict=False):
        here = [row for row in rows if getattr(row, panel_by) == name]
        for i, (line, label) in enumerate(labels.items()):
            points = sorted((row for row in here if row.line == line), key=lambda row: getattr(row, x))
            _line(panel, style_of(i, len(labels)), label, [getattr(row, x) for row in points], points, _floor(rows if together else here))
        for i, context in enumerate(contexts):
            panel.axvline(context, color="0.4", linestyle=":", linewidth=1, label="_another" if i else TRAINING_CONTEXT)
        panel.set(title=TITLES.get(name, "" if panel_by == "metric" else name), xlabel=xlabel)
        panel.set_ylabel(UNITS.get(here[0].metric, here[0].metric))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        _scale(panel, rows if together else here)
    _finish(figure, panels, names)
    return _save(figure, path)


def _against_cost(rows: Sequence[Row], quality: Sequence[Row]) -> list[tuple[Row, float]]:
    """Each number of quality with the prefill seconds of the same run at the same length."""
    cost = {(*row.line, row.length): row.value for row in rows if row.task == "cost" and row.metric == COST}
    return [(row, cost[*row.line, row.length]) for row in quality if (*row.line, row.length) in cost]


def _quality_against_cost(pairs: Sequence[tuple[Row, float]], path: Path) -> Path:
    """One panel per task with one curve per run, whose points are the lengths."""
    rows = [row for row, _ in pairs]
    names, labels = list(dict.fromkeys(row.task for row in rows)), _labels_with_breaks(rows)
    figure, panels = _panels(len(names), labels.values())
    written = []
    for panel, name in zip(panels, names, strict=False):
        here = [(row, seconds) for row, seconds in pairs if row.task == name]
        for i, (line, label) in enumerate(labels.items()):
            points = sorted(((row, seconds) for row, seconds in here if row.line == line), key=lambda pair: pair[0].length)
            floor = _floor([row for row, _ in here])
            _line(panel, style_of(i, len(labels)), label, [seconds for _, seconds in points], [row for row, _ in points], floor)
            for row, seconds in points:
                if not math.isfinite(row.value):
                    continue
                place = (seconds, row.value)
                written.append(panel.annotate(str(row.length), place, textcoords="offset points", xytext=(4, 4), fontsize=7))
        panel.set(title=TITLES.get(name, name), xlabel=UNITS[COST])
        panel.set_ylabel(UNITS.get(here[0][0].metric, here[0][0].metric))
        _scale(panel, [row for row, _ in here])
        _spread(panel.xaxis, [seconds for _, seconds in here])
        panel.margins(x=0.12)  # room for the label of the last length
    _finish(figure, panels, names)
    _hide_covered(figure, written)
    return _save(figure, path)


def _hide_covered(figure, texts: Sequence) -> None:
    """Hides each text that would overlap an earlier one that is shown."""
    figure.draw_without_rendering()
    shown = []
    for text in texts:
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in shown):
            text.set_visible(False)
        else:
            shown.append(box)


def style_of(i: int, n: int) -> dict[str, Any]:
    """The style of curve i of n: a unique colour, colour-blind safe while there are enough of these, with a marker and a line style."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colour = COLOURS[i] if n <= len(COLOURS) else to_hex(colormaps["turbo"](i / (n - 1)))
    return {"color": colour, "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)]}


def _line(panel, style: Mapping[str, Any], label: str, xs: Sequence[float], points: Sequence[Row], floor: float) -> None:
    """Draws one curve. floor: the lowest value that error bars reach. Checkpoints as trained have wider lines than other readings."""
    width = 2.5 if all(row.reading == "" for row in points) else 1.2
    values, errors = [row.value for row in points], [row.stderr or 0 for row in points]
    below = [min(error, max(value - floor, 0)) for value, error in zip(values, errors, strict=True)]
    panel.errorbar(xs, values, [below, errors], label=label, markersize=5, capsize=2, linewidth=width, elinewidth=1, **style)
    if broken := [x for x, value in zip(xs, values, strict=True) if not math.isfinite(value)]:
        panel.plot(broken, [0.97] * len(broken), "x", color=style["color"], transform=panel.get_xaxis_transform())


def _scale(panel, rows: Sequence[Row]) -> None:
    panel.grid(alpha=0.3)
    if rows[0].metric in SHARES:
        panel.set_ylim(-0.05, 1.05)
    else:
        _spread(panel.yaxis, [row.value for row in rows])


def _floor(rows: Sequence[Row]) -> float:
    """The lowest value of error bars: just below all values on a logarithmic axis, which has no zero; -inf (no limit) on a linear one."""
    values = _finite(row.value for row in rows)
    return min(values) / 1.5 if rows[0].metric not in SHARES and _is_logarithmic(values) else -math.inf


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)] or [0.0]


def _is_logarithmic(values: Sequence[float]) -> bool:
    return max(values) > 3 * min(values) > 0


def _spread(axis, values: Sequence[float]) -> None:
    """Makes the axis logarithmic if one run's large values would flatten all others. Tick labels are plain, such as 20, 0.5 and 3M."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    values = _finite(values)
    if _is_logarithmic(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(FixedLocator(_ticks(min(values) / 1.1, max(values) * 1.1)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(lambda value, _: _number(value))


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 3, 4, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def _number(value: float) -> str:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(value) if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _finish(figure, panels, names: Sequence) -> None:
    """Adds one legend for all panels, and hides the unused places of the grid."""
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    if TRAINING_CONTEXT in labels:  # after the curves
        labels.append(labels.pop(i := labels.index(TRAINING_CONTEXT)))
        handles.append(handles.pop(i))
    figure.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(labels, figure.get_figwidth()))


def _entry_width(label: str) -> float:
    """The width of a legend entry, in inches."""
    return 0.7 + 0.09 * len(label)


def _legend_columns(labels: Iterable[str], width: float) -> int:
    return max(1, min(3, int(width / max(map(_entry_width, labels)))))


def _panels(n: int, labels: Iterable[str], **options):
    """A figure for n panels, at most four in a row, with room for a legend of these labels; and its panels."""
    labels = list(labels)
    n_columns = min(n, 4)
    n_rows = math.ceil(n / n_columns)
    width = max(5.0, 4.2 * n_columns, *map(_entry_width, labels))
    figure = _figure(width, 3.4 * n_rows + 0.4 + 0.22 * math.ceil(len(labels) / _legend_columns(labels, width)))
    return figure, list(figure.subplots(n_rows, n_columns, squeeze=False, **options).flat)


def _validation(rows: Sequence[Row], path: Path) -> Path:
    """Draws one row per run: its value with a bar of one standard error."""
    labels = {line: textwrap.fill(label, 45) for line, label in _labels(rows).items()}
    figure = _figure(7, 1.2 + sum(0.2 + 0.17 * (1 + labels[row.line].count("\n")) for row in rows))
    panel = figure.subplots()
    for i, row in enumerate(rows):
        panel.errorbar(row.value, i, xerr=row.stderr or 0, color=COLOURS[0], marker="o", capsize=3)
        if not math.isfinite(row.value):
            said = "NaN" if math.isnan(row.value) else "infinite"
            panel.text(0.5, i, said, transform=panel.get_yaxis_transform(), ha="center", va="center")
    panel.set_yticks(range(len(rows)), [labels[row.line] for row in rows])
    panel.set(title="validation split", xlabel=UNITS[rows[0].metric], ylim=(len(rows) - 0.5, -0.5))
    panel.grid(alpha=0.3)
    return _save(figure, path)


def _labels(rows: Iterable[Row]) -> dict[tuple, str]:
    """Each run's label in the plots: variant, folder and overrides."""
    return {row.line: " ".join(filter(None, (_name(row), *_said(row)))) for row in rows}


def _labels_with_breaks(rows: Sequence[Row]) -> dict[tuple, str]:
    """As `_labels`; labels of runs with values that are not finite also say whether these are NaN or infinite."""
    labels = _labels(rows)
    for line in labels:
        values = [row.value for row in rows if row.line == line]
        if broken := [value for value in values if not math.isfinite(value)]:
            labels[line] += f" (x: {'NaN' if any(map(math.isnan, broken)) else 'infinite'})"
    return labels


def _name(row: Row) -> str:
    return row.run if row.attention in row.run else f"{row.attention} ({row.run})"


def _said(row: Row) -> list[str]:
    """The overrides without the variant, which is in the name already."""
    return [override for override in row.reading.split(" ") if override != f"attention={row.attention}"]


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
