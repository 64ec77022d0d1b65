"""Commands by processes that a server forks, which has imported once what takes a command seconds to import."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tiny_run import ROOT

PRELOAD = ["sympy", "lightning", "attnzoo.runner", "attnzoo.models", "attnzoo.training.lm"]


class Command:
    """`python <script> <arguments>`, at work from now on, on one thread."""

    def __init__(self, script: str, *arguments: str, environment: dict[str, str] | None = None):
        self.arguments, self.folder = [script, *arguments], tempfile.TemporaryDirectory()
        multiprocessing.set_forkserver_preload(PRELOAD)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_run, args=(self.arguments, self.folder.name, {**os.environ, **(environment or {})}))
        self.process.start()

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        texts = [Path(self.folder.name, name).read_text() for name in ("stdout", "stderr")]
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *texts)


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = arguments
    torch.set_num_threads(1)
    runpy.run_path(arguments[0], run_name="__main__")


def as_torchrun(ranks: int) -> list[dict[str, str]]:
    """Each rank's environment as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"} for rank in range(ranks)]
