"""What README and docs say: links lead somewhere, and every command line of ours composes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from attnzoo.run.command_line import as_typed, register_options

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_COMPOSED = ("--help", "hydra/launcher=submitit_slurm")  # the latter is an extra


def commands() -> list[str]:
    """What the fenced blocks say to train.py, eval.py, generate.py and attnzoo.show, without comments, each once."""
    found = {}
    for path in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), flags=re.S):
            lines = iter(block.replace("\\\n", " ").replace("-m attnzoo.show", "show.py").splitlines())
            for line in lines:
                if re.match(r"python (train|eval|generate|show)\.py ", line):
                    found[shlex.join(_words(line, lines))] = None
    return sorted(found)


def _words(line: str, following: Iterator[str]) -> list[str]:
    """Of a command whose quotes may end on a later line."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return _words(f"{line} {next(following)}", following)


def first_of(swept: str) -> str:
    """Of an override of a sweep the first value; a pattern of names is one of them without its end."""
    return re.sub(r"=glob\((\w+)\*\)$", r"=\1", swept) if "glob(" in swept or "[" in swept else swept.split(",")[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("command", commands())
def test_commands_compose(command):
    words = shlex.split(command)
    name, overrides = words[1].removesuffix(".py"), [as_typed(word, ("prompt", "text")) for word in words[2:] if word != "-m"]
    if any(word in NOT_COMPOSED for word in overrides):
        pytest.skip("not composed here")
    if "-m" in words:  # the first job of the sweep
        overrides = [first_of(word) for word in overrides]
    register_options(ROOT / "configs")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        compose(name, [word for word in overrides if not word.startswith("hydra.")])
