"""What every operator's benchmark shares: how a backend presents itself, the checked comparison, the command line.

A new operator's benchmark is one file: its backends (functions from case and inputs to a `Pass`), its check against the operator's
reference, and one function per table that yields the rows of `compare`; `main` does the rest.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnzoo_kernels import dispatch
from benchmarks import machine, report
from benchmarks.report import Row
from benchmarks.timing import Candidate, Timing, host_bench

RESULTS = Path(__file__).parent / "results"
DIRECTIONS = ("forward", "backward")
SLOW = 5.0
T = TypeVar("T")


class Unsupported(Exception):
    """A backend cannot do this case; the message says why."""


@dataclass
class Pass:
    """One backend on one case. Both callables may be run many times; `backward` runs the forward that it needs when `saved` is empty."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]
    saved: list[Tensor]  # what the forward left for the backward
    restore: Callable[[Tensor], Tensor] = lambda x: x  # from the backend's layout to the operator's
    scope: Callable[[], AbstractContextManager] = nullcontext  # entered around every use, outside the timed region


def differentiable(
    attend: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    restore: Callable[[Tensor], Tensor] = lambda x: x,
    scope: Callable[[], AbstractContextManager] = nullcontext,
) -> Pass:
    """A pass through autograd: the forward as in training (it keeps what the backward needs), the backward alone."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    saved: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        if not saved:
            saved.append(attend(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)

    return Pass(lambda: attend(*leaves), backward, saved, restore, scope)


def replayed(call: Callable[[], T], stream: torch.cuda.Stream | None = None) -> Callable[[], T]:
    """The call as a CUDA graph captured on `stream`, by default a new one."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # around the capture too: one that fails leaves its stream the current one
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # waits for the device
            out = call()

    def replay(held: Callable[[], T] = call) -> T:  # the graph reads what the call holds, which must not be freed
        graph.replay()
        return out

    return replay


@dataclass(frozen=True)
class Backend:
    """`make` raises Unsupported where it cannot do a case; `missing` says why it is not on this machine at all.

    `limit` is the share of the allowed error (accuracy.error_ratio) up to which it gets a figure. One that is `on_request` is taken only
    where --backends names it. One that is `late` takes long to compile on a fresh machine, and `compare_late_ones_last` has it last.
    """

    name: str
    make: Callable[[Any, Any], Pass]
    missing: Callable[[], str | None] = lambda: None
    limit: float = 1.0
    on_request: bool = False
    late: bool = False


def in_graphs(backend: Backend, device: str) -> Backend:
    """Its forward and its backward as CUDA graphs; on a CPU as they are."""

    def make(case: Any, x: Any) -> Pass:
        run = backend.make(case, x)
        if torch.device(device).type != "cuda":
            return run
        stream = torch.cuda.Stream()  # of both: autograd runs a backward on the stream of its forward
        with run.scope():
            return replace(run, forward=replayed(run.forward, stream), backward=replayed(run.backward, stream))

    return replace(backend, make=make)


@dataclass(frozen=True)
class Entry:
    """One column of a comparison.

    `work` maps a direction to its amount (operations or bytes); `check` gives the error's share of what is allowed.
    """

    label: str
    backend: Backend
    case: Any
    inputs: Any
    work: dict[str, float]
    check: Callable[[Pass], float]


@dataclass(frozen=True)
class Line:
    """Where a comparison stands: its table, its plot panel and its place on the x axis."""

    operator: str
    table: str
    panel: str
    x: float

    def rows(
        self, entries: list[Entry], ready: "Prepared", direction: str, unit: str, values: dict[str, float], **extra: dict[str, float]
    ) -> list[Row]:
        """One row per entry; `extra` are further columns of Row by label. A unit per second is better when higher, any other when lower."""
        baseline = entries[0].label
        rows = []
        for e in entries:
            value, reference = values.get(e.label), values.get(baseline)
            ratio = None
            if value and reference:
                ratio = reference / value if unit.endswith("/s") else value / reference
            rows.append(Row(
                self.operator, self.table, self.panel, self.x, e.label, str(e.case), direction, unit, value, baseline=baseline, ratio=ratio,
                error=ready.errors.get(e.label), note=ready.notes.get(e.label, ""), **{k: v.get(e.label) for k, v in extra.items()}))
        return rows


