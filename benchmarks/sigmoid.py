"""`sigmoid_attention` against softmax attention of the same shape, ours and its peers', and against its authors' kernels.

    python -m benchmarks.sigmoid                            # the main table
    python -m benchmarks.sigmoid speed large packed

The softmax is a peer in time only: its results are checked against its own reference. The authors' kernels, `flash_sigmoid`, are built
from github.com/apple/ml-sigmoid-attention; they take one bias for all calls and no packed sequences.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from attnzoo_kernels import sigmoid_attention
from attnzoo_kernels.flash.cases import packed_benchmark_case
from attnzoo_kernels.sigmoid.cases import Case, Inputs
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

SOFTMAX = {f"softmax-{name}": peers.BACKENDS[name] for name in ("attnzoo-gluon", "attnzoo-triton", "sdpa-fa2", "sdpa-cudnn", "fa3", "fa4")}


def attnzoo(impl: str, deterministic: bool = False) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        attend = functools.partial(sigmoid_attention, impl=impl, deterministic=deterministic, **x.options)
        return differentiable(attend, (x.q, x.k, x.v), x.dout)

    return make


def upstream(case: Case, x: Inputs) -> Pass:
    from flash_sigmoid import flash_attn_func

    peers.refuse(case, "packed input")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=case.causal, window_size=case.window_size, sigmoid_bias=-math.log(k.shape[1]))

    return differentiable(attend, (x.q, x.k, x.v), x.dout)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon")),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("attnzoo-gluon-deterministic", attnzoo("gluon", True)),
        Backend("flash_sigmoid", upstream, peers.importable("flash_sigmoid"), limit=peers.PEER_LIMIT),
        *(replace(backend, name=name) for name, backend in SOFTMAX.items()),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


def entries(session: Session, case: flash.Case) -> list[Entry]:
    """Every backend on one case, over the same q, k and v."""
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    ours = Case(**vars(case))
    x, of_flash = ours.inputs(session.device), case.inputs(session.device)
    check = flash.Check(ours, x, session.options.directions, sigmoid_attention)
    check_flash = flash.Check(case, of_flash, session.options.directions)
    return [Entry(backend.name, backend, case, of_flash, work, check_flash) if backend.name in SOFTMAX
            else Entry(backend.name, backend, ours, x, work, check) for backend in session.backends]


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length, head dim and mask."""
    for panel, length, case in flash.main_cases(session):
        yield harness.compare(Line("sigmoid", "speed", panel, length), entries(session, case), session.options.directions, session.timing)


def large(session: Session) -> Iterator[list[Row]]:
    """The same with queries of 2 and 4 times the size: fewer weights are small, and the Hopper kernels take less time for small ones."""
    for (panel, length, case), factor in itertools.product(flash.main_cases(session), (2.0, 4.0)):
        line = Line("sigmoid", "large", f"{panel}, queries times {factor:g}", length)
        yield harness.compare(line, entries(session, replace(case, q_scale=factor)), session.options.directions, session.timing)


def packed(session: Session) -> Iterator[list[Row]]:
    """The same of packed sequences of mixed lengths."""
    o = session.options
    for panel, length, case in flash.main_cases(session):
        case = packed_benchmark_case(length, case.head_dim, case.causal, o.tokens, o.hidden, dtype=session.dtype)
        yield harness.compare(Line("sigmoid", "packed", panel, length), entries(session, case), o.directions, session.timing)


TABLES = {f.__name__: f for f in (speed, large, packed)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("sigmoid", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [512, 2048, 8192, 16384])
    command.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64)
    plots = {"speed": "sequence length", "large": "sequence length", "packed": "longest sequence"}
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
