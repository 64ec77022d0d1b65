"""Output layer and cross-entropy, loss and gradients together, against PyTorch, torch.compile and those libraries that are installed.

    python -m benchmarks.linear_cross_entropy              # TFLOP/s of the three products, all else counted as time
    python -m benchmarks.linear_cross_entropy memory       # GB beside inputs and gradients
    python -m benchmarks.linear_cross_entropy chunks       # ours by the logits of a chunk and how often a row is read
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import linear_cross_entropy
from attnzoo_kernels.linear_cross_entropy.cases import BENCHMARK, Case
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported
from benchmarks.peers import PEER_LIMIT
from benchmarks.report import Row

Inputs = tuple[Tensor, Tensor, Tensor]


def pytorch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight.to(x.dtype)).to(torch.promote_types(x.dtype, torch.float32)), targets, reduction="sum")


def liger(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

    return Liger.apply(x, weight.to(x.dtype), targets, None, None, -100, 0.0, 0.0, "sum")[0]


def cut_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    return cut(x, weight.to(x.dtype), targets, reduction="sum")


def torch_chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unsupported("this PyTorch has no linear_cross_entropy")
    return F.linear_cross_entropy(x, weight.to(x.dtype), targets, reduction="sum", options=torch.nn.LinearCrossEntropyOptions())


def missing(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


def both(x: Tensor, weight: Tensor, call: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    loss = call()
    return loss, *torch.autograd.grad(loss, (x, weight))


def of(call: Callable[[Tensor, Tensor, Tensor], Tensor], compile: bool = False) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, inputs: Inputs) -> Pass:
        *leaves, targets = inputs
        leaves = [t.detach().requires_grad_() for t in leaves]
        chosen = torch.compile(call, dynamic=False) if compile else call

        def backward() -> tuple[Tensor, ...]:
            raise Unsupported("loss and gradients are measured together, as the forward")

        return Pass(lambda: both(*leaves, lambda: chosen(*leaves, targets)), backward, [])

    return make


def ours(impl: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, weight, targets: linear_cross_entropy(x, weight, targets, reduction="sum", impl=impl)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", of(ours("triton"))),
        Backend("compiled", of(pytorch, compile=True), limit=PEER_LIMIT),
        Backend("eager", of(pytorch)),
        Backend("liger", of(liger), missing("liger_kernel"), PEER_LIMIT),
        Backend("cut-cross-entropy", of(cut_cross_entropy), missing("cut_cross_entropy"), PEER_LIMIT),
        Backend("torch-chunked", of(torch_chunked), limit=PEER_LIMIT),
        Backend("attnzoo-reference", of(ours("reference"))),
    )
}


def check(inputs: Inputs) -> Callable[[Pass], float]:
    x, weight, targets = inputs
    few = slice(0, 2048)  # all in float64 would not fit

    def results(dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x[few], weight)]
        return both(*leaves, lambda: pytorch(*leaves, targets[few]))

    def share(run: Pass) -> float:
        dx = run.forward()[1][few]
        return error_ratio(dx, results(None)[1], results(torch.float64)[1])

    return share


def cases(session: Session) -> list[Case]:
    return [Case(40, 16, 96, session.dtype)] if session.options.dry_run else [
        Case(c.tokens, c.hidden, c.rows, session.dtype) for c in BENCHMARK]


def speed(session: Session) -> Iterator[list[Row]]:
    """TFLOP/s of three products; making the logits again is not counted as work."""
    for case in cases(session):
        inputs = case.inputs(session.device)[:3]
        work = {"forward": 6.0 * case.tokens * case.hidden * case.rows}
        columns = [Entry(b.name, b, case, inputs, work, check(inputs)) for b in session.backends]
        yield harness.compare(Line("linear_cross_entropy", "speed", f"{case.hidden} x {case.rows}", case.tokens), columns, ["forward"],
                              session.timing)


def memory(session: Session) -> Iterator[list[Row]]:
    """GB at the highest point of loss and gradients, less what stood before."""
    for case in cases(session):
        inputs = case.inputs(session.device)[:3]
        columns = [Entry(b.name, b, case, inputs, {}, check(inputs)) for b in session.backends]
        ready = harness.prepare(columns)
        values = {}
        for label, run in ready.passes.items():
            values[label] = 0.0
            if session.device == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run.forward()
                values[label] = (torch.cuda.max_memory_allocated() - before) / 1e9
        yield Line("linear_cross_entropy", "memory", f"{case.hidden} x {case.rows}", case.tokens).rows(
            columns, ready, "forward", "GB", values)


def chunked(logits: int, kept: bool) -> Backend:
    """Ours with chunks of 2**logits logits at most, and a kernel that keeps a row in registers or reads it twice."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        from attnzoo_kernels.linear_cross_entropy import chunks

        with patch.multiple(chunks, LOGITS=2**logits, KEPT=chunks.KEPT if kept else 0):
            yield

    return Backend(f"2^{logits}, {'read once' if kept else 'read twice'}",
                   lambda case, inputs: replace(of(ours(None))(case, inputs), scope=scope))


CHUNKS = [chunked(*of_kernel) for of_kernel in ((28, True), (28, False), (27, True), (29, True))]


def chunks(session: Session) -> Iterator[list[Row]]:
    """The same TFLOP/s by the logits of a chunk, and whether the kernel reads a row once or twice."""
    for case in cases(session):
        inputs = case.inputs(session.device)[:3]
        work = {"forward": 6.0 * case.tokens * case.hidden * case.rows}
        columns = [Entry(b.name, b, case, inputs, work, check(inputs)) for b in CHUNKS]
        yield harness.compare(Line("linear_cross_entropy", "chunks", f"{case.hidden} x {case.rows}", case.tokens), columns, ["forward"],
                              session.timing)


TABLES = {"speed": speed, "memory": memory, "chunks": chunks}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("linear_cross_entropy", list(TABLES), list(BACKENDS))
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
