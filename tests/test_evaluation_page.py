"""report.html: everything is in the file, nothing that a user wrote is markup, trained and read stand apart."""

import base64
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tiny_run import compose_tiny

from attnzoo import runner
from attnzoo.evaluation.overview import overview
from attnzoo.evaluation.page import READ, TRAINED, About, page
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.seeds import average
from attnzoo.evaluation.summary import summary

EVIL = """<script>alert("1")</script>' onerror=x | & $body"""
VOID = {"meta", "img", "br", "link", "hr", "input"}


class Reader(HTMLParser):
    """The elements of a page with their attributes, its text, and what is not closed in its order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.text, self.open, self.wrong = [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text += data


def measured(run: str, reading: str, **columns) -> list[Row]:
    own = {"run": run, "reading": reading, "attention": "flash", "context": 1024, "data": "text@1", "settings": "flash", **columns}
    numbers = [
        *(("perplexity_windows", length, "loss", 1.0) for length in (512, 1024, 2048, 8192)),
        *(("perplexity_windows", length, "perplexity", math.e) for length in (512, 1024, 2048, 8192)),
        *(("longppl_windows", length, "longppl", 3.5) for length in (2048, 8192)),
        *(("passkey", length, "exact_match", 0.5) for length in (1024, 8192)),
        *(("cost", length, metric, 0.25) for length in (1024, 8192) for metric in ("prefill_seconds", "peak_memory_gb")),
        ("effective_length", None, "passkey", 1024.0),
    ]
    return [Row(**own, task=task, length=length, metric=metric, value=value, count=1) for task, length, metric, value in numbers]


FAILED = Row(run="a", reading="model.rope_factor=8", note="failed: learned positions")
ROWS = [*measured("a", ""), *measured("a", "attention=dual_chunk"), FAILED]


def test_a_line_a_reading_with_quality_and_cost():
    table = overview(ROWS)
    assert list(table.columns) == [
        "loss (windows) at 1024", "loss (windows) at 8192", "LongPPL (windows) at 8192", "passkey at 1024", "passkey at 8192",
        "seconds to read at 8192", "GB at 8192", "effective length, passkey", "why not",
    ]
    assert list(table.index) == [("a", ""), ("a", "attention=dual_chunk"), ("a", "model.rope_factor=8")]
    assert list(table.loc[("a", "")]) == ["1", "1", "3.5", "0.5", "0.5", "0.25", "0.25", "1024", ""]
    assert list(table.loc[("a", "model.rope_factor=8")]) == [""] * 8 + ["failed: learned positions"]


def test_there_is_a_table_where_nothing_was_measured():
    assert list(overview([Row(run="a", note="failed: gone")]).columns) == ["why not"]
    assert "failed: gone" in page([Row(run="a", note="failed: gone")], [], [], About())


def test_trained_and_read_stand_apart():
    text = page(ROWS, [], [], About())
    glance = text.partition("At a glance")[2].partition("<h2>")[0]
    trained, read = (glance.partition(title)[2] for title in (TRAINED, READ))
    assert "dual_chunk" not in trained.partition(READ)[0] and read.count("dual_chunk") == 1 and "failed: learned positions" in read
    assert READ not in page(measured("a", ""), [], [], About())


def test_what_users_write_is_text(tmp_path):
    plot = tmp_path / f"{EVIL.replace('/', '')}.png"
    plot.write_bytes(b"\x89PNG")
    rows = [replace(row, note=EVIL) for row in measured(EVIL, EVIL, data=EVIL, tokenizer=EVIL, settings=EVIL, seed=1)]
    rows += [replace(row, run="b", seed=2) for row in rows] + [Row(run=EVIL, note=EVIL), Row(task=EVIL, metric=EVIL, length=8, value=1.0)]
    read = Reader(page(rows, average(rows), [plot], About(settings=EVIL, versions={EVIL: EVIL}, devices=[EVIL])))
    assert {tag for tag, _ in read.elements} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "h4", "p", "strong", "pre", "div", "table", "thead", "tbody",
        "tr", "th", "td", "figure", "figcaption", "img", "ul", "li",
    }
    assert read.wrong == [] and read.open == []
    assert {name for _, attrs in read.elements for name in attrs} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "style", "alt", "src", "border"}
    assert read.text.count(EVIL) > 10


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG of mine")
    text = page(ROWS, [], [tmp_path / "a.png"], About(settings="a: 1", versions={"torch": "2.0", "triton": None}, devices=["cpu"]))
    assert not re.search(r"https?:|url\(|<link|<script|<iframe|@import", text)
    (src,) = re.findall(r'src="([^"]*)"', text)
    assert base64.b64decode(src.removeprefix("data:image/png;base64,")) == b"\x89PNG of mine"
    read = Reader(text).text
    assert "a: 1" in read and "2.0" in read and "not installed" in read and "cpu" in read and "python " in read


def test_long_cells_and_many_lines_are_whole():
    long = "attention=dual_chunk " + "x" * 300
    text = page([row for i in range(150) for row in measured(f"run{i}", long)], [], [], About())
    assert text.count(long) >= 150 and "..." not in text and all(f"run{i}<" in text for i in range(150))


def test_the_summary_has_the_readings_at_a_glance_and_no_markup_of_users():
    text = summary(ROWS)
    assert text.index("## at a glance") < text.index("## perplexity_windows") and "failed: learned positions" in text
    assert "at a glance" not in summary(measured("a", ""))
    text = summary([replace(row, note="<b>\nx") for row in measured("a|b", "<i>")])
    assert "| a\\|b | " in text and "<" not in text and "&lt;b> x" in text


@pytest.mark.slow
def test_a_command_leaves_a_page(tmp_path):
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=2", "model.n_layers=1", "callbacks.sample=null", "callbacks.plot=null"))
    asked = ["evaluation=validation", "accelerator=cpu", "precision=32", 'tags=["<b>"]']
    runner.evaluate(compose_tiny(tmp_path, f"run_dir={tmp_path / 'result'}", f"ckpt_path={tmp_path / 'run'}", *asked, config="eval"))
    read = Reader((tmp_path / "result" / "report.html").read_text(encoding="utf-8"))
    assert read.wrong == [] and "<b>" in read.text and "validation" in read.text and "torch" in read.text
    assert sum(tag == "img" for tag, _ in read.elements) == 1
