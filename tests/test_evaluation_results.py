"""The long-format table, its summary and its plots."""

import csv
import math
import statistics
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from attnzoo.evaluation import plots
from attnzoo.evaluation.plots import draw
from attnzoo.evaluation.results import (
    COLUMNS,
    Row,
    comparable_metric,
    language_model_rows,
    mean_row,
    over_depths,
    pooled,
    shown_metrics,
    write_csv,
)
from attnzoo.evaluation.seeds import average, name_settings, shown
from attnzoo.evaluation.summary import notes, summary

RUN = {"run": "0_flash", "attention": "flash", "tokenizer": "bytes", "data": "text@12345678", "context": 64}


def table(**columns) -> list[Row]:
    """A run's rows: the validation loss, two lengths, one that could not be run, losses by position."""
    rows = language_model_rows(1.0, 0.1, 1.0, task="validation", length=64, count=500)
    for length in (32, 64):
        rows += language_model_rows(1.0 + 32 / length, 0.1, 1.0, task="perplexity_windows", length=length, count=100, note="100 tokens")
    rows.append(Row(task="perplexity_windows", length=128, note="too long"))
    rows += [Row(task="loss_by_position", length=64, depth=depth, value=2.0, count=10) for depth in (1, 2, 64)]
    return [replace(row, **{**RUN, **columns}) for row in rows]


def test_metrics_of_a_loss():
    loss, perplexity, bits = language_model_rows(2.0, 0.5, 4.0, task="validation")
    assert (loss.value, loss.stderr) == (2.0, 0.5)
    assert (perplexity.value, perplexity.stderr) == (pytest.approx(math.e**2), pytest.approx(math.e**2 / 2))
    assert (bits.value, bits.stderr) == (pytest.approx(2 / math.log(2) / 4), pytest.approx(0.5 / math.log(2) / 4))
    assert {row.task for row in (loss, perplexity, bits)} == {"validation"}


@pytest.mark.parametrize("loss", [1e4, math.inf, math.nan])
def test_losses_of_broken_models_have_no_finite_perplexity(loss):
    assert not math.isfinite(language_model_rows(loss, None, 1.0)[1].value)


def test_tokens_that_are_no_text_have_no_bits_per_byte():
    assert [row.metric for row in language_model_rows(2.0, None, None)] == ["loss", "perplexity"]


def test_means_and_their_standard_errors():
    values = [1.0, 2.0, 4.0, 5.0]
    row = mean_row(values, metric="exact_match")
    assert (row.value, row.count) == (3.0, 4)
    assert row.stderr == pytest.approx(statistics.stdev(values) / 2)
    assert mean_row([1.0]).stderr is None
    halves = [mean_row(values[:2]), mean_row(values[2:])]
    (whole,) = pooled(halves, by=["metric"])
    assert (whole.metric, whole.value, whole.count) == ("loss", 3.0, 4)
    assert whole.stderr == pytest.approx(math.hypot(*(half.stderr for half in halves)) / 2)
    (broken,) = pooled([*halves, Row(value=math.nan, count=1)], by=["metric"])
    assert math.isnan(broken.value) and broken.stderr is None and broken.count == 5


def test_depths_are_averaged_by_length_and_metric():
    grid = [
        Row(task="passkey", length=length, depth=depth, metric=metric, value=depth if length == 8 else 1.0, count=2, stderr=0.0)
        for length in (8, 16)
        for depth in (0.0, 0.5, 1.0)
        for metric in ("exact_match", "loss")
    ]
    means = {(row.length, row.metric): row for row in over_depths([*grid, Row(task="passkey", length=32, note="too long")])}
    assert means.keys() == {(8, "exact_match"), (8, "loss"), (16, "exact_match"), (16, "loss")}
    assert means[8, "exact_match"].value == pytest.approx(0.5) and means[16, "loss"].value == 1.0
    assert all(row.count == 6 and row.depth is None for row in means.values())


def test_the_first_metric_stands_for_a_task_and_the_comparable_one_for_language_models():
    rows = [*table(), Row(task="passkey", metric="exact_match", value=1.0), Row(task="passkey", metric="loss", value=2.0)]
    assert shown_metrics(rows) == {
        "validation": "perplexity", "perplexity_windows": "perplexity", "loss_by_position": "loss", "passkey": "exact_match",
    }


