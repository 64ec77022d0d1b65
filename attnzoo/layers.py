"""Patterns by layer: kinds of layers by name, and which layer is of which kind. No torch here.

A description, called `layers`, is a mapping of plain types. `pattern` is a list of kinds, which the layers take in turn. Every other key is
the name of a kind; its value says what layers of that kind override in the model, such as
{"pattern": ["local", "full"], "local": {"attention": {"window_size": [127, 0]}}, "full": {}}. An `attention` with `_target_` replaces the
model's attention, one without is merged over it.
"""

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from attnzoo.errors import like_it

ROTARY = {"rope_base": 10000.0, "rope_scaling": "none", "rope_factor": 1.0, "rope_options": None, "partial_rotary_factor": 1.0,
          "rope_proportion": 1.0}
BY_LAYER = ("attention", "positions", *ROTARY, "original_context", "qk_norm", "attention_temperature", "attention_gate")


def check(layers: Mapping[str, Any] | None) -> None:
    """Raises ValueError for a description that is wrong in any model."""
    described = _described(layers)
    if (pattern := (layers or {}).get("pattern")) is None:
        return
    if not isinstance(pattern, Sequence) or isinstance(pattern, str) or not pattern:
        raise ValueError(f"layers.pattern={pattern!r}: must be a list of kinds of layers ({', '.join(described)}), or null for layers that "
                         "are all alike")
    for name in pattern:
        if name not in described:
            raise ValueError(f"layers.pattern={list(pattern)}: {name!r} is no kind of layer here; each must be one of "
                             f"{', '.join(described) or 'none'}")


def kinds(layers: Mapping[str, Any] | None, n_layers: int) -> list[str | None]:
    """The name of each layer's kind, None where the model has no pattern. Raises ValueError for a description that is wrong."""
    check(layers)
    if (pattern := (layers or {}).get("pattern")) is None:
        return [None] * n_layers
    if len(pattern) > n_layers:
        raise ValueError(f"layers.pattern={list(pattern)}: names {len(pattern)} layers, and the model has {n_layers}; shorten it, or set "
                         f"model.n_layers={len(pattern)}")
    return [pattern[layer % len(pattern)] for layer in range(n_layers)]


def _described(layers: Any) -> dict[str, Mapping]:
    """What each kind overrides, by the kind's name. Raises ValueError for what is no such mapping."""
    if layers is None:
        return {}
    if not isinstance(layers, Mapping):
        raise ValueError(f"layers={layers!r}: must be a mapping of `pattern` and kinds of layers, or null; choose a file of configs/layers "
                         "with layers=<name>")
    described = {name: {} if own is None else own for name, own in layers.items() if name != "pattern"}
    for name, own in described.items():
        if not isinstance(own, Mapping):
            raise ValueError(f"layers.{name}={own!r}: must be a mapping of what layers of this kind override, such as "
                             "{attention: {window_size: [127, 0]}}")
        for key in own:
            if key not in BY_LAYER:
                like = like_it(difflib.get_close_matches(str(key), BY_LAYER))
                raise ValueError(f"layers.{name}.{key}: cannot differ by layer; {like}what can are {', '.join(BY_LAYER)}")
    return described


def overrides(layers: Mapping[str, Any] | None, kind: str | None) -> dict[str, Any]:
    """What layers of this kind override, without `attention`. A kind that is not rotary also resets the model's rotary options."""
    own = dict((layers or {}).get(kind) or {}) if kind else {}
    own.pop("attention", None)
    return {**(ROTARY if own.get("positions", "rotary") != "rotary" else {}), **own}


def attention(layers: Mapping[str, Any] | None, kind: str | None, base: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the attention of layers of this kind, in a model whose own attention config is `base`."""
    own = ((layers or {}).get(kind) or {}).get("attention") or {} if kind else {}
    if not isinstance(own, Mapping):
        raise ValueError(f"layers.{kind}.attention={own!r}: must be a mapping of options, or of a whole variant with its _target_")
    return dict(own) if "_target_" in own else {**base, **own}


def by_kind(model: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str | None, dict[str, Any]]:
    """The model's config as it holds for each kind of layer, with that kind's attention, by kind; the key is None without a pattern."""
    layers = model.get("layers")
    check(layers)
    found = dict.fromkeys((layers or {}).get("pattern") or [None])
    return {kind: {**model, **overrides(layers, kind), "attention": attention(layers, kind, base)} for kind in found}


def key(kind: str | None) -> str:
    """The command line's key for the attention of a kind."""
    return f"layers.{kind}.attention" if kind else "attention"


def attention_name(model: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """The names of a model's variants, and of its kinds of layers if it has a pattern: flash, or flash+differential[plain,last]."""
    found = by_kind(model, base)
    variants = "+".join(dict.fromkeys(own["attention"]["_target_"].split(".")[-2] for own in found.values()))
    return variants if None in found else f"{variants}[{','.join(map(str, found))}]"


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`new` itself if it has both a pattern and kinds. Otherwise `old`, with the pattern or the kinds of `new` merged over it."""
    if new and "pattern" in new and len(new) > 1:
        return copy.deepcopy(dict(new))
    return _merged(old or {}, new) if new else copy.deepcopy(old)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(old))
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and "_target_" not in value
        result[key] = _merged(result[key], value) if both else copy.deepcopy(value)
    return result


def check_positions(layers: Mapping[str, Any] | None, positions: str) -> None:
    """Raises ValueError where one of a kind and the model has learned positions, and the other has not."""
    for name, own in _described(layers).items():
        if (found := own.get("positions", positions)) != positions and "learned" in (found, positions):
            raise ValueError(f"layers.{name}.positions={found}: does not go with model.positions={positions}, because learned positions "
                             "are those of all layers; set model.positions=rotary, or leave positions out of the kind")


def changes(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, where: str = "layers") -> dict[str, Any]:
    """The values of `new` that differ from `old`, by dotted key. Where another variant is chosen, the value is its whole mapping."""
    found: dict[str, Any] = {}
    for key, value in (new or {}).items():
        before = (old or {}).get(key)
        inner = before if isinstance(before, Mapping) else {}
        if isinstance(value, Mapping) and value and value.get("_target_") in (None, inner.get("_target_")):
            found |= changes(inner, value, f"{where}.{key}")
        elif value != before:
            found[f"{where}.{key}"] = value
    return found
