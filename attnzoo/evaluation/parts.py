"""An evaluation by several processes of one machine, one for each GPU: each measures its part of the readings, and what they kept is read
again for one report."""

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
    """Of part=[i, n] every n-th from the i-th on; all of them for None."""
    return list(pairs) if part is None else list(pairs[part[0] :: part[1]])


def check(cfg: DictConfig) -> None:
    """UserError for more devices than there are, and for what `devices` does not go with."""
    if cfg.devices == 1:
        return
    if cfg.part is not None:
        raise UserError(f"devices={cfg.devices}, part={list(cfg.part)}: devices gives its processes a part each; set one of them")
    if is_sweep() or os.environ.get("TORCHELASTIC_RUN_ID"):
        raise UserError(f"devices={cfg.devices}: goes neither with -m nor with torchrun, which start processes of their own; set devices=1")
    if (gpus := _gpus(cfg.accelerator)) is not None and cfg.devices > len(gpus):
        raise UserError(f"devices={cfg.devices}: there are {len(gpus)} GPUs")


def measure(cfg: DictConfig) -> None:
    """Starts the command once for each of `devices` with its part, and waits. What a process that failed has not measured is left."""
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
    """As CUDA_VISIBLE_DEVICES names them; None where CPUs are taken."""
    if together.device_number(accelerator) is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
