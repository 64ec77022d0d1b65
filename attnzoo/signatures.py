"""Options against the signature of what takes them: an unknown one, or one of a wrong kind, is refused by its name before it is used.

No torch here. The types below are for annotations and for attnzoo.run.values; a library, pydantic, says what fits them.
"""

import contextlib
import difflib
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
BOUNDS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "at most {}", "min_length": "of length {} or more"}
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def check_options(where: str, target: Callable, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option `where.name` that `target` does not take, or that is not what its annotation says.

    Looked at are the kinds that a configuration holds: numbers, texts, true and false, null, lists and mappings. What `target` hands on as
    `**others` goes to the class that it derives from, or to the functions and classes in its attribute `options_of`.
    """
    hints, taken = _hints(target), _taken(target)
    for name, value in options.items():
        if taken is not None and name not in taken and name not in HYDRAS:
            near = difflib.get_close_matches(name, taken)
            raise ValueError(f"{where}.{name}: {target.__name__} has no such option" + (f"; like it: {', '.join(near)}" if near else ""))
        if name in hints:
            check_value(f"{where}.{name}", value, hints[name])


def check_value(where: str, value: Any, hint: Any) -> None:
    """Raises ValueError where a value of a configuration is not what a type says."""
    if not fits(value, hint):
        raise ValueError(f"{where}={value!r}: must be {words(hint)}")


def _functions(target: Callable) -> list[Callable]:
    """The function itself and what it hands options on to, or the `__init__` of a class and of those that it derives from."""
    if inspect.isfunction(target):
        return [target, *(function for other in getattr(target, "options_of", ()) for function in _functions(other))]
    owners = target.__mro__ if isinstance(target, type) else ()
    return [vars(owner)["__init__"] for owner in owners if inspect.isfunction(vars(owner).get("__init__"))]


def _taken(target: Callable) -> set[str] | None:
    """The names of its arguments, and where it hands on `**others` of the next one's; None where that has no end."""
    if others := getattr(target, "options_of", ()):
        taken = [_taken(other) for other in others]
        return None if None in taken else _names(target).union(*taken)
    names = set()
    for function in _functions(target):
        names |= _names(function)
        if inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in inspect.signature(function).parameters.values()}:
            return names
    return None


def _names(function: Callable) -> set[str]:
    return inspect.signature(function).parameters.keys() - {"self"}


def _hints(target: Callable) -> dict[str, Any]:
    """By argument; without those annotations that cannot be read, as names that are imported for type checkers only."""
    hints = {}
    for function in reversed(_functions(target)):
        for name, hint in inspect.get_annotations(function).items():
            with contextlib.suppress(Exception):
                hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return hints


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a configuration is what a type says."""
    try:
        written = json.dumps(value)
    except TypeError:  # made by other code, not read from a configuration
        return True
    if '"_target_"' in written:  # what it makes is not known yet
        return True
    try:
        # as JSON, where a list may be meant for a tuple, and strictly, so that "3" is no number and true is no 1
        _adapter(hint).validate_json(written)
    except ValidationError as error:
        return any(one["type"] in ("needs_python_object", "callable_type") for one in error.errors())  # made by other code
    except PydanticUserError:  # not a type that values are read by, such as a Callable's
        return True
    return True


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def words(hint: Any) -> str:
    """What a value of this type is, such as "a whole number of at least 1 or null"."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(dict.fromkeys(map(str, inner)))
    if origin in (typing.Union, types.UnionType):
        kinds = [words(kind) for kind in inner if kind is not int or float not in inner]
        return " or ".join(dict.fromkeys(word for kind in kinds for word in kind.split(" or ")))
    if origin is Annotated:
        return " ".join([words(inner[0]), " and ".join(_bounds(inner[1:]))]).strip()
    if (origin or hint) in (list, tuple, Sequence):
        number = f"{len(inner)} " if (origin or hint) is tuple and Ellipsis not in inner and inner else ""
        items = {f"{number}{words(kind).removeprefix('a ')}".replace("number", "numbers").replace("text", "texts") for kind in inner
                 if typing.get_origin(kind) is Annotated or kind in KINDS}
        return " of ".join(["a list", *sorted(items)])
    return KINDS.get(hint, "a mapping")


def _bounds(given: Sequence[Any]) -> list[str]:
    found = [item for one in given for item in (one.metadata if isinstance(one, FieldInfo) else [one])]
    return [phrase.format(getattr(item, name)) for name, phrase in BOUNDS.items() for item in found if hasattr(item, name)]
