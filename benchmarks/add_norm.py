"""A residual stream's sum and norm, forward and backward with the weight's gradient, against PyTorch and what torch.compile makes of it.

    python -m benchmarks.add_norm                 # TB/s of the bytes that must move
    python -m benchmarks.add_norm tiles           # by warps, programs and stages of the kernels

The others keep the stream, and its gradient, in float32; all are counted by the bytes of the stream in halves of 16 bits.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.add_norm import Stream, add_norm
from attnzoo_kernels.add_norm.cases import BENCHMARK, Case
from attnzoo_kernels.add_norm.tiles import Tiles
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session
from benchmarks.report import Row


def normed(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5) if case.kind == "rmsnorm" else F.layer_norm(x, x.shape[-1:], weight)


def pytorch(case: Case, x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x + branch
    return x, normed(case, x, weight).to(branch.dtype)


def rounded(case: Case, x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What norms keep for the backward has 16 bits."""
    x = x + branch
    return x, normed(case, x.to(torch.bfloat16).to(x.dtype), weight).to(branch.dtype)


def both(call: Callable[..., tuple[Tensor, Tensor]], case: Case, leaves: list[Tensor], gradients: tuple[Tensor, ...]) -> Pass:
    saved: list[tuple[Tensor, Tensor]] = []

    def backward() -> tuple[Tensor, ...]:
        if not saved:
            saved.append(call(case, *leaves))
        return torch.autograd.grad(saved[0], leaves, [g.to(x.dtype) for g, x in zip(gradients, saved[0], strict=True)], retain_graph=True)

    return Pass(lambda: call(case, *leaves), backward, saved)


def of(call: Callable[..., tuple[Tensor, Tensor]], compile: bool = False) -> Callable[[Case, tuple], Pass]:
    def make(case: Case, inputs: tuple) -> Pass:
        (x, branch, weight, _), gradients = inputs
        chosen = torch.compile(call, dynamic=False) if compile else call
        return both(chosen, case, [t.detach().requires_grad_() for t in (x, branch, weight)], (gradients[0].to(x.dtype), gradients[1]))

    return make


def ours(impl: str, chosen: Tiles | None = None) -> Callable[[Case, tuple], Pass]:
    def make(case: Case, inputs: tuple) -> Pass:
        (x, branch, weight, _), gradients = inputs
        high, low = case.stream(x)

        def call(case: Case, high: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            stream, out = add_norm(Stream(high, low), branch, weight, kind=case.kind, impl=impl)
            return stream.high, out

        run = both(call, case, [t.detach().requires_grad_() for t in (high, branch, weight)], gradients)
        return run if chosen is None else replace(run, scope=lambda: with_tiles(chosen))

    return make


@contextlib.contextmanager
def with_tiles(chosen: Tiles) -> Iterator[None]:
    from attnzoo_kernels.add_norm import tiles

    before, tiles.TILES = tiles.TILES, chosen
    try:
        yield
    finally:
        tiles.TILES = before


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", ours("triton")),
        Backend("compiled", of(pytorch, compile=True)),
        Backend("eager", of(pytorch)),
        Backend("attnzoo-reference", ours("reference")),
    )
}
TILES = [
    Backend(f"{t.forward_warps:g}, {t.backward_warps:g}, {t.programs}, {t.stages}", ours("triton", t))
    for t in (Tiles(), Tiles(2, 2, 1584, 2), Tiles(4, 4, 1056, 3), Tiles(1, 4, 1056, 2), Tiles(2, 1, 2112, 2), Tiles(1, 2, 2112, 1),
              Tiles(1, 2, 4224, 1), Tiles(1, 1, 4224, 1))
]


def check(case: Case, inputs: tuple) -> Callable[[Pass], float]:
    (x, branch, weight, _), gradients = inputs

    def results(call: Callable, dtype: torch.dtype) -> list[Tensor]:
        run = both(call, case, [t.detach().to(dtype).requires_grad_() for t in (x, branch, weight)], gradients)
        return [run.forward()[1], *run.backward()]

    def share(run: Pass) -> float:
        found = [run.forward()[1], *run.backward()]
        eager = [same.to(value.dtype) for same, value in zip(results(rounded, torch.float32), found, strict=True)]
        return max(error_ratio(*values) for values in zip(found, eager, results(pytorch, torch.float64), strict=True))

    return share


def compare(session: Session, table: str, backends: list[Backend]) -> Iterator[list[Row]]:
    for case in [Case(9, 40, bias=False)] if session.options.dry_run else BENCHMARK:
        inputs = case.inputs(session.device), case.gradients(session.device)
        elements = float(case.rows * case.width)
        work = {"forward": 12 * elements, "backward": 8 * elements}
        columns = [Entry(b.name, b, case, inputs, work, check(case, inputs)) for b in backends]
        yield harness.compare(Line("add_norm", table, str(case), case.width), columns, session.options.directions, session.timing,
                              unit="TB/s")


def speed(session: Session) -> Iterator[list[Row]]:
    """TB/s: stream and branch read, stream and norm written; backward the stream's half and both gradients read and one written."""
    yield from compare(session, "speed", session.backends)


def tiles(session: Session) -> Iterator[list[Row]]:
    """The same by forward_warps, backward_warps, programs, stages."""
    yield from compare(session, "tiles", TILES)


TABLES = {"speed": speed, "tiles": tiles}


def main(arguments: list[str] | None = None) -> int:
    return harness.main(harness.parser("add_norm", list(TABLES), list(BACKENDS)), TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
