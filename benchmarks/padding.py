"""Padding removal against PyTorch's recipe (nonzero, cumsum, max().item(), index, zeros and index put) and against a plain copy.

    python -m benchmarks.padding                  # microseconds of the indices, TB/s of removing and restoring, host time
    python -m benchmarks.padding tiles            # candidates for the table in attnzoo_kernels/padding/tiles.py
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import padding
from attnzoo_kernels.padding.cases import BENCHMARK, Case
from attnzoo_kernels.padding.tiles import Tile, remove_tile, restore_tile
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.flash import host_microseconds
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported, differentiable, replayed
from benchmarks.report import Row
from benchmarks.timing import Candidate

OPERATIONS = ("indices", "remove", "restore")


@dataclass(frozen=True)
class Inputs:
    """What an operation starts from; `dout` is the gradient of its output."""

    operation: str  # indices | remove | restore
    mask: Tensor
    source: Tensor
    dout: Tensor
    indices: Tensor


def make_inputs(case: Case, operation: str, device: str) -> Inputs:
    mask, rows = case.mask(device), case.rows(device)
    indices = mask.flatten().nonzero().flatten()
    source, dout = (rows, rows[mask]) if operation == "remove" else (rows[mask], rows)
    return Inputs(operation, mask, source, dout, indices)


def attnzoo(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        if x.operation == "indices":
            return only_forward(lambda: packing(x.mask, impl))
        if x.operation == "remove":
            return differentiable(lambda rows: padding.remove_padding(rows, x.indices, impl=impl), (x.source,), x.dout)
        return differentiable(lambda tokens: padding.pad_input(tokens, x.indices, case.batch, case.seqlen, impl=impl), (x.source,), x.dout)

    return make


def packing(mask: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """Indices and cu_seqlens in static shapes, without a wait."""
    return padding.token_indices(mask, max_tokens=mask.numel(), impl=impl)[:2]


def captured(make: Callable[[Case, Inputs], Pass], operations: tuple[str, ...] = OPERATIONS) -> Callable[[Case, Inputs], Pass]:
    """A backend's calls one after the other in a CUDA graph, each on a copy of the inputs: the device's time, as between other kernels.

    The host is left out, which hides launches so short; and what clearing the L2 cache before each reading leaves behind, 50 MB to be
    written back, is spread over all calls.
    """

    def make_captured(case: Case, x: Inputs) -> Pass:
        if not x.mask.is_cuda:
            raise Unsupported("a CUDA graph needs a GPU")
        if x.operation not in operations:
            raise Unsupported("it waits for the device, which no graph can hold")
        if x.operation == "indices":
            return only_forward(replayed(make(case, x).forward))
        stream = torch.cuda.Stream()
        runs = [make(case, replace(x, source=x.source.clone())) for _ in range(calls_in_graph(case))]
        forward = replayed(lambda: [run.forward() for run in runs][-1], stream)
        with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward
            for run in runs:
                run.backward()  # leaves its forward, outside of the graph
        return Pass(forward, replayed(lambda: [run.backward() for run in runs][-1], stream), [])

    return make_captured


def calls_in_graph(case: Case) -> int:
    """So many that they move a gigabyte."""
    return min(16, math.ceil(2**30 / case.restore_bytes))


def recipe(case: Case, x: Inputs) -> Pass:
    """As flash-attn's bert_padding and most code on the hub have it."""
    if x.operation == "indices":
        def forward() -> tuple[Tensor, Tensor]:
            lengths = x.mask.sum(-1, dtype=torch.int32)
            indices = torch.nonzero(x.mask.flatten(), as_tuple=False).flatten()
            lengths.max().item()  # waits for the device, so that no graph can hold it
            return indices, F.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))

        return only_forward(forward)
    if x.operation == "remove":
        return differentiable(lambda rows: rows.flatten(0, 1)[x.indices], (x.source,), x.dout)

    def restore(tokens: Tensor) -> Tensor:
        out = torch.zeros(case.batch * case.seqlen, case.width, dtype=tokens.dtype, device=tokens.device)
        out[x.indices] = tokens
        return out.view(case.batch, case.seqlen, case.width)

    return differentiable(restore, (x.source,), x.dout)


def copy(case: Case, x: Inputs) -> Pass:
    """A plain copy that moves as many bytes: the rate that the operation can reach at this size."""
    if x.operation == "indices":
        raise Unsupported("the indices are bound by launches, not by bytes")
    there, back = (buffers(n, x.source.device) for n in (moved(x.operation, case), moved(inverse(x.operation), case)))
    return Pass(lambda: there[1].copy_(there[0]), lambda: (back[1].copy_(back[0]),), [])


def copy_kernel(case: Case, x: Inputs) -> Pass:
    """The same as a kernel; in a graph a plain copy is a copy node, which is slower."""
    if x.operation == "indices":
        raise Unsupported("the indices are bound by launches, not by bytes")
    there, back = (buffers(n, x.source.device) for n in (moved(x.operation, case), moved(inverse(x.operation), case)))
    return Pass(lambda: torch.bitwise_not(there[0], out=there[1]), lambda: (torch.bitwise_not(back[0], out=back[1]),), [])


