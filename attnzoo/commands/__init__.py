"""The commands train.py, eval.py and generate.py; an installed package has them as attnzoo-train, attnzoo-eval and attnzoo-generate."""

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"  # in a clone a link to the folder at its top
