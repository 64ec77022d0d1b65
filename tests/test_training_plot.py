"""The plot of a run's losses."""

import pytest
from matplotlib.figure import Figure

from attnzoo.training.plot import plot_losses


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """Draws the rows of a metrics.csv, and gives the figure's only panel."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))

    def drawn(*rows: str, title: str = "") -> object:
        (tmp_path / "metrics.csv").write_text("\n".join(["step,train/loss,val/loss", *rows]) + "\n")
        plot_losses(tmp_path / "metrics.csv", tmp_path / "loss.png", title)
        (panel,) = figures.pop().axes
        return panel

    return drawn


def test_a_title_and_whole_steps(figure):
    panel = figure("0,3.0,", "1,2.5,2.7", title="GPT of 0.8 M parameters, flash, text")
    assert panel.get_title() == "GPT of 0.8 M parameters, flash, text"
    panel.figure.draw_without_rendering()
    assert all(tick == int(tick) for tick in panel.get_xticks())


def test_a_loss_that_is_nan_says_so(figure):
    labels = [text.get_text() for text in figure("0,3.0,", "1,nan,", "2,nan,2.9").get_legend().get_texts()]
    assert labels == ["train/loss (NaN or infinite from step 2 on)", "val/loss"]
