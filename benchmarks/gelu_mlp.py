"""An MLP with GELU between its products, forward and backward, against GELU in a kernel of its own, PyTorch, and torch.compile.

    python -m benchmarks.gelu_mlp                 # TFLOP/s of the products
    python -m benchmarks.gelu_mlp tiles           # by tiles of the kernels
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.gelu import bias_gelu
from attnzoo_kernels.gelu_mlp import gelu_mlp
from attnzoo_kernels.gelu_mlp.cases import BENCHMARK, Case
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

Call = Callable[[Tensor, Tensor, Tensor, str], Tensor]


def pytorch(x: Tensor, up: Tensor, down: Tensor, approximate: str) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up), approximate=approximate), down)


def apart(x: Tensor, up: Tensor, down: Tensor, approximate: str) -> Tensor:
    return F.linear(bias_gelu(F.linear(x, up), None, approximate=approximate), down)


def ours(impl: str) -> Call:
    return lambda x, up, down, approximate: gelu_mlp(x, up, down, approximate=approximate, impl=impl)


def of(call: Call, compile: bool = False) -> Callable[[Case, tuple[Tensor, ...]], Pass]:
    def make(case: Case, inputs: tuple[Tensor, ...]) -> Pass:
        chosen = torch.compile(call, dynamic=False) if compile else call
        return differentiable(lambda *leaves: chosen(*leaves, case.approximate), inputs[:3], inputs[3])

    return make


def tiled(**options) -> Backend:
    """Ours with other tiles in both directions."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        from attnzoo_kernels.gelu_mlp import products

        before = products.FORWARD, products.BACKWARD
        products.FORWARD, products.BACKWARD = (replace(tile, **options) for tile in before)
        try:
            yield
        finally:
            products.FORWARD, products.BACKWARD = before

    name = ", ".join(f"{key} {value}" for key, value in options.items()) or "as it is"
    return Backend(name, lambda case, inputs: replace(of(ours("triton"))(case, inputs), scope=scope))


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", of(ours("triton"))),
        Backend("gelu apart", of(apart)),
        Backend("compiled", of(pytorch, compile=True)),
        Backend("eager", of(pytorch)),
        Backend("attnzoo-reference", of(ours("reference"))),
    )
}
PAIRS = {"columns": 128, "num_warps": 4, "programs": 2, "parts": 4}  # of programs, one of which ends while the other multiplies
TILES = [BACKENDS["gelu apart"]] + [
    tiled(**options) for options in ({}, {"hardware": True}, {"stages": 4, "parts": 4}, {"stages": 4, "parts": 4, "hardware": True}, PAIRS,
                                     {**PAIRS, "hardware": True})]


def check(case: Case, inputs: tuple[Tensor, ...]) -> Callable[[Pass], float]:
    few = min(case.rows, 4096)

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (inputs[0][:few], *inputs[1:3])]
        out = pytorch(*leaves, case.approximate)
        return [out, torch.autograd.grad(out, leaves[0], inputs[3][:few].to(out.dtype))[0]]

    def share(run: Pass) -> float:
        found = [run.forward()[:few], run.backward()[0][:few]]
        return max(error_ratio(*values) for values in zip(found, results(None), results(torch.float64), strict=True))

    return share


def compare(session: Session, table: str, backends: list[Backend]) -> Iterator[list[Row]]:
    for case in [Case(40, 16, 64, torch.float16)] if session.options.dry_run else [replace(c, dtype=session.dtype) for c in BENCHMARK]:
        inputs = case.inputs(session.device)
        flops = 4.0 * case.rows * case.width * case.hidden
        columns = [Entry(b.name, b, case, inputs, {"forward": flops, "backward": 2 * flops}, check(case, inputs)) for b in backends]
        yield harness.compare(Line("gelu_mlp", table, f"{case.width} x {case.hidden}", case.rows), columns, session.options.directions,
                              session.timing)


def speed(session: Session) -> Iterator[list[Row]]:
    """TFLOP/s of the products: two forward, four backward."""
    yield from compare(session, "speed", session.backends)


def tiles(session: Session) -> Iterator[list[Row]]:
    """The same by tiles."""
    yield from compare(session, "tiles", TILES)


TABLES = {"speed": speed, "tiles": tiles}


def main(arguments: list[str] | None = None) -> int:
    return harness.main(harness.parser("gelu_mlp", list(TABLES), list(BACKENDS)), TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
