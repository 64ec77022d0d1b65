"""The figures of what benchmarks.zoo collected. They read in grey, too."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from attnzoo.evaluation.plots import TRAINING_CONTEXT, style_of
from benchmarks.zoo_tables import OMITTED, Table, label


def draw(table: Table, path: Path) -> None:
    """Loss and passkeys by length, loss against the speed of training and (where measured) of reading."""
    lines = _drawn(table)
    has_cost = bool(table.lines("cost"))
    figure = Figure(figsize=(12, 9.5) if has_cost else (14, 5.5), layout="constrained")
    panels = figure.subplots(2, 2).flatten() if has_cost else figure.subplots(1, 3)
    for panel, task in zip(panels, ("perplexity_windows", "passkey"), strict=False):
        _curves(panel, table, lines, task)
    counted = max((int(row["count"]) for row in table.rows if row["task"] == "perplexity_windows" and row["count"]), default=0)
    panels[0].set(yscale="log", ylabel=f"loss (nats per byte), the same {counted / 1e3:.0f} k bytes", title="loss by length")
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
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
            panel.yaxis.set_minor_formatter("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)


def _drawn(table: Table) -> list[tuple[str, str]]:
    """In this order in every figure, so that a line looks the same in all."""
    return [line for line in dict.fromkeys(table.lines() + table.lines("cost")) if not line[1].endswith(OMITTED)]


def _curves(panel, table: Table, lines: Sequence[tuple[str, str]], task: str, metric: str = "") -> None:
    for line in lines:
        if at := [n for n in table.lengths(line, task) if table.values(line, task, n, metric)]:
            means = [statistics.mean(table.values(line, task, n, metric)) for n in at]
            panel.plot(at, means, markersize=5, label=label(line), **style_of(lines.index(line), len(lines)))
    panel.axvline(1024, color="0.4", linestyle=":", linewidth=1, label=TRAINING_CONTEXT)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel("context length (bytes); trained at 1024")


def _points(panel, table: Table, lines: Sequence[tuple[str, str]], places: Mapping[tuple[str, str], float], length: int) -> None:
    """Losses at a length, each seed's, over these places on the x axis. Names stand above, or below where a neighbour is close above."""
    points = [(line, place, losses) for line, place in places.items() if (losses := table.values(line, "perplexity_windows", length))]
    for line, place, losses in points:
        panel.plot([place] * len(losses), losses, markersize=8, **{**style_of(lines.index(line), len(lines)), "linestyle": ""})
    panel.margins(0.2, 0.15)
    panel.autoscale_view()
    to_axes = panel.transData + panel.transAxes.inverted()
    middles = [to_axes.transform((place, statistics.mean(losses))) for _, place, losses in points]
    for (line, place, losses), (x, y) in zip(points, middles, strict=True):
        is_below = any(abs(x - other_x) < 0.2 and 0 < other_y - y < 0.1 for other_x, other_y in middles)
        end, offset, side = (min(losses), -8, "top") if is_below else (max(losses), 8, "bottom")
        text = label(line).replace("flash, read with ", "")
        panel.annotate(text, (place, end), textcoords="offset points", xytext=(0, offset), fontsize=8, ha="center", va=side)
