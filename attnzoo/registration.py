"""Tells transformers of attnzoo when it is imported, so that `import attnzoo` itself costs nothing."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def _interface() -> None:
    from attnzoo.hub.interface import register

    register()


def _configs() -> None:
    from attnzoo.hub.auto import register_configs

    register_configs()


def _models() -> None:
    from attnzoo.hub.auto import register_models

    register_models()


class _AfterImport(MetaPathFinder):
    """Runs a function once, after a module was imported."""

    def __init__(self, waiting: dict[str, Callable[[], None]]):
        self.waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        then = self.waiting.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then()

        spec.loader.exec_module = exec_module
        return spec


@functools.cache
def register() -> None:
    """Now, of what is imported already, or later; once, however often it is called."""
    steps = {"transformers.models.auto.configuration_auto": _configs, "transformers.modeling_utils": _interface,
             "transformers.models.auto.modeling_auto": _models}
    later = {name: then for name, then in steps.items() if name not in sys.modules}
    for name in steps.keys() - later.keys():
        steps[name]()
    if later:
        sys.meta_path.insert(0, _AfterImport(later))
