"""Evaluate checkpoints: `python eval.py ckpt_path=...`, `python eval.py runs=<folder of runs>`, `python eval.py --help`."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from attnzoo import options

options.register(Path(__file__).parent / "configs")


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(cfg: DictConfig) -> None:
    from attnzoo import runner  # here and not above: torch and Lightning take seconds to import, `--help` must not

    with runner.one_line_errors():
        runner.evaluate(cfg)


if __name__ == "__main__":
    with options.near_keys():
        main()
