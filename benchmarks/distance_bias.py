"""`distance_bias_attention` beside FlexAttention with a captured table, and beside softmax attention without a bias, ours.

    python -m benchmarks.distance_bias                      # the main table
    python -m benchmarks.distance_bias speed packed --bias t5

A table `all` has an entry for every distance, as KERPLE's; `t5` has those up to T5's largest distance, 128, beyond which all is the same.
FlexAttention takes the gradient of its captured table by an atomic addition for each score. The softmax without a bias is a peer in time
only: its results are checked against its own reference. The table's gradient is checked where the batch is one sequence.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo_kernels import distance_bias_attention
from attnzoo_kernels.distance_bias.cases import Case, Inputs
from attnzoo_kernels.flash.cases import packed_benchmark_case
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row

FARTHEST = 128  # T5's
SOFTMAX = {f"no-bias-{name}": peers.BACKENDS[name] for name in ("attnzoo-gluon", "attnzoo-triton")}


class Check(flash.Check):
    """With the table, of one key head's query heads."""

    def cut(self, at: tuple[int, int], tensors: list[Tensor]) -> list[Tensor]:
        of_table = [t[at[1] * self.group : (at[1] + 1) * self.group] for t in tensors[4:]]
        return super().cut(at, tensors[:4]) + (of_table if self.case.packed or self.case.batch == 1 else [])

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        dout, q, k, v = (t.to(dtype) for t in super().cut(at, [self.x.dout, *self.x[:3]]))
        table = self.x.bias[at[1] * self.group : (at[1] + 1) * self.group].to(torch.promote_types(dtype, torch.float32))
        leaves = [t.requires_grad_() for t in (q, k, v, table)]
        out = self.operator(*leaves, impl="reference", **self.x.options)
        return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ())]


def attnzoo(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(functools.partial(distance_bias_attention, impl=impl, **x.options), x[:4], x.dout)

    return make


def flex(case: Case, x: Inputs) -> Pass:
    from torch.nn.attention.flex_attention import create_block_mask

    peers.refuse(case, "unlike packed lengths", "unlike causal lengths")
    q, k, v, dout = (peers.heads_first(t[None] if case.packed else t) for t in (*x[:3], x.dout))
    mask = peers.flex_mask(case, q.device)
    block_mask = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device) if mask else None

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        def score_mod(score, b, h, i, j):  # tokens of one packed sequence are as far apart as in it alone
            return score + table[h, (i - j + case.origin).clamp(0, case.distances - 1)]

        # its own three stages need 240 KB of shared memory at head dim 64 with a table that is trained
        options = {"fwd_num_stages": 2} if case.head_dim == 64 else None
        return peers.compiled_flex_attention()(q, k, v, block_mask=block_mask, score_mod=score_mod,
                                               enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)

    def restore(y: Tensor) -> Tensor:
        return y if y.dim() == 2 else y.transpose(1, 2)[0] if case.packed else y.transpose(1, 2)

    return differentiable(attend, (q, k, v, x.bias), dout, restore)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon")),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("flex", flex, limit=peers.PEER_LIMIT, late=True),
        *(replace(backend, name=name) for name, backend in SOFTMAX.items()),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


def entries(session: Session, case: flash.Case, kind: str) -> list[Entry]:
    """Every backend on one case, over the same q, k and v."""
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    longest = max(n for _, n in case.lengths)
    one_side = longest if kind == "all" else min(FARTHEST, longest)
    ours = Case(**vars(case), distances=one_side if case.causal else 2 * one_side - 1, origin=0 if case.causal else one_side - 1)
    x, of_flash = ours.inputs(session.device), case.inputs(session.device)
    check = Check(ours, x, session.options.directions, distance_bias_attention)
    check_flash = flash.Check(case, of_flash, session.options.directions)
    return [Entry(backend.name, backend, case, of_flash, work, check_flash) if backend.name in SOFTMAX
            else Entry(backend.name, backend, ours, x, work, check) for backend in session.backends]


def _compared(session: Session, table: str, panel: str, length: int, case: flash.Case) -> Iterator[list[Row]]:
    for kind in session.options.tables_of:
        line = Line("distance_bias", table, f"{panel} {kind}", length)
        yield from harness.compare_late_ones_last(line, entries(session, case, kind), session.options.directions, session.timing)


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length, head dim, mask and table."""
    for panel, length, case in flash.main_cases(session):
        yield from _compared(session, "speed", panel, length, case)


def packed(session: Session) -> Iterator[list[Row]]:
    """The same of packed sequences of mixed lengths."""
    o = session.options
    for panel, length, case in flash.main_cases(session):
        case = packed_benchmark_case(length, case.head_dim, case.causal, o.tokens, o.hidden, dtype=session.dtype)
        yield from _compared(session, "packed", panel, length, case)


TABLES = {f.__name__: f for f in (speed, packed)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("distance_bias", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [2048, 8192, 16384])
    command.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["causal", "full"])
    command.add_argument("--bias", dest="tables_of", nargs="+", choices=("all", "t5"), default=["all", "t5"], help="which tables")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64)
    plots = {"speed": "sequence length", "packed": "longest sequence"}
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
