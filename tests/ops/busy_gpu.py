"""Another process on the same GPU, which stops and resumes the programs of this one."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

BUSY = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(8):
        a @ a
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def busy_gpu() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "busy\n"
            yield
        finally:
            other.kill()
