"""Train a model: `python train.py --help` lists what can be chosen."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from attnzoo import options

options.register(Path(__file__).parent / "configs")


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from attnzoo import runner  # here and not above: torch and Lightning take seconds to import, `--help` must not

    with runner.one_line_errors():
        return runner.train(cfg).get("val/loss")  # what a Hydra sweeper minimises


if __name__ == "__main__":
    with options.near_keys():
        main()
