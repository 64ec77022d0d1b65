"""GPT and BERT, and `from_config`, which builds one of them from the plain description in a checkpoint."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from attnzoo import layers as by_layer
from attnzoo.attention.base import Attention
from attnzoo.models.bert import BERT
from attnzoo.models.classifier import BERTClassifier
from attnzoo.models.gpt import GPT
from attnzoo.signatures import check_options
from attnzoo.targets import check_targets, resolve

__all__ = ["BERT", "BERTClassifier", "GPT", "from_config"]


def from_config(model: Mapping, attention: Mapping, *, trust: Sequence[str] = ()) -> nn.Module:
    """Build a model from plain dictionaries, such as a checkpoint's.

    model, attention: `_target_` (the dotted name of a class) and its arguments, as in configs/model and configs/attention; an argument may
    be such a dictionary itself. Only classes defined inside `attnzoo` or a module named in `trust` are built. All targets are checked
    before anything is imported, because a checkpoint may come from an untrusted source.

    Raises ValueError for a target that is not trusted or does not exist, and for an argument that is unknown or of a wrong type.
    """
    trusted = ("attnzoo", *trust)
    for name, config in (("model", model), ("attention", attention)):
        check_targets(config, trusted, name)
        if "_target_" not in config:
            raise ValueError(f"{name}: needs a `_target_` such as {_EXAMPLES[name]}, got the keys {sorted(config)}")
    trunk = resolve(model["_target_"], trusted, nn.Module)
    described = {key: value for key, value in model.items() if key != "attention"}
    check_options("model", trunk, described)
    attentions = {None: attention, **{kind: own["attention"] for kind, own in by_layer.by_kind(described, attention).items()}}
    makers = {}
    for kind, config in attentions.items():
        layer = resolve(config["_target_"], trusted, Attention)
        check_options(by_layer.key(kind), layer, config)
        makers[kind] = partial(layer, **_arguments(config, trusted))
    if layers := described.pop("layers", None):
        kinds = {name: {**(own or {}), "attention": makers[name]} for name, own in layers.items() if name in makers}
        described["layers"] = {"pattern": layers.get("pattern"), **kinds}
    return trunk(attention=makers[None], **_arguments(described, trusted))


_EXAMPLES = {"model": "attnzoo.models.GPT", "attention": "attnzoo.attention.flash.FlashAttention"}


def _arguments(config: Mapping, trusted: Sequence[str]) -> dict[str, Any]:
    return {key: _build(value, trusted) for key, value in config.items() if key not in ("_target_", "_partial_")}


def _build(value: Any, trusted: Sequence[str]) -> Any:
    """The value of an argument, in which each nested `_target_` is replaced by the object that it describes."""
    if isinstance(value, Mapping):
        arguments = _arguments(value, trusted)
        if "_target_" not in value:
            return arguments
        found = resolve(value["_target_"], trusted, object)
        return partial(found, **arguments) if value.get("_partial_") else found(**arguments)
    if isinstance(value, list | tuple):
        return [_build(item, trusted) for item in value]
    return value
