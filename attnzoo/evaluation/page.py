"""report.html: the tables, notes, plots and settings of an evaluation in one self-contained file."""

import base64
import datetime
import html
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import pandas as pd

from attnzoo.evaluation.overview import overview
from attnzoo.evaluation.results import Row
from attnzoo.evaluation.summary import notes, tables, warnings

TRAINED = "Trained: each checkpoint read as it was trained"
READ = "Read: the same weights, read in another way"
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; font-variant-numeric: tabular-nums; }
thead th { background: #f4f4f4; } img { max-width: 100%; height: auto; } figure { margin: 1.5rem 0; }
</style>
</head>
<body>
$body
</body>
</html>
""")


@dataclass(frozen=True)
class About:
    """Where the numbers come from: the settings as YAML, versions by name, the devices that were measured on."""

    settings: str = ""
    versions: Mapping[str, str | None] | None = None
    devices: Sequence[str] = ()

    @property
    def command(self) -> str:
        return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def page(rows: Sequence[Row], averages: Sequence[Row], plots: Sequence[Path], about: About) -> str:
    """The HTML of the whole file. All text from outside this module is escaped, and the plots (PNG) are embedded."""
    day = datetime.datetime.now(datetime.UTC).isoformat(" ", "minutes")
    body = ["<h1>Evaluation</h1>", f"<p>{_text(day)}</p>", _listing(about.command)]
    body += ["<h2>At a glance</h2>", *_apart(overview(rows).reset_index())]
    for warning in warnings(rows):
        body.append(f"<p><strong>{_text(warning)}</strong></p>")
    if averages:
        body += ["<h2>Averages over seeds</h2>", "<p>± is the standard deviation between the seeds.</p>"]
        body += [part for title, table in tables(averages) for part in (f"<h3>{_text(title)}</h3>", *_apart(table))]
    for title, table in tables(rows):
        body += [f"<h2>{_text(title)}</h2>", *_apart(table)]
    body += ["<h2>Plots</h2>", *map(_figure, plots)] if plots else []
    if said := [*notes(averages), *notes(rows)]:
        body += ["<h2>Notes</h2>", "<ul>", *(f"<li>{_text(note)}</li>" for note in dict.fromkeys(said)), "</ul>"]
    body += ["<h2>Settings and versions</h2>", _listing(about.settings), _table(_versions(about))]
    return PAGE.substitute(title="Evaluation", body="\n".join(body))


def _apart(table: pd.DataFrame) -> list[str]:
    """Two tables: the checkpoints as trained, and the other readings."""
    trained = table["reading"] == ""
    both = ((TRAINED, table[trained]), (READ, table[~trained]))
    return [part for title, half in both if len(half) for part in (f"<h4>{_text(title)}</h4>", _table(half))]


def _table(table: pd.DataFrame) -> str:
    """The table as HTML, without columns that are empty in every line."""
    used = table.loc[:, (table != "").any()]
    with pd.option_context("display.max_colwidth", None):  # else long cells are cut off
        return f'<div class="wide">{used.to_html(index=False, border=0, escape=True)}</div>'


def _versions(about: About) -> pd.DataFrame:
    found = {**({"device": ", ".join(about.devices)} if about.devices else {}), **(about.versions or {})}
    return pd.DataFrame([(name, version or "not installed") for name, version in found.items()], columns=["what", "version"], dtype=object)


def _figure(path: Path) -> str:
    name, data = _text(path.stem.replace("_", " ")), base64.b64encode(path.read_bytes()).decode()
    return f'<figure><figcaption>{name}</figcaption><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def _listing(text: str) -> str:
    return f"<pre>{_text(text)}</pre>"


def _text(text: str) -> str:
    return html.escape(text)
