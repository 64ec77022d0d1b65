"""GELU of a sum with a bias, forward and backward with the bias's gradient, against PyTorch and what torch.compile makes of it.

    python -m benchmarks.gelu                     # TB/s of the bytes that must move
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.gelu import bias_gelu
from attnzoo_kernels.gelu.cases import BENCHMARK, Case
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

Inputs = tuple[Tensor, Tensor, Tensor | None]
Call = Callable[[Tensor, Tensor | None, str], Tensor]


def pytorch(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return F.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)


def compiled(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return F.gelu(x if bias is None else (x.float() + bias).to(x.dtype), approximate=approximate)


def ours(impl: str) -> Call:
    return lambda x, bias, approximate: bias_gelu(x, bias, approximate=approximate, impl=impl)


def of(call: Call, compile: bool = False) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, inputs: Inputs) -> Pass:
        x, dout, bias = inputs
        chosen = torch.compile(call, dynamic=False) if compile else call
        return differentiable(lambda x, bias=None: chosen(x, bias, case.approximate), (x,) if bias is None else (x, bias), dout)

    return make


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", of(ours("triton"))),
        Backend("compiled", of(compiled, compile=True)),
        Backend("eager", of(pytorch)),
        Backend("attnzoo-reference", of(ours("reference"))),
    )
}


def check(case: Case, inputs: Inputs) -> Callable[[Pass], float]:
    x, dout, bias = inputs

    def results(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, bias) if t is not None]
        out = pytorch(leaves[0], None if bias is None else leaves[1], case.approximate)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    def share(run: Pass) -> float:
        ours = [run.forward(), *run.backward()]
        return max(error_ratio(*values) for values in zip(ours, results(None), results(torch.float64), strict=True))

    return share


def speed(session: Session) -> Iterator[list[Row]]:
    """TB/s: x read and y written forward; x and dy read and dx written backward."""
    tiny = [Case(9, 40), Case(9, 40, tanh=True, bias=False)]
    cases = [replace(case, dtype=session.dtype) for case in (tiny if session.options.dry_run else BENCHMARK)]
    for case in cases:
        inputs = case.inputs(session.device)
        n_bytes = inputs[0].numel() * inputs[0].itemsize
        work = {"forward": 2.0 * n_bytes, "backward": 3.0 * n_bytes}
        columns = [Entry(b.name, b, case, inputs, work, check(case, inputs)) for b in session.backends]
        yield harness.compare(Line("gelu", "speed", str(case), case.width), columns, session.options.directions, session.timing,
                              unit="TB/s")


TABLES = {"speed": speed}


def main(arguments: list[str] | None = None) -> int:
    return harness.main(harness.parser("gelu", list(TABLES), list(BACKENDS)), TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
