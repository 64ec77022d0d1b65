"""Positions: the same rows on any number of devices, and exact resumption, alone and inside Lightning."""

import multiprocessing

import lightning
import numpy as np
import pytest
import torch
from torch import nn

from attnzoo.data import text
from attnzoo.data.loader import BatchLoader, ResumableLoader


class NumberedRows:
    """Eleven rows whose batch says which rows it holds."""

    n_rows = 11

    def order(self, epoch, group):
        return np.random.default_rng(epoch).permutation(self.n_rows)

    def batch(self, epoch, rows):
        return {"epoch": epoch, "rows": rows.tolist()}


def rows_of(loader):
    return [batch["rows"] for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_cover_all_rows_and_differ(num_workers):
    loader = ResumableLoader(NumberedRows(), 4, num_workers=num_workers)
    epochs = [rows_of(loader) for _ in range(3)]
    for epoch in epochs:
        flat = sum(epoch, [])
        assert len(epoch) == len(loader) == 3 and len(flat) == 12
        assert set(flat) == set(range(11)) and flat[11] == flat[0]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("loader", [ResumableLoader, BatchLoader])
@pytest.mark.parametrize("world_size", [2, 3])
def test_devices_share_the_rows_of_one(loader, world_size):
    one = rows_of(loader(NumberedRows(), 2 * world_size))
    many = [rows_of(loader(NumberedRows(), 2, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert one == [sum(step, []) for step in zip(*many, strict=True)]


def test_validation_is_each_row_once_and_the_same_again():
    loader = BatchLoader(NumberedRows(), 4)
    assert rows_of(loader) == rows_of(loader)
    flat = sum(rows_of(loader), [])
    assert sorted(flat) == list(range(12))  # 11 is padding


class CountedRows(NumberedRows):
    def batch(self, epoch, rows):
        return {"input_ids": torch.from_numpy(rows), "lengths": rows, "n_tokens": len(rows)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_tensors_go_to_the_device(num_workers):
    for batch in BatchLoader(CountedRows(), 4, num_workers=num_workers, pin_memory=torch.cuda.is_available()):
        assert {name: type(value) for name, value in batch.items()} == {"input_ids": torch.Tensor, "lengths": np.ndarray, "n_tokens": int}


def test_workers_go_on_when_all_processes_of_a_run_are_asked_to_stop():
    loader = BatchLoader(NumberedRows(), 1, num_workers=1)
    batches = iter(loader)
    rows = [next(batches)["rows"]]
    (worker,) = multiprocessing.active_children()
    worker.terminate()  # SIGTERM
    rows += [batch["rows"] for batch in batches]
    assert rows == rows_of(BatchLoader(NumberedRows(), 1))
    worker.join(10)
    assert worker.exitcode == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumes_anywhere(num_workers):
    reference = ResumableLoader(NumberedRows(), 2)
    expected = rows_of(reference) + rows_of(reference)
    for n_seen in range(len(expected)):
        stopped = ResumableLoader(NumberedRows(), 2, num_workers=num_workers)
        seen = []
        while len(seen) < n_seen:
            for batch in stopped:
                seen.append(batch["rows"])
                if len(seen) == n_seen:
                    break
        assert seen == expected[:n_seen]
        resumed = ResumableLoader(NumberedRows(), 2)
        iterator = iter(resumed)  # a state may come after iter()
        resumed.load_state_dict(stopped.state_dict())
        assert [batch["rows"] for batch in iterator][: len(expected) - n_seen] == expected[n_seen : n_seen + len(resumed)]


def test_iterating_goes_on_from_the_position():
    loader, reference = (ResumableLoader(NumberedRows(), 4) for _ in range(2))
    expected = rows_of(reference) + rows_of(reference)
    next(iter(loader))
    assert rows_of(loader) == expected[1:4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 4}, "rows in a step over all devices is 4, it must be 2"),
        ({"settings": {"seed": 2}}, "seed is 2, it must be 1"),
    ],
)
def test_state_of_other_settings_is_refused(changed, message):
    state = ResumableLoader(NumberedRows(), batch_size=2, settings={"seed": 1}).state_dict()
    with pytest.raises(ValueError, match=message):
        ResumableLoader(NumberedRows(), **{"batch_size": 2, "settings": {"seed": 1}, **changed}).load_state_dict(state)


def test_same_global_batch_on_more_devices_resumes():
    state = {**ResumableLoader(NumberedRows(), 4).state_dict(), "position": 1}
    loaders = [ResumableLoader(NumberedRows(), 2, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(state)
    together = [sum(step, []) for step in zip(*map(rows_of, loaders), strict=True)]
    assert together[:2] == rows_of(ResumableLoader(NumberedRows(), 4))[1:]


class Recorder(lightning.LightningModule):
    """Learns nothing much; remembers its batches. Its schedule asks for the number of steps, for which Lightning makes the loader early."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * batch["input_ids"].float().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/targets", float(batch["n_targets"]), batch_size=1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StopAfter(lightning.Callback):
    """Saves after a number of steps, at the given hook, as an interrupted run would have."""

    def __init__(self, step, hook, path):
        self.step, self.hook, self.path = step, hook, path

    def _save(self, trainer, hook):
        if hook == self.hook and trainer.global_step == self.step and not trainer.should_stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_train_batch_end(self, trainer, *_):
        self._save(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer, _):
        self._save(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer, _):
        self._save(trainer, "on_train_epoch_end")


BY_STEPS = {"max_steps": 17, "max_epochs": -1, "val_check_interval": 3, "check_val_every_n_epoch": None}  # an epoch has seven
BY_EPOCHS = {"max_epochs": 3}
OVERFIT = {"max_epochs": 3, "overfit_batches": 4}


def fit(folder, length, *, callbacks=(), ckpt_path=None, num_workers=0, **options):
    data = text(paths=str(folder / "text.txt"), seq_len=8, batch_size=4, num_workers=num_workers, cache_dir=str(folder / "cache"))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=list(callbacks), num_sanity_val_steps=0, **length, **quiet, **options)
    module = Recorder()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module.seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 240))))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder):
    return {"steps": fit(folder, BY_STEPS), "epochs": fit(folder, BY_EPOCHS), "overfit": fit(folder, OVERFIT)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("by", "step", "hook", "num_workers"),
    [
        ("steps", 1, "on_train_batch_end", 0),
        ("steps", 4, "on_train_batch_end", 2),
        ("steps", 6, "on_validation_end", 0),
        ("steps", 7, "on_train_batch_end", 0),
        ("steps", 7, "on_train_epoch_end", 0),
        ("steps", 10, "on_train_batch_end", 0),
        ("epochs", 1, "on_train_batch_end", 0),
        ("epochs", 7, "on_train_batch_end", 0),
        ("epochs", 7, "on_validation_end", 0),
        ("epochs", 10, "on_train_batch_end", 2),
        ("epochs", 14, "on_train_epoch_end", 0),
        ("overfit", 4, "on_train_epoch_end", 0),
        ("overfit", 6, "on_train_batch_end", 0),
    ],
)
def test_lightning_resumes_exactly(folder, uninterrupted, tmp_path, by, step, hook, num_workers):
    length = {"steps": BY_STEPS, "epochs": BY_EPOCHS, "overfit": OVERFIT}[by]
    path = tmp_path / "stopped.ckpt"
    before = fit(folder, length, callbacks=[StopAfter(step, hook, path)], num_workers=num_workers)
    after = fit(folder, length, ckpt_path=path, num_workers=num_workers)
    assert len(before) == step
    assert before + after == uninterrupted[by]


@pytest.mark.filterwarnings("ignore")
def test_overfitting_repeats_the_same_batches(folder):
    first, second, *others = fit(folder, {"max_epochs": 3}, overfit_batches=2)
    assert first != second
    assert others == [first, second] * 2


def test_state_that_comes_after_the_loader_counts(folder):
    """FSDP and other sharded strategies restore after Lightning has made the train loader."""
    options = {"paths": str(folder / "text.txt"), "seq_len": 8, "batch_size": 4, "cache_dir": str(folder / "cache")}
    first, second = text(**options), text(**options)
    first.setup()
    second.setup()
    batches = iter(first.train_dataloader())
    next(batches)
    iterator = iter(second.train_dataloader())
    second.load_state_dict(first.state_dict())
    assert torch.equal(next(iterator)["input_ids"], next(batches)["input_ids"])
