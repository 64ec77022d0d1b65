"""Options against the signature of what takes them: an unknown one, or one of a wrong kind, is refused by its name before it is used."""

import contextlib
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_")


def check_options(where: str, target: Callable, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option `where.name` that `target` does not take, or that is not what its annotation says.

    Looked at are the kinds that a configuration holds: numbers, texts, true and false, null, lists and mappings.
    """
    hints, taken = _hints(target), _taken(target)
    for name, value in options.items():
        if taken is not None and name not in taken and name not in HYDRAS:
            near = difflib.get_close_matches(name, taken)
            raise ValueError(f"{where}.{name}: {target.__name__} has no such option" + (f"; like it: {', '.join(near)}" if near else ""))
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{where}.{name}={value!r}: must be {_words(hints[name])}")


def _functions(target: Callable) -> list[Callable]:
    """The function itself, or the `__init__` of a class and of those that it derives from."""
    if inspect.isfunction(target):
        return [target]
    owners = target.__mro__ if isinstance(target, type) else ()
    return [vars(owner)["__init__"] for owner in owners if inspect.isfunction(vars(owner).get("__init__"))]


def _taken(target: Callable) -> set[str] | None:
    """The names of its arguments, and where it hands on `**others` of the next class's; None where that has no end."""
    names = set()
    for function in _functions(target):
        kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
        names |= kinds.keys() - {"self"}
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            return names
    return None


def _hints(target: Callable) -> dict[str, Any]:
    """By argument; without those annotations that cannot be read, as names that are imported for type checkers only."""
    hints = {}
    for function in reversed(_functions(target)):
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