@dataclass
class Prepared:
    """The entries whose result was right, their errors, and the reason for each of the others."""

    passes: dict[str, Pass]
    errors: dict[str, float]
    notes: dict[str, str]


def prepare(entries: list[Entry]) -> Prepared:
    """Build every entry's pass and check its result: what is wrong or cannot run gets no figure. Notes say which of our kernels ran.

    Entries that take longer than SLOW seconds, mostly those that compile, are named on stderr as they come.
    """
    ready = Prepared({}, {}, {})
    for entry in entries:
        dispatch.forget()
        start = time.perf_counter()
        try:
            run = entry.backend.make(entry.case, entry.inputs)
            with run.scope():
                error = entry.check(run)
        except Unsupported as reason:
            ready.notes[entry.label] = str(reason)
        except Exception as problem:  # a peer may fail in any way; the others go on, and the row says what happened
            lines = [line for line in str(problem).splitlines() if line.strip()] or [""]
            ready.notes[entry.label] = f"{type(problem).__name__}: {lines[0][:160]}"
        else:
            ready.errors[entry.label] = error
            taken = {call: [impl for impl in impls if impl != "reference"] for call, impls in dispatch.implementations_taken().items()}
            notes = [f"{call} by {' and '.join(impls)}" for call, impls in taken.items() if impls]
            if error > 1:
                notes.append(f"{error:.2f} times the allowed error")
            if notes:
                ready.notes[entry.label] = "; ".join(notes)
            if error <= entry.backend.limit:
                ready.passes[entry.label] = run
        if (seconds := time.perf_counter() - start) > SLOW:
            print(f"  {entry.label}: built and checked in {seconds:.0f} s", file=sys.stderr, flush=True)
    return ready


def compare(line: Line, entries: list[Entry], directions: Iterable[str], timing: Timing, unit: str = "TFLOP/s") -> list[Row]:
    """Check all entries, then time them against each other, a direction at a time. The first entry is the baseline of the ratios. Values
    are rates of the entries' work, or, with the unit "us", the time of a call."""
    ready = prepare(entries)
    rows: list[Row] = []
    for direction in directions:
        readings = timing.measure({label: Candidate(getattr(run, direction), run.scope) for label, run in ready.passes.items()})
        ms = {label: statistics.median(times) for label, times in readings.items()}
        spread = {label: (max(times) - min(times)) / ms[label] for label, times in readings.items()}
        values = {e.label: ms[e.label] * 1e3 if unit == "us" else e.work[direction] / ms[e.label] / 1e9
                  for e in entries if e.label in ms}
        rows += line.rows(entries, ready, direction, unit, values, ms=ms, spread=spread)
    return rows


def compare_late_ones_last(line: Line, entries: list[Entry], directions: Iterable[str], timing: Timing) -> Iterator[list[Row]]:
    """The rows of all that are not late, then those of each late one, from a comparison of its own with the baseline beside it."""
    late = [entry for entry in entries[1:] if entry.backend.late]
    yield compare(line, [entry for entry in entries if entry not in late], directions, timing)
    for entry in late:
        yield [row for row in compare(line, [entries[0], entry], directions, timing) if row.label == entry.label]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def parser(operator: str, tables: list[str], backends: list[str]) -> argparse.ArgumentParser:
    """The options that every operator's benchmark has."""
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{operator}", allow_abbrev=False,
        description=f"{operator} against its peers in one run. A figure is printed only after its result was checked.")
    result.add_argument("tables", nargs="*", metavar="table", help=f"any of: {', '.join(tables)} (default: {tables[0]})")
    result.add_argument("--backends", nargs="+", choices=backends, metavar="NAME", help=f"of {', '.join(backends)}; first: baseline")
    result.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    result.add_argument("--rounds", type=positive, default=4, help="readings of each candidate; their median counts (default: 4)")
    result.add_argument("--warmup", type=float, default=8, help="milliseconds before a reading (default: 8)")
    result.add_argument("--rep", type=float, default=50, help="milliseconds of a reading (default: 50)")
    result.add_argument("--pause", type=float, default=0.1, help="seconds before a reading (default: 0.1)")
    result.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    result.add_argument("--name", default=operator, help="stem of the result files (default: the operator)")
    result.add_argument("--output", type=Path, help="folder of the CSV files and plots (default: benchmarks/results; none in a dry run)")
    result.add_argument("--dry-run", action="store_true", help="on the CPU, tiny: shows that everything runs, the figures mean nothing")
    return result


