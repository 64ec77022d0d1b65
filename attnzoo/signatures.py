"""Checks of options against the signature of the class or function that takes them: an unknown option, or one of a wrong type, is refused
with its name before it is used.

No torch here. The types below are for annotations and for attnzoo.run.values; pydantic decides which values fit them.
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
    """Raises ValueError for an option `where.name` that `target` does not take, or that does not fit its annotation.

    Only types that a configuration holds are checked: numbers, strings, booleans, null, lists and mappings. If `target` takes `**others`,
    these are checked against the class that it derives from, or against the functions and classes in its attribute `options_of`.
    """
    hints, taken = _hints(target), _taken(target)
    for name, value in options.items():
        if taken is not None and name not in taken and name not in HYDRAS:
            near = difflib.get_close_matches(name, taken)
            raise ValueError(f"{where}.{name}: {target.__name__} has no such option" + (f"; like it: {', '.join(near)}" if near else ""))
        if name in hints:
            check_value(f"{where}.{name}", value, hints[name])


def check_value(where: str, value: Any, hint: Any) -> None:
    """Raises ValueError if a value of a configuration does not fit a type."""
    if not fits(value, hint):
        raise ValueError(f"{where}={value!r}: must be {words(hint)}")


def _functions(target: Callable) -> list[Callable]:
    """A function and those that it passes options on to; or the `__init__` of a class and of the classes that it derives from."""
    if inspect.isfunction(target):
        return [target, *(function for other in getattr(target, "options_of", ()) for function in _functions(other))]
    owners = target.__mro__ if isinstance(target, type) else ()
    return [vars(owner)["__init__"] for owner in owners if inspect.isfunction(vars(owner).get("__init__"))]


def _taken(target: Callable) -> set[str] | None:
    """The names of all arguments that it takes, directly or passed on as `**others`; None if it takes any name."""
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
    """Annotations by argument, without those that cannot be evaluated, such as names that are imported for type checkers only."""
    hints = {}
    for function in reversed(_functions(target)):
        for name, hint in inspect.get_annotations(function).items():
            with contextlib.suppress(Exception):
                hints[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return hints


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a configuration fits a type."""
    try:
        written = json.dumps(value)
    except TypeError:  # made by other code, not read from a configuration
        return True
    if '"_target_"' in written:  # the object that it describes is not built yet
        return True
    try:
        # as JSON, so that a list fits a tuple, and strictly, so that "3" does not fit a number and true does not fit 1
        _adapter(hint).validate_json(written)
    except ValidationError as error:
        return any(one["type"] in ("needs_python_object", "callable_type") for one in error.errors())  # made by other code
    except PydanticUserError:  # pydantic cannot check this type, such as a Callable's
        return True
    return True


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def words(hint: Any) -> str:
    """A description of a type's values for messages, such as "a whole number of at least 1 or null"."""
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
