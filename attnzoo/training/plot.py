"""The plot of a run's losses."""

from pathlib import Path
from typing import Any

import lightning

from attnzoo.training.loggers import read_metrics


class LossPlot(lightning.Callback):
    """Draws training and validation loss over the steps from metrics.csv."""

    def __init__(self, metrics: str, path: str):
        self.metrics, self.path = Path(metrics), Path(path)

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and self.metrics.exists():
            plot_losses(self.metrics, self.path)

    def on_exception(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.on_train_end(trainer)


def plot_losses(metrics: Path, path: Path) -> None:
    """Write the plot of a metrics.csv; nothing where it holds no loss."""
    from matplotlib.figure import Figure

    series = read_metrics(metrics)
    shown = [(name, style) for name, style in (("train/loss", "-"), ("val/loss", "o--")) if name in series]
    if not shown:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in shown:
        axes.plot(*zip(*series[name], strict=True), style, label=name, linewidth=1, markersize=4)
    axes.set(xlabel="optimizer steps", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