def add_sizes(command: argparse.ArgumentParser, lengths: list[int], hidden: str = "heads * head_dim") -> None:
    """The options of an operator that is measured by length and head dim, at one number of tokens and one hidden size."""
    command.add_argument("--lengths", nargs="+", type=positive, default=lengths)
    command.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128])
    command.add_argument("--tokens", type=positive, default=16384, help="batch * seqlen (default: 16384)")
    command.add_argument("--hidden", type=positive, default=2048, help=f"{hidden} (default: 2048)")


@dataclass
class Session:
    """The parsed options, and what they mean for the run."""

    options: argparse.Namespace
    device: str
    timing: Timing
    backends: list[Backend]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.options.dtype)


def main(
    command: argparse.ArgumentParser,
    tables: dict[str, Callable[[Session], Iterator[list[Row]]]],
    backends: dict[str, Backend],
    dry_run_backends: list[str] | None,
    plots: dict[str, str],
    arguments: list[str] | None = None,
) -> int:
    """Run the tables asked for, print each, and keep its CSV file up to date after every line.

    Without --backends all are taken that are neither on request nor in `dry_run_backends`; None: a dry run has all, too. `plots` names the
    tables to plot and their x axis.
    Returns 1 if the baseline has a wrong or missing figure.
    """
    options = command.parse_args(arguments)
    for name in options.tables:
        if name not in tables:
            command.error(f"table: must be one of {', '.join(tables)}, got {name!r}")
    if not options.dry_run and not torch.cuda.is_available():
        command.error("needs an NVIDIA GPU; --dry-run runs everything on the CPU, tiny and without meaning")
    only_dry = dry_run_backends or []
    usual = [name for name, backend in backends.items() if not backend.on_request]
    dry = usual if dry_run_backends is None else only_dry
    names = options.backends or (dry if options.dry_run else [name for name in usual if name not in only_dry])
    chosen = []
    for name in names:
        reason = backends[name].missing()
        if reason:
            print(f"- {name}: {reason}")
        else:
            chosen.append(backends[name])
    if options.dry_run:
        session = Session(options, "cpu", Timing(rounds=1, pause=0.0, bench=host_bench), chosen)
        environment: dict[str, Any] = machine.describe("cpu")
        print("dry run on the CPU: the figures mean nothing")
    else:
        session = Session(options, "cuda", Timing(options.rounds, options.warmup, options.rep, options.pause), chosen)
        environment = machine.describe("cuda")
        environment |= machine.ceilings(session.timing)
    print(", ".join(f"{key} {value}" for key, value in environment.items()), flush=True)

    folder = options.output or (None if options.dry_run else RESULTS)
    rows: list[Row] = []
    for name in options.tables or list(tables)[:1]:
        of_table: list[Row] = []
        for new in tables[name](session):
            of_table += new
            rows += new
            for row in new:
                print(f"  {row.panel} {row.x:.10g} {row.direction} {row.label}: {report.cell(row)}", file=sys.stderr, flush=True)
            if folder:
                report.write_csv(of_table, environment, folder / f"{options.name}-{name}.csv")
        print(f"\n{name}\n{report.table(of_table)}", flush=True)
        if folder and name in plots:
            title = f"{options.name}: {name}, {environment['gpu']}, torch {environment['torch']}, triton {environment['triton']}"
            report.plot(of_table, folder / f"{options.name}-{name}.png", plots[name], title)
    return int(any(row.value is None for row in rows if row.label == row.baseline))
