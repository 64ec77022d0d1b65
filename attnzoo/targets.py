"""Checks of the classes that a config names by `_target_`: only trusted ones may be called, because a checkpoint may be untrusted."""

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any


def targets(config: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every `_target_` in nested dictionaries and lists."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield f"{where}._target_", config["_target_"]
        for key, value in config.items():
            yield from targets(value, f"{where}.{key}")
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from targets(value, f"{where}[{index}]")


def check_targets(config: Any, trusted: Sequence[str], where: str, known: Collection[str] = ()) -> None:
    """Raises ValueError for a `_target_` that is neither `known` nor inside one of the `trusted` modules. Imports nothing.

    where: the name of the config in the error.
    """
    for key, target in targets(config, where):
        if not isinstance(target, str) or (target not in known and not inside(target.rpartition(".")[0], trusted)):
            module = str(target).rpartition(".")[0]
            raise ValueError(f"{key}={target!r}: is outside attnzoo and the trusted modules; if you know whose code it is, name its module "
                             f"in `trust`: say trust=[{module}]")


def inside(module: str, trusted: Sequence[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in trusted)


def resolve(target: str, trusted: Sequence[str], kind: type | None = None) -> Any:
    """The object that a checked target names. It must be defined in a trusted module, not merely be imported there.

    kind: what it must be a subclass of; None takes functions too. Raises ValueError.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"_target_={target!r}: cannot be imported ({error})") from error
    fits = kind is None or isinstance(found, type) and issubclass(found, kind)
    if not fits or not inside(getattr(found, "__module__", ""), trusted):
        must = "be" if kind is None else f"be a subclass of {kind.__name__} that is"
        raise ValueError(f"_target_={target!r}: must {must} defined in {' or '.join(trusted)}")
    return found
