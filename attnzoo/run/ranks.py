"""The processes of a run with several ranks: checks that their settings agree, and makes them end together."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import lightning
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.logger import _flatten_dict

from attnzoo.errors import UserError

ALIKE = ("model", "attention", "layers", "task", "optimizer", "data", "trainer", "seed", "batch_tokens", "compile",
         "activation_checkpointing", "fused_loss")
MAY_DIFFER = ("trainer.default_root_dir", "data.cache_dir", "data.paths", "data.val_paths", "data.num_workers")


def check_alike(config: dict[str, Any], record: dict[str, Any]) -> None:
    """Raises ValueError on every rank if the ranks differ in config, data files or package versions. Waits for all ranks.

    config: of train.py, with interpolations resolved. record: the description that is written to a checkpoint.
    """
    from attnzoo_kernels.context_parallel import check_alike as check  # fails with a PyTorch that is built without torch.distributed

    settings = _flatten_dict({key: config[key] for key in ALIKE if config.get(key) is not None}, delimiter=".")
    known = {"data.paths": record["data"].get("sha256"), **_flatten_dict({"versions": record["versions"]}, delimiter=".")}
    check(**{name: value for name, value in settings.items() if not name.startswith(MAY_DIFFER)}, **known)


@contextlib.contextmanager
def end_together(trainer: lightning.Trainer) -> Iterator[None]:
    """For processes that Lightning itself started on this machine: the others end within seconds after the first one, and if one of them
    fails, the first raises a UserError that names it. Other launchers do this themselves."""
    environment = trainer._accelerator_connector.cluster_environment
    if trainer.world_size == 1 or not isinstance(environment, LightningEnvironment):
        yield
        return
    done = threading.Event()
    if trainer.local_rank > 0:
        threading.Thread(target=_end_after, args=(os.getppid(), done), daemon=True).start()
    try:
        yield
    except RuntimeError as error:  # such as a connection that was closed
        if reason := _failed(trainer):
            raise UserError(f"{reason}, so that the run ends here; if that process said why, it stands above") from error
        raise
    finally:
        done.set()


def _end_after(parent: int, done: threading.Event) -> None:
    """Ends this process once its parent has ended, even if it is blocked. done: set when the process ends by itself."""
    while not done.wait(1):
        if os.getppid() != parent:
            if not done.wait(5):
                os.write(2, b"error: the first process of the run has ended, so that this one ends, too\n")
                os._exit(1)
            return


def _failed(trainer: lightning.Trainer) -> str | None:
    """Which of the processes that this one started failed, and how."""
    for _ in range(20):  # a failing process closes its connections before it has ended
        for rank, process in enumerate(getattr(trainer.strategy.launcher, "procs", ()), 1):
            if code := process.poll():
                return f"rank {rank} " + (f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}")
        time.sleep(0.1)
    return None
