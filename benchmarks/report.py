"""Rows of figures as a printed table, a CSV file and a plot."""

import csv
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure, or the reason why there is none (`value` is None; `note` says it, and may say more about a figure).

    `ratio`: how many times better the first column (`baseline`) is: a higher rate, less time, less memory.
    `error`: the result's error as a share of what the rule allows (`accuracy.error_ratio`).
    """

    operator: str
    table: str
    panel: str  # one plot panel: everything but x and the direction
    x: float  # position on the plot's x axis
    label: str  # the column: a backend or a feature
    case: str
    direction: str
    unit: str
    value: float | None = None
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest) / median of the rounds
    baseline: str = ""
    ratio: float | None = None
    error: float | None = None
    note: str = ""


def cell(row: Row) -> str:
    if row.value is None:
        return "-"
    figure = f"{row.value:.0f}" if row.value >= 100 else f"{row.value:.3g}"
    return figure if row.label == row.baseline or row.ratio is None else f"{figure} ({row.ratio:.2f}x)"


def table(rows: list[Row]) -> str:
    """One line per problem and direction, one column per label; under it the reasons of the empty cells."""
    labels = list(dict.fromkeys(row.label for row in rows if row.value is not None))
    lines: dict[str, dict[str, str]] = {}
    notes: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row.panel} {row.x:.10g} {row.direction}"
        lines.setdefault(f"{name}, {row.unit}", {})[row.label] = cell(row)
        if row.note:
            notes.setdefault(f"- {row.label}: {row.note}", []).append(name)
    grid = [["", *labels], *([name, *(cells.get(label, "") for label in labels)] for name, cells in lines.items())]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]) for line in grid]
    if any(row.ratio is not None and row.label != row.baseline for row in rows):
        text.append(f"(1.20x): {rows[0].baseline} is 1.20 times better")
    text += [f"{note} ({where[0]}{f' and {len(where) - 1} more' if where[1:] else ''})" for note, where in notes.items()]
    return "\n".join(text)


def write_csv(rows: Iterable[Row], machine: dict[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(f.name for f in fields(Row)), *machine])
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()} | machine for row in rows)


# Okabe and Ito's colours, which the colour-blind tell apart; marker and dash tell the series apart in grey.
STYLES = [
    ("#000000", "o", "-"), ("#D55E00", "s", "--"), ("#0072B2", "^", "-."), ("#009E73", "D", ":"), ("#CC79A7", "v", (0, (5, 1))),
    ("#E69F00", "P", (0, (3, 1, 1, 1))), ("#56B4E9", "X", (0, (1, 1))), ("#999999", "*", (0, (7, 2))),
]


def plot(rows: list[Row], path: Path, x_label: str, title: str) -> None:
    """One panel for each `panel` (column) and direction (row), x on a log scale, one line a label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels, directions, labels = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("panel", "direction", "label"))
    ticks = sorted({row.x for row in rows})
    styles = list(itertools.islice(itertools.cycle(STYLES), len(labels)))
    if len(labels) > len(STYLES):  # no two curves in one colour
        styles = [(pyplot.cm.turbo(i / (len(labels) - 1)), *rest) for i, (_, *rest) in enumerate(styles)]
    figure, axes = pyplot.subplots(
        len(directions), len(panels), squeeze=False, sharex=True, sharey="row", figsize=(1 + 3 * len(panels), 0.8 + 2.6 * len(directions)))
    for i, direction in enumerate(directions):
        for j, panel in enumerate(panels):
            axis = axes[i][j]
            here = [row for row in rows if (row.panel, row.direction) == (panel, direction) and row.value is not None]
            for label, (colour, marker, dash) in zip(labels, styles, strict=True):
                points = sorted((row.x, row.value) for row in here if row.label == label)
                if points:
                    width = 2.4 if label == rows[0].baseline else 1.2
                    axis.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dash, linewidth=width, label=label)
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{x:.10g}" for x in ticks], fontsize=8)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_title(f"{panel}, {direction}", fontsize=9)
            if i == len(directions) - 1:
                axis.set_xlabel(x_label)
        axes[i][0].set_ylim(0, 1.05 * max((row.value for row in rows if row.direction == direction and row.value), default=1))
        axes[i][0].set_ylabel(rows[0].unit)
    figure.suptitle(title, fontsize=10)
    handles = {text: handle for axis in axes.flat for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=min(len(labels), 5), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
