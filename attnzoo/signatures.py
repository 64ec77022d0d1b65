"""Options against the annotations of what takes them: one of a wrong kind is refused by its name, before something compares or adds it."""

import contextlib
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
    """By argument; without those annotations that cannot be read, as names that are imported for type checkers only."""
    functions = [target] if inspect.isfunction(target) else []
    if isinstance(target, type):
        functions = [vars(owner)["__init__"] for owner in reversed(target.__mro__) if inspect.isfunction(vars(owner).get("__init__"))]
    hints = {}
    for function in functions:
        for name, hint in inspect.get_annotations(function).items():
            with contextlib.suppress(Exception):
                hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return hints


def _is_list(hint: Any) -> bool:
    return (typing.get_origin(hint) or hint) in (list, tuple, Sequence)


def _fits(value: Any, hint: Any) -> bool:
    if not isinstance(value, bool | int | float | str | None | list | tuple | Mapping):
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in inner
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
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(kind) for kind in inner if kind is not int or float not in inner)
    if _is_list(hint):
        return " of ".join(["a list", *{f"{KINDS[kind].removeprefix('a ')}s": None for kind in typing.get_args(hint) if kind in KINDS}])
    return KINDS.get(hint, "a mapping")
