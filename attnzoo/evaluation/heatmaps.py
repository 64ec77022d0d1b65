"""Heat maps over lengths and depths, one panel per run. Lighter cells have higher values, and each cell shows its number."""

import math
import textwrap
from collections.abc import Mapping, Sequence

from attnzoo.evaluation.results import Row

COLOUR_MAP = "cividis"  # suits colour-blind readers, and its lightness is monotonic in grey
PER_ROW = 3


def heat_map(rows: Sequence[Row], labels: Mapping[tuple, str], title: str, unit: str):
    """A figure with one panel per run: lengths from left to right, depths from top to bottom. A cell that was not measured is white with a
    cross; a NaN is white with "NaN".

    rows: values from 0 to 1 of one task and metric, with `length` and `depth`. labels: by `Row.line`.
    """
    from matplotlib.figure import Figure

    lines = list(dict.fromkeys(row.line for row in rows))
    lengths, depths = (sorted({getattr(row, name) for row in rows}) for name in ("length", "depth"))
    n_columns = min(len(lines), PER_ROW)
    n_rows = math.ceil(len(lines) / n_columns)
    width, height = 1.3 + 0.5 * len(lengths), 1.4 + 0.26 * len(depths)
    figure = Figure(figsize=(max(4.0, n_columns * width + 1), n_rows * height + 0.4), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, line in zip(panels, lines, strict=False):
        values = {(row.depth, row.length): row.value for row in rows if row.line == line}
        image = _panel(panel, values, lengths, depths)
        panel.set_title("\n".join(textwrap.wrap(labels[line], int(9 * width))), fontsize=9)
    for panel in panels[len(lines) :]:
        panel.set_axis_off()
    figure.supxlabel("context length (tokens)", fontsize=9)
    figure.supylabel("depth (share of the text before it)", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=list(panels), label=unit)
    return figure


def _panel(panel, values: Mapping[tuple, float], lengths: Sequence[int], depths: Sequence[float]):
    grid = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
    image = panel.imshow(grid, cmap=COLOUR_MAP, vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            missing = "NaN" if (depths[i], lengths[j]) in values else "x"
            text, colour = (missing, "0.5") if math.isnan(value) else (f"{100 * value:.0f}", "white" if value < 0.5 else "black")
            panel.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)
    panel.set_xticks(range(len(lengths)), [_short(length) for length in lengths], fontsize=7)
    panel.tick_params(labelbottom=True)  # there may be no panel below
    panel.set_yticks(range(len(depths)), [f"{depth:.2g}" for depth in depths], fontsize=7)
    return image


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
