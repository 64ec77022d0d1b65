"""`flash_attention` against its peers, its features against plain attention, memory, host time and first call.

    python -m benchmarks.flash                              # the main table
    python -m benchmarks.flash speed sustained graph deterministic features sinks packed latent memory host first_call
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash.cases import Case, Inputs, benchmark_case, feature_cases, packed_benchmark_case
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Entry, Line, Pass, Session, replayed
from benchmarks.peers import BACKENDS, DETERMINISTIC, attnzoo, fa4
from benchmarks.report import Row

SEED = 1
CALLS_IN_GRAPH = 10
EXACT_IN_DOUBLE = 2**28  # scores of a slice; the reference of a larger one is float32


class Check:
    """A pass against the operator's reference, on the first and the last sequence and key head of the full-size result."""

    def __init__(self, case: Case, x: Inputs, directions: list[str], operator: Callable[..., Tensor] = flash_attention):
        self.case, self.x, self.directions, self.operator = case, x, directions, operator
        self.slices = [(0, 0)]
        if not case.dropout_p:  # its mask depends on the place in the batch, which only the first slice keeps
            self.slices.append((case.batch - 1, x.k.shape[-2] - 1))
        self.expected: list[tuple[list[Tensor], list[Tensor]]] = []

    def __call__(self, run: Pass) -> float:
        torch.manual_seed(SEED)
        results = [run.restore(run.forward()).detach()]
        if "backward" in self.directions:
            torch.manual_seed(SEED)
            results += map(run.restore, run.backward())
        if not self.expected:
            self.expected = [(self.reference(at, self.x.q.dtype), self.reference(at, self.exact_dtype)) for at in self.slices]
        return max(
            error_ratio(value, eager, exact)
            for at, (eagers, exacts) in zip(self.slices, self.expected, strict=True)
            for value, eager, exact in zip(self.cut(at, results), eagers, exacts, strict=False))

    @property
    def exact_dtype(self) -> torch.dtype:
        queries, keys = (max(lengths) for lengths in zip(*self.case.lengths, strict=True))
        rows = len(self.case.lengths) if self.case.packed else 1
        return torch.float64 if rows * self.group * queries * keys <= EXACT_IN_DOUBLE else torch.float32

    @property
    def group(self) -> int:
        return self.x.q.shape[-2] // self.x.k.shape[-2]

    def cut(self, at: tuple[int, int], tensors: list[Tensor]) -> list[Tensor]:
        """Of [out, dq, dk, dv] one key head and its query heads, and of a dense batch one sequence."""
        batch, head = at
        of_queries, of_keys = slice(head * self.group, (head + 1) * self.group), slice(head, head + 1)
        rows = slice(None) if self.case.packed else slice(batch, batch + 1)
        return [t[rows, ..., heads, :] for t, heads in zip(tensors, (of_queries, of_queries, of_keys, of_keys), strict=False)]

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        dout, q, k, v = (t.to(dtype) for t in self.cut(at, [self.x.dout, self.x.q, self.x.k, self.x.v]))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        options = dict(self.x.options)
        for name in ("alibi_slopes", "sinks"):
            if name in options:
                options[name] = options[name][at[1] * self.group : (at[1] + 1) * self.group]
        torch.manual_seed(SEED)
        out = self.operator(*leaves, impl="reference", **options)
        grads = torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def entries(session: Session, case: Case) -> list[Entry]:
    """Every backend on one case, over the same inputs and the same check."""
    x = case.inputs(session.device)
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    check = Check(case, x, session.options.directions)
    return [Entry(backend.name, backend, case, x, work, check) for backend in session.backends]


def ours(session: Session) -> list[harness.Backend]:
    return [backend for backend in session.backends if backend.name.startswith("attnzoo")]


