"""A cache for what is made once and used in many calls, also in CUDA graphs: the layouts of patterns and the lists of masks."""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_here = threading.local()


class LayoutCache:
    """The last `limit` values that were asked for, and every value that was used in the capture of a CUDA graph, because the graph reads it
    in each replay."""

    def __init__(self, limit: int):
        self.limit = limit
        self.recent: dict[Hashable, Any] = {}  # the latest one last
        self.captured: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Any]) -> Any:
        """The value of `key`, made by `make()` of tensors on `device` if there is none."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            value = self.captured.get(key)
            if value is not None:
                return value
            value = self.recent.pop(key, None)
            if value is not None:
                (self.captured if capturing else self.recent)[key] = value
                return value
        if capturing:  # tensors that are made in a capture hold no values before the graph is replayed
            return make()
        value = _made_apart(make, device) if device.type == "cuda" and getattr(_here, "apart", False) else make()
        with self._lock:
            self.recent[key] = value
            while len(self.recent) > self.limit:
                del self.recent[next(iter(self.recent))]
        return value


@contextlib.contextmanager
def made_apart() -> Iterator[None]:
    """A context for the call of a compiled graph: values that the cache keeps are made on another thread and stream.

    torch.compile's CUDA graphs warm up with their memory pool set for the calling thread, and only a graph's outputs may stay in that pool.
    """
    before = getattr(_here, "apart", False)
    _here.apart = True
    try:
        yield
    finally:
        _here.apart = before


def _made_apart(make: Callable[[], Any], device: torch.device) -> Any:
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    value = _thread().submit(_on_stream, stream, make).result()
    current.wait_stream(stream)
    return value


def _on_stream(stream: torch.cuda.Stream, make: Callable[[], Any]) -> Any:
    with torch.cuda.stream(stream):
        return make()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "block_sparse")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
