"""Draw what a layer sees: `python -m attnzoo.show --help` lists what can be chosen."""

from typing import Any

from attnzoo.commands import CONFIGS
from attnzoo.run import command_line


@command_line.command(CONFIGS, "show", texts=("text",))
def main(cfg: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    from attnzoo import pictures  # here and not above: torch and Lightning take seconds to import, `--help` must not

    command_line.begins()
    print(pictures.show(cfg, HydraConfig.get().overrides.task))


if __name__ == "__main__":
    main()
