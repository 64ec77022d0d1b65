"""What the figures were measured on, and the two ceilings of the card, measured in the same run."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.timing import Candidate, Timing


def describe(device: str) -> dict[str, str]:
    """GPU, driver and versions, for every CSV row."""
    cuda = device == "cuda"
    root = Path(__file__).parents[1]
    return {
        "gpu": torch.cuda.get_device_name() if cuda else f"none ({_cpu()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(root), "describe", "--always", "--dirty"),
        "date": datetime.date.today().isoformat(),
    }


def _cpu() -> str:
    cpus = Path("/proc/cpuinfo")
    models = [line.partition(": ")[2] for line in cpus.read_text().splitlines() if line.startswith("model name")] if cpus.exists() else []
    return f"{models[0] if models else platform.machine()} CPU, {os.cpu_count()} cores"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def ceilings(timing: Timing) -> dict[str, float]:
    """Copy bandwidth (bytes read plus written) and the rate of a bf16 matrix product of 8192, on random data."""
    source = torch.randn(2**29, device="cuda")  # 2 GiB
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = timing.measure({
        "copy": Candidate(lambda: target.copy_(source), nullcontext),
        "matmul": Candidate(lambda: a @ b, nullcontext),
    })
    copy, matmul = (sorted(times[name])[len(times[name]) // 2] for name in ("copy", "matmul"))
    return {"copy_tb_s": round(2 * source.nbytes / copy / 1e9, 3), "matmul_tflop_s": round(2 * 8192**3 / matmul / 1e9, 1)}