def main_cases(session: Session) -> Iterator[tuple[str, int, Case]]:
    o = session.options
    for head_dim in o.head_dims:
        for mask in o.masks:
            for length in o.lengths:
                case = benchmark_case(length, head_dim, mask == "causal", o.tokens, o.hidden, dtype=session.dtype)
                yield f"d{head_dim} {mask}", length, case


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length, head dim and mask."""
    for panel, length, case in main_cases(session):
        yield harness.compare(Line("flash", "speed", panel, length), entries(session, case), session.options.directions, session.timing)


def sustained(session: Session) -> Iterator[list[Row]]:
    """As `speed`, after half a second of load and for half a second: what training sees once the card has come to its power cap."""
    timing = replace(session.timing, warmup=500.0, rep=500.0)
    for panel, length, case in main_cases(session):
        yield harness.compare(Line("flash", "sustained", panel, length), entries(session, case), session.options.directions, timing)


def graph(session: Session) -> Iterator[list[Row]]:
    """The forward by itself and in a CUDA graph of calls, which leaves out the host and what clearing the cache leaves to be written."""
    for panel, length, case in main_cases(session):
        x = case.inputs(session.device)
        check = Check(case, x, ["forward"])
        columns = []
        for backend in session.backends:
            in_graph = replace(backend, name=f"{backend.name} in a graph", make=captured(backend.make))
            columns.append(Entry(backend.name, backend, case, x, {"forward": case.flops()}, check))
            columns.append(Entry(in_graph.name, in_graph, case, x, {"forward": CALLS_IN_GRAPH * case.flops()}, check))
        yield harness.compare(Line("flash", "graph", panel, length), columns, ["forward"], session.timing)


def captured(make: Callable[[Case, Inputs], Pass]) -> Callable[[Case, Inputs], Pass]:
    """A backend's forward CALLS_IN_GRAPH times in a CUDA graph; on a CPU one after the other."""

    def make_captured(case: Case, x: Inputs) -> Pass:
        run = make(case, x)

        def forward() -> Tensor:
            return [run.forward() for _ in range(CALLS_IN_GRAPH)][-1]

        if not x.q.is_cuda:
            return replace(run, forward=forward)
        with run.scope():
            return replace(run, forward=replayed(forward))

    return make_captured


def deterministic(session: Session) -> Iterator[list[Row]]:
    """The backward in any order and with bits that repeat, of the backends that have both."""
    both = [b for backend in session.backends if backend.name in DETERMINISTIC for b in (backend, DETERMINISTIC[backend.name])]
    for panel, length, case in main_cases(session):
        columns = entries(replace(session, backends=both), case)
        yield harness.compare(Line("flash", "deterministic", panel, length), columns, ["backward"], session.timing)


def features(session: Session) -> Iterator[list[Row]]:
    """Each feature against plain causal attention, per visible pair: a ratio of 1.15 is a cost of 15 %."""
    o = session.options
    for backend in session.backends if o.backends else ours(session):
        alone = replace(session, backends=[backend])
        for head_dim in o.head_dims:
            plain = benchmark_case(o.feature_length, head_dim, True, o.tokens, o.hidden, dtype=session.dtype)
            cases = {"plain": plain} | feature_cases(plain)
            columns = [replace(entry, label=label) for label, case in cases.items() for entry in entries(alone, case)]
            line = Line("flash", "features", f"{backend.name} d{head_dim} causal", o.feature_length)
            yield harness.compare(line, columns, o.directions, session.timing)


