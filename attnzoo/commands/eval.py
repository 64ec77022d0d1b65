"""Evaluate checkpoints: `python eval.py ckpt_path=...`, `python eval.py runs=<folder of runs>`, `python eval.py --help`."""

from typing import Any

from attnzoo.commands import CONFIGS
from attnzoo.run import command_line, values


@command_line.command(CONFIGS, "eval")
def main(cfg: Any) -> None:
    values.check_evaluation(cfg)
    from attnzoo import runner  # here and not above: torch and Lightning take seconds to import, `--help` must not

    command_line.begins()
    runner.evaluate(cfg)