def test_runs_with_unlike_seeds_are_averaged_with_their_spread():
    def run(seed: int, value: float, **columns) -> list[Row]:
        columns = {**RUN, "run": f"{seed}", "seed": seed, "settings": "flash", "task": "recall", **columns}
        return [Row(**columns, length=length, value=value, stderr=9.0) for length in (8, 16)]

    lone, third = run(7, 5.0, run="lone", settings="sdpa"), run(3, 6.0)
    rows = [*run(1, 1.0), *run(2, 2.0), third[0], replace(third[1], value=None, stderr=None, note="no"), *lone]
    averages = {row.length: row for row in average(rows)}
    assert averages.keys() == {8, 16}
    assert (averages[8].run, averages[8].value, averages[8].count) == ("flash", 3.0, 3)
    assert averages[8].stderr == pytest.approx(statistics.stdev([1.0, 2.0, 6.0]))
    assert (averages[16].value, averages[16].count) == (1.5, 2)
    text = summary(rows, average(rows))
    assert "| flash | flash |" in text and "standard deviation" in text
    assert average(lone) == []
    assert shown(rows, average(rows)) == [*average(rows), *lone]
    assert averages[8].data == RUN["data"]
    assert average([*run(1, 1.0), *run(2, 2.0, data="text@87654321")])[0].data == "text of each seed"
    assert average([replace(row, settings="") for row in rows]) == []


def test_settings_are_named_by_what_differs_beside_the_seed():
    def config(seed: int, dim: int, attention: dict) -> dict:
        data = {"seed": seed, "seq_len": 8}
        return {"seed": seed, "run_dir": f"/runs/{seed}", "data": data, "model": {"dim": dim}, "attention": attention}

    flash = {"_target_": "attnzoo.attention.flash.FlashAttention", "window_size": [-1, -1]}
    sdpa = {"_target_": "attnzoo.attention.sdpa.SDPAttention"}
    names = name_settings(
        {"a": config(1, 32, flash), "b": config(2, 32, flash), "c": config(1, 64, flash), "d": config(1, 32, sdpa), "lone": None}
    )
    assert names == {"a": "flash model.dim=32", "b": "flash model.dim=32", "c": "flash model.dim=64", "d": "sdpa model.dim=32", "lone": ""}
    windows = name_settings({"a": config(1, 32, flash), "b": config(1, 32, {**flash, "window_size": [8, 0]})})
    assert windows == {"a": "flash attention.window_size=[-1, -1]", "b": "flash attention.window_size=[8, 0]"}


def test_runs_that_differ_by_a_callback_that_changes_training_are_no_seeds_of_each_other():
    def config(seed: int, **callbacks) -> dict:
        best = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": f"/runs/{seed}/checkpoints", "monitor": "val/loss"}
        sample = {"_target_": "attnzoo.training.sample.Sample", "path": f"/runs/{seed}/sample.txt"}
        attention = {"_target_": "attnzoo.attention.flash.FlashAttention"}
        run = {"seed": seed, "run_dir": f"/runs/{seed}", "attention": attention}
        return {**run, "callbacks": {"best": best, "sample": sample, **callbacks}}

    def stopping(patience: int) -> dict:
        return {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "patience": patience}

    runs = {"a": config(1), "b": config(2, sample=None), "c": config(3, early_stopping=stopping(3))}
    assert name_settings(runs) == {"a": "flash", "b": "flash", "c": "flash with early_stopping"}
    runs["d"] = config(4, early_stopping=stopping(5))
    assert name_settings(runs)["d"] == "flash with early_stopping callbacks.early_stopping.patience=5"
    best = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "/runs/5/checkpoints", "monitor": "train/loss"}
    assert name_settings({"a": config(1), "e": config(5, best=best)})["e"] == "flash callbacks.best.monitor=train/loss"


def test_seeds_that_disagree_are_noted():
    def note(*values: float) -> str:
        (mean,) = average([Row(run=f"{i}", seed=i, settings="flash", task="recall", value=value) for i, value in enumerate(values)])
        return mean.note

    assert note(1.0, 1.5, 1.2) == "mean of 3 runs"
    assert note(1.0, 5.0) == "mean of 2 runs that differ by a factor of 5"
    assert note(1.0, 5.0, math.nan) == "mean of 3 runs, 1 of which are NaN"


