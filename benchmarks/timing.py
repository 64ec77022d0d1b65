"""Fair timing on a card whose clock depends on what ran before: random order, pauses, medians."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple


class Candidate(NamedTuple):
    """What is timed, and the context that it runs in; entering the context is not timed."""

    call: Callable[[], object]
    scope: Callable[[], AbstractContextManager]


def device_bench(call: Callable[[], object], warmup: float, rep: float) -> float:
    """Median milliseconds on the device, its L2 cache cleared before each run. A call longer than `warmup` and `rep` together is run twice,
    and its second run is the reading."""
    import torch
    from triton.testing import do_bench

    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3
        if milliseconds <= warmup + rep:
            break
    else:
        return milliseconds
    return do_bench(call, warmup=warmup, rep=rep, return_mode="median")


def host_bench(call: Callable[[], object], warmup: float, rep: float) -> float:
    """Milliseconds of one call on the host's clock: for a dry run on a CPU, where warmup and rep mean nothing."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Timing:
    rounds: int = 4
    warmup: float = 8.0  # milliseconds of a reading
    rep: float = 50.0  # milliseconds of a reading
    pause: float = 0.1  # seconds before a reading
    seed: int = 0
    bench: Callable[[Callable[[], object], float, float], float] = device_bench

    def measure(self, candidates: dict[str, Candidate]) -> dict[str, list[float]]:
        """Milliseconds, one reading a round for each candidate; no candidate always inherits the clock that another one left."""
        order = random.Random(self.seed)
        readings: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(self.rounds):
            for name in order.sample(list(candidates), len(candidates)):
                time.sleep(self.pause)
                with candidates[name].scope():
                    readings[name].append(self.bench(candidates[name].call, self.warmup, self.rep))
        return readings
