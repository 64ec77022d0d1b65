"""Text for training and evaluation: sources, tokenizers, packing, masking and exact positions, behind one LightningDataModule."""

from attnzoo.data.datamodule import TextDataModule, hf, python_packages, python_stdlib, text

__all__ = ["TextDataModule", "hf", "python_packages", "python_stdlib", "text"]
