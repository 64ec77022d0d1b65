"""An evaluation by several processes on one machine, one for each GPU. Each measures a part of the readings and stores its results; then
one process makes the report from all stored results."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from omegaconf import DictConfig

from attnzoo.errors import UserError
from attnzoo.evaluation import together
from attnzoo.run.command_line import is_sweep

T = TypeVar("T")
log = logging.getLogger(__name__)


def own(pairs: Sequence[T], part: Sequence[int] | None) -> list[T]:
    """For part=[i, n] every n-th element, beginning with element i; for None all of them."""
    return list(pairs) if part is None else list(pairs[part[0] :: part[1]])


def check(cfg: DictConfig) -> None:
    """Raises UserError for more devices than there are, or for settings that `devices` cannot be combined with."""
    if cfg.devices == 1:
        return
    if cfg.part is not None:
        raise UserError(f"devices={cfg.devices}, part={list(cfg.part)}: devices gives its processes a part each; set one of them")
    if is_sweep() or os.environ.get("TORCHELASTIC_RUN_ID"):
        raise UserError(f"devices={cfg.devices}: goes neither with -m nor with torchrun, which start processes of their own; set devices=1")
    if (gpus := _gpus(cfg.accelerator)) is not None and cfg.devices > len(gpus):
        raise UserError(f"devices={cfg.devices}: there are {len(gpus)} GPUs")


def measure(cfg: DictConfig) -> None:
    """Starts the command once for each of `devices` with its part, and waits. What a failed process has not measured is left for the
    caller."""
    gpus, n = _gpus(cfg.accelerator), cfg.devices
    # only the first process logs
    told = [argument for argument in sys.argv if not argument.lstrip("+~").startswith("logger")]
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        try:
            for i in range(n):
                threads = str(max(1, torch.get_num_threads() // n))
                device = {"OMP_NUM_THREADS": threads} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus[i]}
                with Path(folder, f"{i}.log").open("wb") as output:
                    started[i] = subprocess.Popen(
                        [sys.executable, *told, "devices=1", f"part=[{i},{n}]", f"hydra.run.dir={folder}/{i}"],
                        stdout=output, stderr=subprocess.STDOUT, env=os.environ | device)
            log.info(f"{n} processes measure a part each")
            while started:
                for i in [i for i, process in started.items() if process.poll() is not None]:
                    code = started.pop(i).returncode
                    last = Path(folder, f"{i}.log").read_text(errors="replace").strip().rpartition("\n")[2]
                    if code == 0:
                        log.info(f"process {i} has ended, {len(started)} are at work")
                    else:
                        log.warning(f"process {i} ended with exit status {code}; what it has not measured is measured here: {last}")
                time.sleep(0.2)
        finally:
            for process in started.values():
                process.terminate()
            for process in started.values():
                process.wait()


def _gpus(accelerator: str) -> list[str] | None:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; None where the evaluation runs on the CPU."""
    if together.device_number(accelerator) is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