def zeros(case: Case, x: Inputs) -> Pass:
    """Zeros in all bytes of the result, by torch's `zero_`: what writing alone takes."""
    if x.operation == "indices":
        raise Unsupported("the indices are bound by launches, not by bytes")
    rows = {"remove": case.tokens, "restore": case.batch * case.seqlen}
    there, back = (torch.empty(rows[operation] * case.width * case.dtype.itemsize // 4, dtype=torch.int32, device=x.source.device)
                   for operation in (x.operation, inverse(x.operation)))
    return Pass(lambda: there.zero_(), lambda: (back.zero_(),), [])


def buffers(n_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    source = torch.randint(0, 255, (n_bytes // 16 * 8,), dtype=torch.uint8, device=device).view(torch.int32)
    return source, torch.empty_like(source)


def inverse(operation: str) -> str:
    return "restore" if operation == "remove" else "remove"


def moved(operation: str, case: Case) -> int:
    return case.remove_bytes if operation == "remove" else case.restore_bytes


def only_forward(forward: Callable[[], tuple[Tensor, Tensor]]) -> Pass:
    def backward() -> tuple[Tensor, ...]:
        raise Unsupported("indices have no gradient")

    return Pass(forward, backward, [])


def check(case: Case, x: Inputs, directions: list[str]) -> Callable[[Pass], float]:
    """Copies are exact: 0 where every bit is right, else infinite. A pass that only copies is right by itself."""

    def share(run: Pass) -> float:
        out = run.forward()
        if x.operation == "indices":
            found, cu_seqlens = out
            right = torch.equal(found[: case.tokens], x.indices)
            right = right and torch.equal(cu_seqlens.long(), F.pad(x.mask.sum(-1).cumsum(0), (1, 0)))
            return 0.0 if right else float("inf")
        if out.dtype == torch.int32:
            return 0.0
        restored = x.operation == "restore"
        right = torch.equal(out, x.dout * x.mask[..., None] if restored else x.dout)
        if "backward" in directions:
            (grad,) = run.backward()
            right = right and torch.equal(grad, x.source if restored else x.source * x.mask[..., None])
        return 0.0 if right else float("inf")

    return share


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("recipe", recipe),
        Backend("copy", copy),
        Backend("zeros", zeros),
        Backend("attnzoo-graph", captured(attnzoo("triton"))),
        Backend("recipe-graph", captured(recipe, ("remove", "restore"))),
        Backend("copy-graph", captured(copy_kernel)),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


def entries(session: Session, case: Case, operation: str) -> list[Entry]:
    x = make_inputs(case, operation, session.device)
    work = {"forward": moved(operation, case), "backward": moved(inverse(operation), case)}
    directions = session.options.directions

    def entry(b: Backend) -> Entry:
        calls = calls_in_graph(case) if b.name.endswith("-graph") else 1
        return Entry(b.name, b, case, x, {d: n * calls for d, n in work.items()}, check(case, x, directions))

    return [entry(b) for b in session.backends]


def indices(session: Session) -> Iterator[list[Row]]:
    """Microseconds for token indices, cu_seqlens, longest length and total of a mask. The recipe's time holds its wait for the device."""
    for case in cases(session):
        columns = entries(session, case, "indices")
        ready = harness.prepare(columns)
        readings = session.timing.measure({label: Candidate(run.forward, run.scope) for label, run in ready.passes.items()})
        ms = {label: statistics.median(times) for label, times in readings.items()}
        spread = {label: (max(times) - min(times)) / ms[label] for label, times in readings.items()}
        microseconds = {label: 1e3 * time for label, time in ms.items()}
        line = Line("padding", "indices", f"{case.batch} rows", case.seqlen)
        yield line.rows(columns, ready, "forward", "us", microseconds, ms=ms, spread=spread)


def rows(session: Session) -> Iterator[list[Row]]:
    """TB/s of removing and of restoring padding; the backward of one does the other's work. Held against a copy of as many bytes, and
    against writing the result alone, whose rate counts the same bytes."""
    for case in cases(session):
        for operation in ("remove", "restore"):
            line = Line("padding", "rows", f"{operation} {case.batch} rows w{case.width}", case.seqlen)
            yield harness.compare(line, entries(session, case, operation), session.options.directions, session.timing, unit="TB/s")


def norm(session: Session) -> Iterator[list[Row]]:
    """Microseconds on the device of restoring fused with residual addition and LayerNorm, against what torch.compile makes of the parts."""
    if session.device == "cpu":
        return
    for case in cases(session):
        torch._dynamo.reset()
        mask, rows = case.mask(session.device), case.rows(session.device)
        indices = mask.flatten().nonzero().flatten()
        hidden, residual = rows[mask], case.rows(session.device, seed=1)[mask]
        weight, bias = (torch.randn(case.width, device=session.device, dtype=case.dtype) for _ in range(2))

        def of_parts(hidden: Tensor, restore: Callable[[Tensor], Tensor], residual=residual, weight=weight, bias=bias) -> Tensor:
            return restore(F.layer_norm(hidden + residual, weight.shape, weight, bias, 1e-12))

        def into_zeros(tokens: Tensor, case=case, indices=indices) -> Tensor:
            out = torch.zeros(case.batch * case.seqlen, case.width, dtype=tokens.dtype, device=tokens.device)
            out[indices] = tokens
            return out.view(case.batch, case.seqlen, case.width)

        def pad_input(tokens: Tensor, case=case, indices=indices) -> Tensor:
            return padding.pad_input(tokens, indices, case.batch, case.seqlen)

        def fused(hidden: Tensor, case=case, residual=residual, weight=weight, bias=bias, indices=indices) -> Tensor:
            return padding.add_norm_pad_input(hidden, residual, weight, bias, indices, case.batch, case.seqlen)

        compiled = torch.compile(of_parts, dynamic=False)
        calls = {
            "attnzoo-fused": fused,
            "compiled-recipe": lambda x, compiled=compiled, restore=into_zeros: compiled(x, restore),
            "compiled-pad_input": lambda x, compiled=compiled, restore=pad_input: compiled(x, restore),
        }
        exact = of_parts(hidden.float(), into_zeros, residual.float(), weight.float(), bias.float())
        eager = of_parts(hidden, into_zeros)
        errors = {label: error_ratio(call(hidden), eager, exact) for label, call in calls.items()}
        copies = [hidden.clone() for _ in range(calls_in_graph(case))]
        graphs = {
            label: Candidate(replayed(lambda call=call, copies=copies: [call(x) for x in copies][-1]), nullcontext)
            for label, call in calls.items()
        }
        readings = session.timing.measure(graphs)
        us = {label: 1e3 * statistics.median(times) / len(copies) for label, times in readings.items()}
        yield [
            Row("padding", "norm", f"{case.batch} rows w{case.width}", case.seqlen, label, str(case), "forward", "us",
                value if errors[label] <= 1 else None, baseline="attnzoo-fused", ratio=value / us["attnzoo-fused"], error=errors[label])
            for label, value in us.items()
        ]


def host(session: Session) -> Iterator[list[Row]]:
    """Microseconds of host time of one call, on rows so small that the device never holds the host up."""
    case, calls = Case(4, 24, 16, 15, session.dtype), 1 if session.options.dry_run else 100
    for operation in OPERATIONS:
        columns = entries(session, case, operation)
        ready = harness.prepare(columns)
        for direction in ["forward"] if operation == "indices" else session.options.directions:
            times = {label: host_microseconds(session.device, getattr(run, direction), calls) for label, run in ready.passes.items()}
            yield Line("padding", "host", operation, case.seqlen).rows(columns, ready, direction, "us", times)


def tiles(session: Session) -> Iterator[list[Row]]:
    """TB/s of removing and restoring by tile; the first column is the table's."""
    for case in cases(session):
        for operation, table in (("remove", remove_tile), ("restore", restore_tile)):
            chosen = table(case.width, case.dtype.itemsize)
            others = [Tile(rows, chosen.columns, warps) for rows in (4, 8, 16, 32) for warps in (4, 8)]
            candidates = list(dict.fromkeys([chosen, *others]))
            x = make_inputs(case, operation, session.device)
            columns = [
                Entry(f"{t.rows}x{t.columns} {t.num_warps} warps", Backend("attnzoo-triton", with_tile(operation, t)), case, x,
                      {"forward": moved(operation, case)}, check(case, x, ["forward"]))
                for t in candidates
            ]
            line = Line("padding", "tiles", f"{operation} {case.batch} rows w{case.width}", case.seqlen)
            yield harness.compare(line, columns, ["forward"], session.timing, unit="TB/s")


def with_tile(operation: str, tile: Tile) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        from attnzoo_kernels.padding import rows as kernels

        run, name = attnzoo("triton")(case, x), f"{operation}_tile"

        def forward() -> Tensor:
            with patch.object(kernels, name, lambda *_: tile):
                return run.forward()

        return Pass(forward, run.backward, run.saved)

    return make


def cases(session: Session) -> tuple[Case, ...]:
    if session.options.dry_run:
        return Case(4, 24, 16, 15, session.dtype), Case(4, 24, 16, 15, session.dtype, scattered=True)
    return tuple(Case(c.batch, c.seqlen, c.width, c.mean, session.dtype) for c in BENCHMARK)


TABLES = {f.__name__: f for f in (indices, rows, norm, host, tiles)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("padding", list(TABLES), list(BACKENDS))
    command.set_defaults(tables=["indices", "rows", "norm", "host"])
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
