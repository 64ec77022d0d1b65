"""Isolation between the jobs of a sweep, which share one process."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

from attnzoo.run.command_line import is_sweep


@contextlib.contextmanager
def ranks_of_this_job(run_dir: Path) -> Iterator[None]:
    """A context for one job. Lightning starts the other ranks of a machine by running the command again. In a sweep, that command must run
    this job alone, and the job's process group and environment must not be left to the next job."""
    if not is_sweep():
        yield
        return
    job = HydraConfig.get()
    sys.argv = [sys.argv[0], *job.overrides.task]
    with read_write(job), open_dict(job):
        job.run.dir = str(run_dir)
    environment = dict(os.environ)
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
