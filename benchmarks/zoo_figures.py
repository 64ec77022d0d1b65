"""The figures of what benchmarks.zoo collected. They read in grey, too."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator
from matplotlib.transforms import Bbox

from attnzoo.evaluation.plots import TRAINING_CONTEXT, style_of
from benchmarks.zoo_tables import OMITTED, Table, label, reading_label

TRAINED = "trained models"
DRAWN = (  # of readings one of a kind
    "model.rope_scaling=ntk model.rope_factor=8", "model.rope_scaling=dynamic model.rope_factor=8",
    "model.rope_scaling=yarn model.rope_factor=8", "attention.window_size=[1023, 0]", "attention=two_frame",
    "attention=two_frame attention.method=leaky_rerope attention.factor=64",
    "attention=two_frame attention.method=self_extend attention.factor=64", "attention=two_frame attention.method=lm_infinite",
    "attention=dual_chunk", "attention=dual_chunk attention.temperature=yarn",
)


def draw(table: Table, path: Path) -> None:
    """Loss and passkeys by length, of trained models and of checkpoints read otherwise, and loss against the speed of training and (where
    measured) of reading."""
    lines = _drawn(table)
    trained = [line for line in lines if not line[1]]
    names = dict.fromkeys(name for name, reading in table.lines() if reading)
    rows = [(TRAINED, trained)]
    if names:  # with these models as they were trained
        rows.append((f"the checkpoints of {' and '.join(names)}, read otherwise", [line for line in lines if line[0] in names]))
    figure = Figure(figsize=(12, 5 * len(rows) + 4), layout="constrained")
    *by_length, below = figure.subfigures(len(rows) + 1, 1, height_ratios=[5] * len(rows) + [4])
    counted = max((int(row["count"]) for row in table.rows if row["task"] == "perplexity_windows" and row["count"]), default=0)
    for part, (title, own) in zip(by_length, rows, strict=True):
        loss, keys = part.subplots(1, 2)
        for panel, task in ((loss, "perplexity_windows"), (keys, "passkey")):
            _curves(panel, table, own, task)
        loss.set(yscale="log", ylabel=f"loss (nats per byte), the same {counted / 1e3:.0f} k bytes", title="loss by length")
        keys.set(ylim=(-0.05, 1.05), ylabel="passkeys found", title="passkeys by length")
        part.suptitle(title, fontweight="bold")
        _finish(part, (loss, keys))
    training, reading = below.subplots(1, 2)
    below.suptitle("speed on an H200", fontweight="bold")
    looks = {line: style_of(own.index(line), len(own)) for _, own in reversed(rows) for line in own}  # as above
    _points(training, table, looks, {line: rate / 1e6 for line in trained if (rate := table.rate(line[0]))}, 1024)
    training.set(xlabel="training, million tokens a second", ylabel="loss at 1024 (nats per byte)")
    read = {line: 1e3 * statistics.mean(found) for line in lines if (found := table.values(line, "cost", 32768, "prefill_seconds"))}
    reading.set(yscale="log", xlabel="milliseconds to read 32768 bytes", ylabel="loss at 32768 (nats per byte)")
    _points(reading, table, looks, read, 32768)
    _finish(below, (training, reading))
    figure.savefig(path, dpi=130)


def draw_readings(table: Table, path: Path) -> None:
    """Loss, LongPPL and keys among others by length: of models as they were trained, and of each that was read otherwise."""
    lines = table.lines()
    rows = [(TRAINED, [line for line in lines if not line[1]])]
    rows += [(f"{name}, read otherwise", [line for line in lines if line[0] == name and (not line[1] or line[1] in DRAWN)])
             for name in dict.fromkeys(name for name, reading in lines if reading)]
    figure = Figure(figsize=(15, 5.6 * len(rows)), layout="constrained")
    panels = (("perplexity_windows", "", "loss (nats per byte)"), ("longppl_windows", "longppl", "LongPPL"),
              ("needle_4_keys", "", "one key of four found"))
    for part, (title, own) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        axes = part.subplots(1, len(panels))
        for panel, (task, metric, name) in zip(axes, panels, strict=True):
            _curves(panel, table, own, task, metric, label if title == TRAINED else reading_label)
            panel.set(title=name, yscale="linear" if task.startswith("needle") else "log")
        part.suptitle(title, fontweight="bold")
        _finish(part, axes)
    figure.savefig(path, dpi=110)


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
    _finish(figure, panels)
    figure.savefig(path, dpi=130)


def _finish(figure: FigureBase, panels: Sequence) -> None:
    """Grids, numbers at the axes, and a legend of the first panel's lines."""
    for panel in panels:
        panel.grid(alpha=0.3)
        if panel.get_yscale() == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
            panel.yaxis.set_minor_formatter("")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)


def _drawn(table: Table) -> list[tuple[str, str]]:
    """In this order in every figure."""
    return [line for line in dict.fromkeys(table.lines() + table.lines("cost")) if not line[1].endswith(OMITTED)]


def _curves(panel, table: Table, lines: Sequence[tuple[str, str]], task: str, metric: str = "",
            name: Callable[[tuple[str, str]], str] = label) -> None:
    """Means at those lengths that all seeds of a line have."""
    for line in lines:
        found = {n: values for n in table.lengths(line, task) if (values := table.values(line, task, n, metric))}
        seeds = max(map(len, found.values()), default=0)
        at = [n for n, values in found.items() if len(values) == seeds]
        if at:
            means = [statistics.mean(found[n]) for n in at]
            panel.plot(at, means, markersize=5, label=name(line), **style_of(lines.index(line), len(lines)))
    panel.axvline(1024, color="0.4", linestyle=":", linewidth=1, label=TRAINING_CONTEXT)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel("context length (bytes); trained at 1024")


def _points(panel, table: Table, looks: Mapping[tuple[str, str], dict], places: Mapping[tuple[str, str], float], length: int) -> None:
    """Losses at a length, each seed's, over these places on the x axis. Names stand above, below or beside them, where they hide no other
    name and no point."""
    points = [(line, place, losses) for line, place in places.items() if (losses := table.values(line, "perplexity_windows", length))]
    for line, place, losses in points:
        panel.plot([place] * len(losses), losses, markersize=8, **{**looks[line], "linestyle": ""})
    panel.margins(0.2, 0.15)
    panel.autoscale_view()
    panel.get_figure(root=True).draw_without_rendering()  # lays the panels out
    centers = (panel.transData.transform((place, loss)) for _, place, losses in points for loss in losses)
    boxes = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in centers]  # of points, then also of names
    for line, place, losses in points:
        text = label(line).replace("flash, read with ", "")
        high, low = max(losses), min(losses)
        spots = [(high, (0, 8), "center", "bottom"), (low, (0, -8), "center", "top"), (low, (9, 0), "left", "center"),
                 (low, (-9, 0), "right", "center")]
        for n, (loss, offset, ha, va) in enumerate(spots):
            name = panel.annotate(text, (place, loss), textcoords="offset points", xytext=offset, fontsize=8, ha=ha, va=va)
            box = name.get_window_extent()
            if n + 1 == len(spots) or not box.count_overlaps(boxes):
                break
            name.remove()
        boxes.append(box)
