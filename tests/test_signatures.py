"""An option that does not exist or is of a wrong kind is refused by its name, also where a class inherits it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from attnzoo.signatures import check_options


class Trunk:
    def __init__(self, *, width: int, rate: float = 0.0, gated: bool = False, unknown=None, made: type[int] | None = None):
        pass


class Model(Trunk):
    def __init__(self, *, window: Sequence[int] = (), betas: tuple[float, float] = (0.9, 0.99),
                 pattern: str | Mapping[str, Any] | Sequence = "",
                 heads: int | None = None, share: int | float = 1.0, precision: Literal[16, 32] | Literal["bf16"] | None = None, **trunk):
        super().__init__(**trunk)


@pytest.mark.parametrize("options", [
    {"width": 3, "rate": 1, "gated": True, "unknown": "anything"}, {"rate": 0.5}, {"window": [1, -1]}, {"window": ()}, {"betas": [0, 0.9]},
    {"pattern": "name"}, {"pattern": {"name": "a"}}, {"pattern": ["a", {"name": "b"}]}, {"heads": None}, {"heads": 2}, {"_partial_": True},
    {"share": 1, "precision": 32}, {"share": 0.5, "precision": "bf16"}, {"precision": None},
])
def test_what_fits_passes(options):
    check_options("model", Model, options)


@pytest.mark.parametrize("options, message", [
    ({"width": "3"}, "model.width='3': must be a whole number"), ({"width": True}, "model.width=True: must be a whole number"),
    ({"width": 3.0}, "must be a whole number"), ({"rate": "fast"}, "model.rate='fast': must be a number"),
    ({"gated": 1}, "must be true or false"), ({"window": 5}, "model.window=5: must be a list of whole numbers"),
    ({"window": [1, "a"]}, "must be a list of whole numbers"), ({"betas": [0.9, None]}, "must be a list of 2 numbers"),
    ({"betas": [0.9]}, "must be a list of 2 numbers"),
    ({"pattern": 3}, "must be a text or a mapping or a list"), ({"heads": "all"}, "must be a whole number or null"),
    ({"widht": 3}, "model.widht: Model has no such option; like it: width$"), ({"zzz": 3}, "model.zzz: Model has no such option$"),
    ({"share": "x"}, "must be a number$"), ({"precision": "16"}, "must be 16 or 32 or bf16 or null"),
])
def test_what_does_not_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_options("model", Model, options)


def test_annotations_that_cannot_be_read_are_left_out():
    def make(path: "Unknown.Path", count: "int | None", other: "Sequence[Nowhere]"):  # noqa: F821
        pass

    check_options("data", make, {"path": 3, "other": 3, "count": 1})
    with pytest.raises(ValueError, match="data.count='b': must be a whole number or null"):
        check_options("data", make, {"count": "b"})


def test_what_takes_any_others_is_not_asked():
    def make(path: str, **others):
        pass

    class Open(dict):
        def __init__(self, path: str, **others):
            super().__init__(**others)

    for target in (make, Open, dict):
        check_options("data", target, {"path": "a", "another": 1})


def test_functions_have_annotations_too():
    def make(path: str, count: int = 1):
        pass

    check_options("data", make, {"path": "a"})
    with pytest.raises(ValueError, match="data.count='b': must be a whole number"):
        check_options("data", make, {"count": "b"})
