"""`two_frame_attention` against flash attention that reads as many keys: all earlier ones, or a window.

    python -m benchmarks.two_frame                                      # the main table
    python -m benchmarks.two_frame speed --lengths 16384 --far all

`all`: ReRoPE, Leaky ReRoPE and SelfExtend, which see all keys. `sinks`: LM-Infinite and StreamingLLM, which see a window and the first 4
keys. The rotations, which the caller makes, are not in the times. Flash attention is a peer in time only: it is checked against its own
reference.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from attnzoo_kernels import two_frame_attention
from attnzoo_kernels.flash.cases import Case as FlashCase
from attnzoo_kernels.flash.cases import Inputs
from attnzoo_kernels.two_frame.cases import Case, benchmark_case
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

SINKS = 4
FLASH = {f"flash-{name}": peers.BACKENDS[name] for name in ("attnzoo-gluon", "attnzoo-triton", "sdpa-fa2", "fa3", "fa4")}


class Check(flash.Check):
    """Queries and keys have two frames behind their heads."""

    def cut(self, at: tuple[int, int], tensors: list[Tensor]) -> list[Tensor]:
        result, *grads = tensors
        framed = [result, *(x.flatten(-2) for x in grads[:2]), *grads[2:]]
        return [x.unflatten(-1, (2, -1)) if n in (1, 2) else x for n, x in enumerate(super().cut(at, framed))]

    @property
    def group(self) -> int:
        return self.x.q.shape[-3] // self.x.k.shape[-3]


def attnzoo(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(functools.partial(two_frame_attention, impl=impl, **x.options), (x.q, x.k, x.v), x.dout)

    return make


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon")),
        Backend("attnzoo-triton", attnzoo("triton")),
        *(replace(backend, name=name) for name, backend in FLASH.items()),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


def entries(session: Session, case: Case) -> list[Entry]:
    """Every backend on one case; flash attention sees no far keys where few are seen, and all keys where all are."""
    x = case.inputs(session.device)
    window = (-1, -1) if case.far_keys is None else (case.near_keys - 1, 0)
    plain = FlashCase(batch=case.batch, seqlen_q=case.seqlen_q, heads=case.heads, head_dim=case.head_dim, causal=True, window_size=window,
                      dtype=case.dtype)
    of_flash = plain.inputs(session.device)
    directions = session.options.directions
    check, check_flash = Check(case, x, directions, two_frame_attention), flash.Check(plain, of_flash, directions)

    def work(one: FlashCase) -> dict[str, float]:
        return {"forward": one.flops(), "backward": one.flops(backward=True)}

    return [Entry(backend.name, backend, plain, of_flash, work(plain), check_flash) if backend.name in FLASH
            else Entry(backend.name, backend, case, x, work(case), check) for backend in session.backends]


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length, head dim and which far keys are seen."""
    o = session.options
    for head_dim in o.head_dims:
        for far in o.far:
            for length in o.lengths:
                case = benchmark_case(length, head_dim, o.near_keys, o.tokens, o.hidden, dtype=session.dtype,
                                      far_keys=None if far == "all" else SINKS)
                yield harness.compare(Line("two_frame", "speed", f"d{head_dim} {far}", length), entries(session, case), o.directions,
                                      session.timing)


TABLES = {"speed": speed}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("two_frame", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [4096, 16384])
    command.add_argument("--far", nargs="+", choices=("all", "sinks"), default=["all", "sinks"])
    command.add_argument("--near-keys", type=harness.positive, default=1024)
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64, near_keys=8)
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], {"speed": "sequence length"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
