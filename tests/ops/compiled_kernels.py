"""Runs a script of this folder that compiles kernels for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path


def compiled_kernels(script: str, arch: int = 90, *arguments: str) -> list[dict]:
    """What it prints of each kernel, from a process of its own: the compiler needs another driver than the interpreter here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "ahead_of_time"))  # its metadata holds more than others'
    command = [sys.executable, Path(__file__).with_name(script), str(arch), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
