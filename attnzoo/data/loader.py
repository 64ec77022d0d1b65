"""Loaders of numbered batches: the rows of a batch are a pure function of (seed, epoch, step), so that two integers are a position.

The rows of a data set are an object with

- `n_rows`: int, the number of rows in an epoch;
- `order(epoch, group) -> int64 (n_rows,)`: the rows in the epoch's order (`group`: the number of rows that all devices together take in a
  step);
- `n_slots(group)`, only if an order may also hold numbers from `n_rows` on: the length of an order, the same in every epoch;
- `batch(epoch, rows) -> attnzoo.batch.Batch`: the batch of these rows. A number from `n_rows` on stands for padding.

`W` devices with `batch_size` rows each together take exactly the rows that one device with `W * batch_size` rows takes in the same step.
"""

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from attnzoo.batch import Batch


class _Batches(Dataset):
    """The batches of one device, addressed by (epoch, step)."""

    def __init__(self, rows, batch_size: int, rank: int, world_size: int, repeat: bool):
        self.rows, self.repeat = rows, repeat
        self.group = batch_size * world_size
        self.mine = np.arange(batch_size) + batch_size * rank
        self.n_slots = rows.n_slots(self.group) if hasattr(rows, "n_slots") else rows.n_rows
        self.epoch, self.order = None, None

    def __len__(self) -> int:
        return -(-self.n_slots // self.group)

    def begin(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.rows.order(epoch, self.group)

    def __getitem__(self, position: tuple[int, int]) -> Batch:
        epoch, step = position
        self.begin(epoch)
        slots = step * self.group + self.mine
        rows = self.order[slots % self.n_slots]
        return self.rows.batch(epoch, rows if self.repeat else np.where(slots < self.n_slots, rows, slots))


def _as_it_is(batch: Batch) -> Batch:
    # DataLoader's default makes tensors of numpy arrays; they would go to the GPU, and the host would have to wait to read them
    return batch


def _outlive_sigterm(worker: int) -> None:
    """Makes a worker ignore SIGTERM, which `timeout` and schedulers send to all processes of a run.

    The training process finishes its step first, and then it ends its workers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class BatchLoader:
    """All rows once, in a fixed order. The last batches are filled with padding, so that all devices take the same number of steps.

    It is not a `torch.utils.data.DataLoader` (it makes a new one whenever it is iterated), so Lightning does not inject a distributed
    sampler.

    Args:
        rows: see the module's docstring.
        batch_size: rows of one device in one step.
        rank, world_size: the number of this device, and the number of all devices.
        num_workers: processes that make batches in advance; with 0 this process makes them.
        pin_memory: whether the batch's tensors lie in page-locked memory.
    """

    repeat = False

    def __init__(self, rows, batch_size: int, *, rank: int = 0, world_size: int = 1, num_workers: int = 0, pin_memory: bool = False):
        self.batches = _Batches(rows, batch_size, rank, world_size, self.repeat)
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._from(0, 0))

    def _from(self, epoch: int, step: int) -> DataLoader:
        self.batches.begin(epoch)  # here once, because forked workers share it
        positions = ((epoch, i) for i in range(step, len(self)))
        return DataLoader(
            self.batches, batch_size=None, sampler=positions, collate_fn=_as_it_is, num_workers=self.num_workers,
            pin_memory=self.pin_memory, worker_init_fn=_outlive_sigterm)


class ResumableLoader(BatchLoader):
    """Training batches of one epoch after another without end, from any position on. An epoch's last batch is filled with its first rows.

    One iteration yields `len()` batches from the position on, even if that lies inside an epoch. Lightning's own count of epochs and
    batches is not used, because it is not exact after every kind of interruption.

    Args:
        settings: plain JSON that rows and their order depend on (seed, sequence length, ...); a state with other settings is refused.
        newer: more of these, which states of earlier versions do not have; then they are not compared.
        overfit: Lightning's `overfit_batches`: so many batches of the first epoch (a float: this share of them) are read again and again;
            0 for all batches of all epochs.

    Attributes:
        position: the number of batches yielded so far.
    """

    repeat = True

    def __init__(self, rows, batch_size: int, *, settings: dict[str, Any] | None = None, newer: dict[str, Any] | None = None,
                 world_size: int = 1, overfit: int | float = 0, **options):
        super().__init__(rows, batch_size, world_size=world_size, **options)
        self.few = min(overfit, len(self)) if isinstance(overfit, int) else int(overfit * len(self))
        self.newer = newer or {}
        self.settings = {**(settings or {}), **self.newer, "rows": rows.n_rows, "rows in a step over all devices": batch_size * world_size}
        if self.few:
            self.settings["overfit_batches"] = self.few
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        # this is a generator: it reads the position at the first batch, so a state that is loaded after iter() still counts
        left = len(self)
        while left:
            place = (0, self.position % self.few) if self.few else divmod(self.position, len(self))
            for batch in itertools.islice(self._from(*place), left):
                self.position += 1
                left -= 1
                yield batch

    def state_dict(self) -> dict:
        return {"position": self.position, "settings": self.settings}

    def load_state_dict(self, state: dict) -> None:
        """Continues after the last batch that was yielded before `state` was taken.

        Raises:
            ValueError: `state` has no position and settings, or it has other settings, with which a position means something else.
        """
        if not isinstance(state.get("settings"), dict) or not isinstance(state.get("position"), int):
            raise ValueError("cannot resume in the middle of the data: the checkpoint's state of the loader has no position and settings")
        was, now = self.newer | state["settings"], self.settings
        if differ := [f"{key} is {now.get(key)!r}, it must be {was.get(key)!r}" for key in sorted(now.keys() | was.keys())
                      if was.get(key) != now.get(key)]:
            raise ValueError(f"cannot resume in the middle of the data: {'; '.join(differ)} as in the checkpoint")
        self.position = state["position"]
