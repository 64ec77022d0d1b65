"""Signals that ask a run to stop. They only set a flag; the training loop acts on it at the end of an optimizer step."""

import contextlib
import os
import signal
import threading
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment

from attnzoo.run.folder import rank

WORDS = b"\nstopping at the end of this optimizer step (Ctrl-C: at once, without a checkpoint)\n"


class StopSignals:
    """A context in which SIGINT, SIGTERM and SLURM's SIGUSR1 only set `received`. A second Ctrl-C raises KeyboardInterrupt at once.

    requeue: whether SLURM is asked to start the job again after its SIGUSR1.
    """

    def __init__(self, *, requeue: bool = False):
        self.received = 0
        self.requeue = requeue
        self._before: dict[int, Any] = {}
        self._group: Any = None
        self._process = os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, _: Any) -> None:
        if os.getpid() != self._process:  # a worker that the loader forked: the training process ends it
            return
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received and rank() == 0:
            with contextlib.suppress(OSError):  # the same Ctrl-C also ends a `| tee`
                os.write(2, WORDS)  # not by a logger, whose lock the interrupted code may hold
        self.received = number

    def install(self, trainer: lightning.Trainer) -> None:
        """Keeps Lightning from handling these signals: it would save in the middle of a step, and wait for other ranks in the handler."""
        trainer._signal_connector.register_signal_handlers = lambda: None

    def agreed(self, trainer: lightning.Trainer) -> int:
        """The signal that any rank has received, the same on all; 0 for none. All ranks must ask at the same step; no GPU is waited for."""
        if trainer.world_size == 1:
            return self.received
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        flag = torch.tensor(self.received, dtype=torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._group)
        return int(flag)

    def slurm_job(self, trainer: lightning.Trainer, number: int) -> str | None:
        """The SLURM job to start again after this signal; None where there is none, or none that would go on."""
        environment = trainer._accelerator_connector.cluster_environment
        if not self.requeue or number != getattr(signal, "SIGUSR1", None) or not isinstance(environment, SLURMEnvironment):
            return None
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")
