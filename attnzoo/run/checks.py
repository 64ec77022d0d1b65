"""Every group of a composed config against the signatures of what it will build, before anything is built."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnzoo.errors import UserError
from attnzoo.run import values
from attnzoo.run.values import check_target


def check_training(cfg: DictConfig) -> None:
    """Raises UserError or ValueError for a config of train.py that cannot be run."""
    values.check_training(cfg)
    values.warn(cfg)
    if not isinstance(cfg.compile, bool):
        from torch._inductor import list_mode_options  # takes a second to import

        if cfg.compile not in list_mode_options():
            raise UserError(f"compile={cfg.compile} must be false, true, or a mode of torch.compile: {', '.join(list_mode_options())}")
    if "_target_" not in cfg.attention or cfg.attention.get("_partial_") is not True:
        raise UserError("attention: its file must say _target_, the layer's class, and `_partial_: true`, because the model describes each "
                        f"layer to it, got the keys {', '.join(cfg.attention)}")
    for where, config in _targets("", cfg):
        check_target(where, config)


def check_evaluation(cfg: DictConfig) -> None:
    """The same for a config of eval.py."""
    values.check_evaluation(cfg)
    for where, config in _targets("", cfg):
        check_target(where, config)


def _targets(where: str, config: Any) -> Iterator[tuple[str, DictConfig]]:
    """Whatever has a `_target_`, with its path."""
    if not OmegaConf.is_dict(config):
        return
    if config.get("_target_") is not None:
        yield where, config
    for key in config:
        if not OmegaConf.is_missing(config, key):
            yield from _targets(f"{where}.{key}".lstrip("."), config[key])
