"""The base class of every data module: it makes loaders over numbered rows, and puts their position into the checkpoint."""

from typing import Any

import torch
from lightning import LightningDataModule

from attnzoo.batch import sharing
from attnzoo.data.loader import BatchLoader, ResumableLoader


class RowsDataModule(LightningDataModule):
    """Loaders for training and validation over the rows that a subclass makes (see attnzoo.data.loader).

    The train loader's position goes into the checkpoint with this module's state, so that a resumed run sees the batches that an
    uninterrupted one would have seen.

    A subclass sets `kind` (its name in records and errors), `batch_size`, `eval_batch_size`, `shuffle`, `num_workers`, and has

    - `_rows(split, shuffle=False)`: the rows of "train", "validation" (and other splits);
    - `_settings()`: plain JSON that the training rows and their order depend on;
    - `_newer_settings()`: more of it, which checkpoints of earlier versions do not have;
    - `packs`: whether attention gets its batches as packed sequences; this is so for padded rows too, as the model removes the padding;
    - `trees`: whether these sequences are segments of trees.
    """

    packs = False
    trees = False

    kind: str
    batch_size: int
    eval_batch_size: int
    shuffle: bool
    num_workers: int

    def __init__(self):
        super().__init__()
        self._train_loader: ResumableLoader | None = None
        self._state: dict | None = None

    def setup(self, stage: str | None = None) -> None:
        """Opens the data that the rows are made from; repeated calls do nothing."""

    def _rows(self, split: str, shuffle: bool = False) -> Any:
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def _newer_settings(self) -> dict[str, Any]:
        return {}

    def check_at_least(self, **least: int) -> None:
        """Raises ValueError unless each of these attributes is a whole number, and at least as large as given here."""
        for key, bound in least.items():
            value = getattr(self, key)
            if not isinstance(value, int) or value < bound:
                raise ValueError(f"data.{key}={value} must be {'a whole number, ' * (not isinstance(value, int))}at least {bound}")

    def _loader_options(self) -> dict:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        rank, world_size = rank // sharing(self.trainer), world_size // sharing(self.trainer)
        return {"rank": rank, "world_size": world_size, "num_workers": self.num_workers, "pin_memory": torch.cuda.is_available()}

    def train_dataloader(self) -> BatchLoader:
        overfit = self.trainer.overfit_batches if self.trainer else 0
        rows = self._rows("train", self.shuffle and not overfit)
        settings = {"settings": self._settings(), "newer": self._newer_settings(), "overfit": overfit}
        self._train_loader = ResumableLoader(rows, self.batch_size, **settings, **self._loader_options())
        if self._state is not None:
            self._train_loader.load_state_dict(self._state)
        return self._train_loader

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(self._rows("validation"), self.eval_batch_size, **self._loader_options())

    def state_dict(self) -> dict:
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        self._state = state_dict.get("train_loader")
        if self._train_loader is not None and self._state is not None:  # sharded strategies restore after the loader was made
            self._train_loader.load_state_dict(self._state)
