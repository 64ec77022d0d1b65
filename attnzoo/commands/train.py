"""Train a model: `python train.py --help` lists what can be chosen."""

from typing import Any

from attnzoo.commands import CONFIGS
from attnzoo.run import command_line, values


@command_line.command(CONFIGS, "train")
def main(cfg: Any) -> float | None:
    values.check_training(cfg)
    from attnzoo import runner  # here and not above: torch and Lightning take seconds to import, `--help` must not

    command_line.begins()
    return runner.train(cfg).get("val/loss")  # what a Hydra sweeper minimises
