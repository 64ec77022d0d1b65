"""Text, tasks made by rule and labelled text: sources, tokenizers, packing, masking and exact positions, behind LightningDataModules."""

from attnzoo.data.classification import ClassificationDataModule, listops, text_classification
from attnzoo.data.datamodule import TextDataModule, hf, python_packages, python_stdlib, text
from attnzoo.data.pixels import images, pathfinder
from attnzoo.data.synthetic.retrieval import PasskeyDataModule, passkey
from attnzoo.data.synthetic.tasks import TokenTask, copying, induction, recall

__all__ = [
    "ClassificationDataModule",
    "PasskeyDataModule",
    "TextDataModule",
    "TokenTask",
    "copying",
    "hf",
    "images",
    "induction",
    "listops",
    "passkey",
    "pathfinder",
    "python_packages",
    "python_stdlib",
    "recall",
    "text",
    "text_classification",
]