def test_csv_keeps_every_digit_and_empty_fields(tmp_path):
    rows = [*table(), Row(run="1", value=1 / 3, note='a "quoted", note')]
    write_csv(rows, tmp_path / "results.csv")
    with open(tmp_path / "results.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS and len(read) == len(rows)
    assert float(read[-1]["value"]) == 1 / 3 and read[-1]["note"] == rows[-1].note
    assert (read[-1]["stderr"], read[-1]["context"]) == ("", "")


def test_summary_has_a_line_a_run_and_says_what_could_not_be_run():
    text = summary(
        [*table(), *table(run="1_sdpa", attention="sdpa", reading="model.rope_factor=2"), Row(run="2_lost", note="failed: gone")]
    )
    lines = text.splitlines()
    start = lines.index("## perplexity_windows: perplexity by length")
    assert lines[start + 2] == "| run | attention | reading | data | context | 32 | 64 | 128 |"
    cells = "text@12345678 | 64 | 7.389 ± 0.74 | 4.482 ± 0.45 | (see notes) |"
    assert lines[start + 4 : start + 6] == [f"| 0_flash | flash |  | {cells}", f"| 1_sdpa | sdpa | model.rope_factor=2 | {cells}"]
    assert "| 0_flash | flash |  | text@12345678 | 64 | 1 ± 0.1 | 2.718 ± 0.27 | 1.443 ± 0.14 |" in lines
    assert "- 0_flash, 1_sdpa model.rope_factor=2; perplexity_windows; length 128: too long" in lines
    assert "- 0_flash, 1_sdpa model.rope_factor=2; perplexity_windows; length 32, 64: 100 tokens" in lines
    assert "- 2_lost: failed: gone" in lines


def test_a_note_of_several_tasks_stands_once():
    one = Row(**RUN, task="ruler_vt", length=64, metric="string_match", value=1.0, note="differs")
    rows = [one, replace(one, task="ruler_niah"), replace(one, task="passkey", length=32), replace(one, run="1", note="other")]
    assert notes(rows) == ["0_flash; ruler_vt, ruler_niah; length 64: differs", "0_flash; passkey; length 32: differs",
                           "1; ruler_vt; length 64: other"]


def test_a_note_of_some_depths_names_them():
    rows = [Row(**RUN, task="passkey", length=64, depth=depth, metric="exact_match", value=0.0, note="zero") for depth in (0.25, 0.5)]
    assert notes(rows) == ["passkey; length 64 (depth 0.25, 0.5): zero"]
    assert notes([*rows, replace(rows[0], depth=None)]) == ["passkey; length 64: zero"]


def test_a_note_of_nearly_all_runs_names_the_others():
    many = [Row(**RUN | {"run": f"{i}"}, task="passkey", metric="loss", value=1.0, note="" if i == 2 else "differs") for i in range(6)]
    assert notes(many) == ["all but 2; passkey: differs"]
    assert notes(many[:3]) == ["0, 1; passkey: differs"]


def test_notes_of_all_runs_name_none():
    assert "- perplexity_windows; length 128: too long" in summary(table()).splitlines()


def test_unlike_tokenizers_are_compared_by_bits_per_byte():
    same, unlike = [*table(), *table(run="1")], [*table(), *table(run="1", tokenizer="gpt2")]
    assert comparable_metric(same) == "perplexity"
    assert comparable_metric(unlike) == "bits_per_byte"
    assert "perplexity_windows: bits_per_byte by length" in summary(unlike)
    assert "perplexities cannot be" in summary(unlike) and "perplexities cannot be" not in summary(same)


def test_unlike_data_are_pointed_out():
    assert "unlike data" not in summary([*table(), *table(run="1")])
    assert "unlike data" in summary([*table(), *table(run="1", data="text@87654321")])


@pytest.mark.parametrize(
    ("lines", "who", "warned"),
    [
        ([("a", "")], "the model itself", False),
        ([("a", ""), ("a", "attention=dual_chunk")], "the model itself", True),
        ([("a", ""), ("a", "attention=dual_chunk")], "its checkpoint read with attention=dual_chunk", False),
        ([("a", ""), ("b", "")], "its checkpoint read with attention=dual_chunk", True),
        ([("a", ""), ("b", "")], "/runs/c", False),
    ],
)
def test_key_tokens_that_are_not_the_same_are_pointed_out(lines, who, warned):
    one = Row(task="longppl_windows", length=64, metric="longppl", value=2.0, note=f"key tokens chosen by {who}")
    rows = [replace(one, run=run, reading=reading) for run, reading in lines]
    assert ("key tokens are not the same" in summary(rows)) == warned


def test_plots_are_drawn_for_what_there_is(tmp_path):
    rows = [*table(), *table(run="1_sdpa", attention="sdpa")]
    assert [path.name for path in draw(rows, tmp_path)] == ["validation.png", "perplexity_by_length.png", "loss_by_position.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert [path.name for path in draw([row for row in rows if row.task == "validation"], tmp_path)] == ["validation.png"]
    assert draw([Row(note="failed")], tmp_path) == []


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_plots_of_broken_models(tmp_path, value):
    rows = [replace(row, value=value) if row.length == 64 and row.value else row for row in table()]
    assert len(draw([*rows, *table(run="1")], tmp_path)) == 3


@pytest.mark.parametrize("seconds", [1.0, 3.4, 40.0])  # of the longer length, over those of the shorter
@pytest.mark.filterwarnings("error")  # of a layout for which there is no room
def test_nothing_is_cut_off_or_lies_on_something_else(tmp_path, monkeypatch, seconds):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure) or path)
    rows = []
    for run, reading in enumerate(("", "model.rope_scaling=ntk model.rope_factor=8 attention.window_size=[511,0]", "attention.impl=x")):
        mine = {"run": str(run), "reading": reading}
        rows += table(**mine)
        for length in (32, 64):  # runs at one place: the labels of the lengths would cover each other
            value = 0.0024 * seconds ** (length // 64)
            rows.append(Row(**{**RUN, **mine}, task="cost", length=length, metric="prefill_seconds", value=value, count=5))
            rows.append(Row(**{**RUN, **mine}, task="cost", length=length, metric="tokens_per_second", value=1e6 * length, count=5))
            rows.append(Row(**{**RUN, **mine}, task="ruler", length=length, metric="string_match", value=0.0, count=5))
    draw(rows, tmp_path)
    assert len(figures) == 6
    for figure in figures:
        figure.draw_without_rendering()
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0
            assert not any(box.overlaps(panel.get_tightbbox()) for panel in figure.axes)
        for panel in figure.axes:
            for ticks in (panel.get_xticklabels(), panel.get_yticklabels(), [text for text in panel.texts if text.get_visible()]):
                boxes = [text.get_window_extent() for text in ticks if text.get_text()]
                assert boxes or ticks == []
                assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Draws rows, and gives the figures by the names of their files."""

    def drawn(rows: list[Row]) -> dict:
        found = {}
        monkeypatch.setattr(plots, "_save", lambda figure, path: found.update({path.stem: figure}) or path)
        draw(rows, tmp_path)
        return found

    return drawn


@pytest.mark.parametrize("n", [3, 7, 8, 40])
def test_no_two_curves_of_a_panel_have_one_colour(figures, n):
    figure = figures([row for run in range(n) for row in table(run=str(run))])["perplexity_by_length"]
    (panel,) = figure.axes
    assert len({to_hex(bars.lines[0].get_color()) for bars in panel.containers}) == len(panel.containers) == n


def test_the_legend_says_what_the_dotted_line_is(figures):
    figure = figures([*table(), *table(run="1", context=128)])["perplexity_by_length"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels.count("training context") == 1
    dotted = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert sorted(line.get_xdata()[0] for line in dotted) == [64, 128]


def test_a_bar_longer_than_its_value_ends_below_all_values_of_a_logarithmic_axis(figures):
    rows = [replace(row, value=value, stderr=5 * value) for row, value in zip(table(), (None, 2.0, None, None, 1e3), strict=False) if value]
    rows = [replace(row, task="perplexity_windows", metric="perplexity", length=32 * 2**i) for i, row in enumerate(rows)]
    (panel,) = figures(rows)["perplexity_by_length"].axes
    panel.figure.draw_without_rendering()
    assert panel.get_yscale() == "log" and 0.5 < panel.get_ylim()[0] < 2 and panel.get_ylim()[1] > 6e3
    (bars,) = panel.containers
    assert min(y for path in bars.lines[2][0].get_paths() for _, y in path.vertices) == pytest.approx(2 / 1.5)


def test_runs_that_are_nan_say_so(figures):
    broken = [replace(row, value=row.value and math.nan) for row in table(run="1_broken")]
    keys = [Row(**{**RUN, "run": run}, task="passkey", length=64, depth=0.5, metric="exact_match", value=value)
            for run, value in (("0_flash", 1.0), ("1_broken", math.nan))]
    drawn = figures([*table(), *broken, *keys])
    for name in ("perplexity_by_length", "loss_by_position"):
        labels = [text.get_text() for text in drawn[name].legends[0].get_texts()]
        assert [("NaN" in label) for label in labels if label != "training context"] == [False, True], name
        (panel,) = drawn[name].axes
        crosses = [line for line in panel.lines if line.get_marker() == "x" and len(line.get_xdata())]
        assert len(crosses) == 1 and set(crosses[0].get_ydata()) == {0.97}
    assert [text.get_text() for text in drawn["validation"].axes[0].texts] == ["NaN"]
    assert "NaN" in {text.get_text() for panel in drawn["passkey"].axes for text in panel.texts}
