"""A research model zoo of attention variants. `import attnzoo.hub` gives transformers its attention functions and model types."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attnzoo")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
