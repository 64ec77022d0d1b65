"""Copies of transformers' configs: a config chooses the attention of every model that holds it."""

import copy
from typing import Any

from torch import nn


def own_configs(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Gives a model its own copies of its configs, because other models may share them. Returns what each module held, for `put_back`."""
    from transformers import PreTrainedConfig

    held = [(module, name, value) for module in model.modules() for name, value in vars(module).items()
            if isinstance(value, PreTrainedConfig)]
    memo: dict = {}  # so that each config is copied once, also if it is inside another config
    for module, name, config in held:
        setattr(module, name, copy.deepcopy(config, memo))
    return held


def put_back(held: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, config in held:
        setattr(module, name, config)
