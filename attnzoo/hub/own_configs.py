"""transformers' configs, which choose the attention of every model that holds them."""

import copy
from typing import Any

from torch import nn


def own_configs(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Give a model copies of its configs, which other models may share. Returns what each module held, for `put_back`."""
    from transformers import PreTrainedConfig

    held = [(module, name, value) for module in model.modules() for name, value in vars(module).items()
            if isinstance(value, PreTrainedConfig)]
    memo: dict = {}  # one copy of each, configs inside others too
    for module, name, config in held:
        setattr(module, name, copy.deepcopy(config, memo))
    return held


def put_back(held: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, config in held:
        setattr(module, name, config)
