"""GELU of a sum with a bias, forward and backward with the bias's gradient, against PyTorch and what torch.compile makes of it.

    python -m benchmarks.gelu                     # TB/s of the bytes that must move
"""

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.gelu import bias_gelu
from attnzoo_kernels.gelu.cases import BENCHMARK, Case
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

Inputs = tuple[Tensor, Tensor, Tensor]


def pytorch(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias.to(x.dtype))


def compiled(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu((x.float() + bias).to(x.dtype))


def of(call: Callable[[Tensor, Tensor], Tensor], compile: bool = False) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, inputs: Inputs) -> Pass:
        x, dout, bias = inputs
        return differentiable(torch.compile(call, dynamic=False) if compile else call, (x, bias), dout)

    return make


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", of(lambda x, bias: bias_gelu(x, bias, impl="triton"))),
        Backend("compiled", of(compiled, compile=True)),
        Backend("eager", of(pytorch)),
        Backend("attnzoo-reference", of(lambda x, bias: bias_gelu(x, bias, impl="reference"))),
    )
}


def check(inputs: Inputs) -> Callable[[Pass], float]:
    x, dout, bias = inputs

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, bias)]
        out = pytorch(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    def share(run: Pass) -> float:
        ours = [run.forward(), *run.backward()]
        return max(error_ratio(*values) for values in zip(ours, results(None), results(torch.float64), strict=True))

    return share


def speed(session: Session) -> Iterator[list[Row]]:
    """TB/s: x read and y written forward; x and dy read and dx written backward."""
    cases = [Case(9, 40, session.dtype)] if session.options.dry_run else [Case(c.rows, c.width, session.dtype) for c in BENCHMARK]
    for case in cases:
        inputs = case.inputs(session.device)
        n_bytes = inputs[0].numel() * inputs[0].itemsize
        work = {"forward": 2.0 * n_bytes, "backward": 3.0 * n_bytes}
        columns = [Entry(b.name, b, case, inputs, work, check(inputs)) for b in session.backends]
        yield harness.compare(Line("gelu", "speed", f"{case.rows} rows", case.width), columns, session.options.directions, session.timing,
                              unit="TB/s")


TABLES = {"speed": speed}


def main(arguments: list[str] | None = None) -> int:
    return harness.main(harness.parser("gelu", list(TABLES), list(BACKENDS)), TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
