"""GPT and BERT, and how a checkpoint's plain description becomes one of them."""

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from attnzoo.attention.base import Attention
from attnzoo.models.bert import BERT
from attnzoo.models.classifier import BERTClassifier
from attnzoo.models.gpt import GPT
from attnzoo.signatures import check_options

__all__ = ["BERT", "BERTClassifier", "GPT", "from_config"]


def from_config(model: Mapping, attention: Mapping, *, trust: Sequence[str] = ()) -> nn.Module:
    """Build a model from plain dictionaries, such as a checkpoint's.

    model, attention: `_target_` (the dotted name of a class) and its arguments, as in configs/model and configs/attention; an argument may
    be such a dictionary itself. Only classes defined inside `attnzoo` or a module named in `trust` are built, and all targets are checked
    before anything is imported, because a checkpoint may be a stranger's.

    Raises ValueError for a target that is not trusted or not there, and for an argument that it does not take or of a wrong kind.
    """
    trusted = ("attnzoo", *trust)
    for name, config in (("model", model), ("attention", attention)):
        _check_targets(config, trusted, name)
        if "_target_" not in config:
            raise ValueError(f"{name}: needs a `_target_` such as {_EXAMPLES[name]}, got the keys {sorted(config)}")
    layer, trunk = _resolve(attention["_target_"], trusted, Attention), _resolve(model["_target_"], trusted, nn.Module)
    check_options("attention", layer, attention)
    check_options("model", trunk, model)
    arguments = _arguments({key: value for key, value in model.items() if key != "attention"}, trusted)
    return trunk(attention=partial(layer, **_arguments(attention, trusted)), **arguments)


_EXAMPLES = {"model": "attnzoo.models.GPT", "attention": "attnzoo.attention.flash.FlashAttention"}


def _inside(module: str, trusted: Sequence[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in trusted)


def _check_targets(config: Any, trusted: Sequence[str], where: str) -> None:
    """Refuse every `_target_` in nested dictionaries and lists that lies outside the trusted modules."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            target = config["_target_"]
            if not isinstance(target, str) or not _inside(target.rpartition(".")[0], trusted):
                raise ValueError(f"{where}._target_={target!r}: is outside attnzoo and the trusted modules {list(trusted[1:])}; "
                                 "if you know whose code it is, name its module in `trust`")
        for key, value in config.items():
            _check_targets(value, trusted, f"{where}.{key}")
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            _check_targets(value, trusted, f"{where}[{index}]")


def _resolve(target: str, trusted: Sequence[str], kind: type) -> type:
    """The class behind a checked target. It must be defined in a trusted module, not merely be reachable through one's imports."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"_target_={target!r}: cannot be imported ({error})") from error
    if not isinstance(found, type) or not issubclass(found, kind) or not _inside(found.__module__, trusted):
        raise ValueError(f"_target_={target!r}: must be a subclass of {kind.__name__} that is defined in {' or '.join(trusted)}")
    return found


def _arguments(config: Mapping, trusted: Sequence[str]) -> dict[str, Any]:
    return {key: _build(value, trusted) for key, value in config.items() if key not in ("_target_", "_partial_")}


def _build(value: Any, trusted: Sequence[str]) -> Any:
    """An argument, with nested targets built."""
    if isinstance(value, Mapping):
        arguments = _arguments(value, trusted)
        if "_target_" not in value:
            return arguments
        found = _resolve(value["_target_"], trusted, object)
        return partial(found, **arguments) if value.get("_partial_") else found(**arguments)
    if isinstance(value, list | tuple):
        return [_build(item, trusted) for item in value]
    return value
