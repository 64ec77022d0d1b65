"""The counter that a persistent forward's programs take their tiles from: each kernel leaves it at zero for the next one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_counters: dict[tuple[int, int], Tensor] = {}
_lock = threading.Lock()


def tile_counter(device: torch.device) -> Tensor:
    """A zero, int32 (1,): kept for the current stream, whose kernels follow each other; a captured graph may run beside them and has its
    own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    counter = _counters.get(key)
    if counter is None:
        with _lock, ThreadPoolExecutor(1) as apart:  # a compiled graph warms up with its memory pool as this thread's
            counter, made = apart.submit(_make, device).result()
            torch.cuda.current_stream(device).wait_event(made)
            _counters[key] = counter
    return counter


def _make(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    with torch.cuda.device(device):
        return torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.current_stream().record_event()