def sinks(session: Session) -> Iterator[list[Row]]:
    """What sinks cost, and their gradient: causal by length, on the Hopper path. Then gpt-oss's layers, 64 heads of 64 over 8 with a window
    of 128 and without one, with learned sinks, beside FlashAttention-4 if it is there."""
    o = session.options
    path = "reference" if session.device == "cpu" else "gluon"
    for head_dim in o.head_dims:
        for length in o.lengths:
            case = benchmark_case(length, head_dim, True, o.tokens, o.hidden, dtype=session.dtype)
            columns = [
                replace(entry, label=label)
                for label, with_sinks, learned in (("without", False, False), ("sinks", True, False), ("learned sinks", True, True))
                for entry in entries(replace(session, backends=[harness.Backend(label, attnzoo(path, learned=learned))]),
                                     replace(case, sinks=with_sinks))]
            yield harness.compare(Line("flash", "sinks", f"d{head_dim} causal", length), columns, o.directions, session.timing)
    layer = benchmark_case(o.feature_length, 64, True, o.tokens, 64 * 64 if o.hidden > 64 else 8 * 64, dtype=session.dtype, sinks=True)
    layer = replace(layer, kv_heads=layer.heads // 8)
    backends = [harness.Backend("attnzoo", attnzoo(None if path == "gluon" else path, learned=True))]
    if session.device != "cpu":
        backends += [harness.Backend(f"attnzoo-{impl}", attnzoo(impl, learned=True)) for impl in ("gluon", "triton")]
        backends.append(replace(BACKENDS["fa4"], make=functools.partial(fa4, learned=True)))
    for label, case in (("causal", layer), ("window 128", replace(layer, causal=False, window_size=(127, 0)))):
        columns = entries(replace(session, backends=backends), case)
        yield harness.compare(Line("flash", "sinks", f"gpt-oss {label}", o.feature_length), columns, o.directions, session.timing)


def packed(session: Session) -> Iterator[list[Row]]:
    """Sequences of mixed lengths, their mean 0.6 of the longest, per real pair, and the dense rate at the longest length."""
    o = session.options
    for head_dim in o.head_dims:
        for mask in o.masks:
            for longest in o.packed_lengths:
                case = packed_benchmark_case(longest, head_dim, mask == "causal", 2 * o.tokens, o.hidden, dtype=session.dtype)
                dense = benchmark_case(longest, head_dim, mask == "causal", 2 * o.tokens, o.hidden, dtype=session.dtype)
                columns = entries(session, case)
                columns += [replace(e, label=f"{e.label} dense") for e in entries(replace(session, backends=ours(session)), dense)]
                yield harness.compare(Line("flash", "packed", f"d{head_dim} {mask}", longest), columns, o.directions, session.timing)


def latent(session: Session) -> Iterator[list[Row]]:
    """Queries and keys half as wide again as values, as in multi-head latent attention: 192 and 128, and 96 and 64."""
    for panel, length, case in main_cases(session):
        wider = replace(case, head_dim=3 * case.head_dim // 2, value_dim=case.head_dim)
        yield harness.compare(Line("flash", "latent", panel, length), entries(session, wider), session.options.directions, session.timing)


def memory(session: Session) -> Iterator[list[Row]]:
    """Peak of one forward and backward beyond inputs and output gradient (outputs, gradients and scratch), as the allocator counts it."""
    for panel, length, case in main_cases(session):
        columns = entries(session, case)
        ready = harness.prepare(columns)
        for run in ready.passes.values():
            run.saved.clear()
        peaks = {label: peak_megabytes(session.device, run) for label, run in ready.passes.items()}
        yield Line("flash", "memory", panel, length).rows(columns, ready, "forward+backward", "MB", peaks)


def peak_megabytes(device: str, run: Pass) -> float:
    """Of CUDA memory; a CPU has none."""
    with run.scope():
        if device == "cpu":
            run.backward()
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.backward()
        run.saved.clear()
        return (torch.cuda.max_memory_allocated() - before) / 1e6


def host(session: Session) -> Iterator[list[Row]]:
    """Host time of one call: many calls on a problem so small that the device never holds the host up."""
    for mask in session.options.masks:
        case = Case(seqlen_q=128, heads=2, head_dim=64, causal=mask == "causal", dtype=session.dtype)
        columns = entries(session, case)
        ready = harness.prepare(columns)
        for direction in session.options.directions:
            times = {}
            for label, run in ready.passes.items():
                with run.scope():
                    times[label] = host_microseconds(session.device, getattr(run, direction))
            yield Line("flash", "host", f"d64 {mask}", 128).rows(columns, ready, direction, "us", times)


def host_microseconds(device: str, call: Callable[[], object], calls: int = 100) -> float:
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(5):
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    finish()
    return sorted(times)[len(times) // 2]


def first_call(session: Session) -> Iterator[list[Row]]:
    """Seconds in a new process with an empty Triton cache: import, then dense and packed causal forward and backward for the first time."""
    for backend in ours(session):
        for head_dim in session.options.head_dims:
            command = [sys.executable, "-m", "benchmarks.first_call", backend.name.removeprefix("attnzoo-"), str(head_dim), session.device]
            with tempfile.TemporaryDirectory() as cache:
                environment = os.environ | {"TRITON_CACHE_DIR": cache}
                result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment)
            failed = result.returncode != 0
            seconds = {"all": None} if failed else json.loads(result.stdout)
            note = (result.stderr.strip().splitlines() or ["failed"])[-1] if failed else ""
            place = {"operator": "flash", "table": "first_call", "panel": "head dim", "x": head_dim, "case": "causal"}
            common = place | {"label": backend.name, "baseline": backend.name, "note": note, "unit": "s"}
            yield [Row(direction=step, value=value, **common) for step, value in seconds.items()]


TABLES = {f.__name__: f for f in (speed, sustained, graph, deterministic, features, sinks, packed, latent, memory, host, first_call)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("flash", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [512, 2048, 8192, 16384])
    command.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    command.add_argument("--feature-length", type=harness.positive, default=8192, help="length of the features table (default: 8192)")
    command.add_argument("--packed-lengths", nargs="+", type=harness.positive, default=[2048, 8192], help="longest sequence of a batch")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64, feature_length=64, packed_lengths=[64])
    plots = {"speed": "sequence length", "packed": "longest sequence", "memory": "sequence length"}
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
