"""Checks before a length is tried whether its memory can suffice. If the host ran out of memory, the system would kill the program."""

from pathlib import Path

import torch
from tqdm import tqdm

CGROUP = Path("/sys/fs/cgroup")


def least_bytes(model: torch.nn.Module, length: int) -> int:
    """A lower bound of the bytes that one row of `length` tokens needs: the residual stream in float32, and queries, keys and values in
    16 bits.

    The operators' reference path also holds the scores of all pairs of tokens, in at least 16 bits.
    """
    spec = model.blocks[0].attention.spec
    linear = length * (4 * spec.dim + 2 * spec.head_dim * (spec.n_heads + 2 * spec.n_kv_heads))
    by_reference = any(getattr(block.attention, "impl", None) == "reference" for block in model.blocks)
    return linear + (2 * spec.n_heads * length**2 if by_reference else 0)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the GPU or the host, within the container's limit if there is one; None where unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        limit = (CGROUP / "memory.max").read_text().strip() if (CGROUP / "memory.max").exists() else "max"
        if limit == "max":
            return free
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(kinds["file"])  # the page cache is freed on demand
        return min(free, int(limit) - used)
    except (OSError, ValueError, KeyError):
        return None


def shortage(model: torch.nn.Module, length: int) -> str | None:
    """Why a row of `length` tokens cannot be read; None if it may fit, or if the model is no Transformer of attnzoo."""
    if not hasattr(model, "blocks"):
        return None
    needed, free = least_bytes(model, length), free_bytes(next(model.parameters()).device)
    if free is None or needed <= free:
        return None
    return (f"a row of {length} tokens needs at least {tqdm.format_sizeof(needed, 'B')} of memory, and about {max(free, 0) / 1e9:.0f} GB "
            "are free; shorten evaluation.lengths")
