"""The other processes of a run, which Lightning starts by running the command again."""

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
OF_A_MACHINE = ("trainer.default_root_dir", "data.cache_dir", "data.paths", "data.val_paths", "data.num_workers")


def check_alike(config: dict[str, Any], record: dict[str, Any]) -> None:
    """Raises ValueError on every rank where they were told different things, have other texts or other versions. Waits for all of them.

    config: of train.py, without interpolations. record: what a checkpoint knows.
    """
    from attnzoo_kernels.context_parallel import check_alike as check  # which builds of PyTorch without distributed lack

    told = _flatten_dict({key: config[key] for key in ALIKE if config.get(key) is not None}, delimiter=".")
    known = {"data.paths": record["data"].get("sha256"), **_flatten_dict({"versions": record["versions"]}, delimiter=".")}
    check(**{name: value for name, value in told.items() if not name.startswith(OF_A_MACHINE)}, **known)


@contextlib.contextmanager
def end_together(trainer: lightning.Trainer) -> Iterator[None]:
    """Where Lightning started the other processes of this machine: none of them outlives the first by more than some seconds, and the first
    raises UserError that tells which of them failed. Other launchers see to that themselves."""
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
    """Ends this process, whatever it waits for, once its parent has ended. done: set when it ends by itself."""
    while not done.wait(1):
        if os.getppid() != parent:
            if not done.wait(5):
                os.write(2, b"error: the first process of the run has ended, so that this one ends, too\n")
                os._exit(1)
            return


def _failed(trainer: lightning.Trainer) -> str | None:
    """Which of the processes that this one started failed, and how."""
    for _ in range(20):  # its connections are closed before it has ended
        for rank, process in enumerate(getattr(trainer.strategy.launcher, "procs", ()), 1):
            if code := process.poll():
                return f"rank {rank} " + (f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}")
        time.sleep(0.1)
    return None
