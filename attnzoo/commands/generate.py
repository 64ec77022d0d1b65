"""Let a trained model write: `python generate.py --help` lists what can be chosen."""

from typing import Any

from attnzoo.commands import CONFIGS
from attnzoo.run import command_line, values


@command_line.command(CONFIGS, "generate", texts=("prompt",))
def main(cfg: Any) -> None:
    values.check_generation(cfg)
    from attnzoo import generation  # here and not above: torch takes seconds to import, `--help` must not

    command_line.begins()
    generation.generate(cfg)
