"""LightningDataModules for text, tasks made by rule and labelled text: sources, tokenizers, packing, masking and exact positions.

Each name is imported on first access, so that sources and tokenizers can be used without torch.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "attnzoo.data.classification": ("ClassificationDataModule", "listops", "movie_reviews", "text_classification"),
    "attnzoo.data.datamodule": ("TextDataModule", "hf", "python_packages", "python_stdlib", "text"),
    "attnzoo.data.pairs": ("PairDataModule", "retrieval", "same_package"),
    "attnzoo.data.pixels": ("images", "pathfinder"),
    "attnzoo.data.synthetic.retrieval": ("PasskeyDataModule", "passkey"),
    "attnzoo.data.synthetic.tasks": ("TokenTask", "copying", "induction", "recall"),
    "attnzoo.data.trees": ("ContinuationDataModule", "continuations"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
