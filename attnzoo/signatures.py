"""Options against the annotations of what takes them: one of a wrong kind is refused by its name, before something compares or adds it."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


def check_kinds(where: str, target: Callable, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option `where.name` that is not what `target`, or a class that it derives from, says of its argument.

    Looked at are the kinds that a configuration holds: numbers, texts, true and false, null, lists and mappings.
    """
    hints = _hints(target)
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{where}.{name}={value!r}: must be {_words(hints[name])}")


def _hints(target: Callable) -> dict[str, Any]:
    if not isinstance(target, type):
        return typing.get_type_hints(target)
    initialisers = [vars(owner)["__init__"] for owner in reversed(target.__mro__) if inspect.isfunction(vars(owner).get("__init__"))]
    return {name: hint for initialiser in initialisers for name, hint in typing.get_type_hints(initialiser).items()}


def _is_list(hint: Any) -> bool:
    return (typing.get_origin(hint) or hint) in (list, tuple, Sequence)


def _fits(value: Any, hint: Any) -> bool:
    if not isinstance(value, bool | int | float | str | None | list | tuple | Mapping):
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if _is_list(hint):
        items = inner[:1] if len(set(inner) - {...}) == 1 else ()
        return isinstance(value, list | tuple) and all(_fits(item, kind) for item in value for kind in items)
    if hint in KINDS:
        wanted = (int, float) if hint is float else hint
        return isinstance(value, wanted) and (hint is bool or not isinstance(value, bool))
    return origin is not Mapping or isinstance(value, Mapping)


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_words, typing.get_args(hint)))
    if _is_list(hint):
        return " of ".join(["a list", *{f"{KINDS[kind].removeprefix('a ')}s": None for kind in typing.get_args(hint) if kind in KINDS}])
    return KINDS.get(hint, "a mapping")
