"""The plot of a run's losses."""

import functools
import logging
import math
from pathlib import Path
from typing import Any

import lightning

from attnzoo.errors import UserError
from attnzoo.layers import attention_name
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder
from attnzoo.training.loggers import read_metrics

log = logging.getLogger(__name__)


class LossPlot(lightning.Callback):
    """Draws training and validation loss over the steps from metrics.csv."""

    def __init__(self, run_dir: str):
        folder = RunFolder(Path(run_dir))
        self.metrics, self.path = folder.metrics, folder.plot

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and self.metrics.exists():
            size, variant = pl_module.n_parameters / 1e6, attention_name(pl_module.record["model"], pl_module.record["attention"])
            title = f"{type(pl_module.model).__name__} of {size:.3g} M parameters, {variant}, {trainer.datamodule.kind}"
            plot_losses(self.metrics, self.path, title)

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):  # the second Ctrl-C: at once
            return
        try:
            self.on_train_end(trainer, pl_module)
        except UserError as error:  # the disk is full; the first exception is still raised
            log.warning(str(error))


def plot_losses(metrics: Path, path: Path, title: str = "") -> None:
    """Write the plot of a metrics.csv; nothing where it holds no loss. The legend says from which step on a loss is NaN."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = read_metrics(metrics)
    shown = [(name, style) for name, style in (("train/loss", "-"), ("val/loss", "o--")) if name in series]
    if not shown:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in shown:
        broken = next((step for step, value in series[name] if not math.isfinite(value)), None)
        label = name if broken is None else f"{name} (NaN or infinite from step {broken} on)"
        axes.plot(*zip(*series[name], strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set_title(title, fontsize=10, wrap=True)
    axes.set(xlabel="optimizer steps", ylabel="loss (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, functools.partial(figure.savefig, format="png", dpi=150))
