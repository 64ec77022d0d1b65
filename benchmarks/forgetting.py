"""`forgetting_attention` against causal softmax attention of the same shape, ours, and against the authors' and fla's kernels.

    python -m benchmarks.forgetting                         # the main table
    python -m benchmarks.forgetting speed packed --gate 6
    python -m benchmarks.forgetting trained --checkpoint runs/a --lengths 16384    # the gates of a trained model, layer by layer

The softmax is a peer in time only: its results are checked against its own reference. `forgetting_transformer` is built from
github.com/zhixuan-lin/forgetting-transformer, without its pruning; `fla` is flash-linear-attention. Ours run with pruning and without. A
panel's name has the share of tiles that pruning leaves out. `--graphs` times each call as a CUDA graph, without the host's share: a pruned
call of one sequence with few heads is shorter than its launches. `trained` takes queries, keys, values and gates from a checkpoint of
experiment=extrapolation_forgetting that reads the Python sources of attnzoo.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from attnzoo import checkpoint, trained
from attnzoo.attention import forgetting as layers
from attnzoo_kernels import flash_attention, forgetting_attention
from attnzoo_kernels.flash.cases import mixed_lengths
from attnzoo_kernels.forgetting.cases import Case, Inputs, benchmark_case
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, differentiable
from benchmarks.report import Row


def attnzoo(impl: str, prune: bool = False) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        attend = functools.partial(forgetting_attention, impl=impl, prune=prune, deterministic=False, **x.options)
        return differentiable(attend, x[:4], x.dout)

    return make


def softmax(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(functools.partial(flash_attention, causal=True, impl=impl, **x.options), x[:3], x.dout)

    return make


def upstream(case: Case, x: Inputs) -> Pass:
    from forgetting_transformer import forgetting_attention as theirs

    peers.refuse(case, "packed input", "window")
    return differentiable(functools.partial(theirs, head_first=False), x[:4], x.dout)


def fla(case: Case, x: Inputs) -> Pass:
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    peers.refuse(case, "window", "unlike packed lengths")
    bounds = x.options.get("cu_seqlens_q")

    def attend(*tensors: Tensor) -> Tensor:
        if bounds is None:
            return parallel_forgetting_attn(*tensors)
        return parallel_forgetting_attn(*(t.unsqueeze(0) for t in tensors), cu_seqlens=bounds).squeeze(0)

    return differentiable(attend, x[:4], x.dout)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon")),
        Backend("attnzoo-gluon-pruned", attnzoo("gluon", True)),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("attnzoo-triton-pruned", attnzoo("triton", True)),
        Backend("forgetting_transformer", upstream, peers.importable("forgetting_transformer"), peers.PEER_LIMIT, late=True),
        Backend("fla", fla, peers.importable("fla.ops.forgetting_attn"), peers.PEER_LIMIT, late=True),
        Backend("softmax-attnzoo-gluon", softmax("gluon")),
        Backend("softmax-attnzoo-triton", softmax("triton")),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


class Check(flash.Check):
    """Of [out, dq, dk, dv, dlog_f] on the first and the last sequence and key head."""

    def cut(self, at: tuple[int, int], tensors: list[Tensor]) -> list[Tensor]:
        *most, gates = tensors if len(tensors) == 5 else (*tensors, None)
        rows = slice(None) if self.case.packed else slice(at[0], at[0] + 1)
        of_queries = slice(at[1] * self.group, (at[1] + 1) * self.group)
        return [*super().cut(at, most), *([] if gates is None else [gates[rows, ..., of_queries]])]

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        x = self.x
        *tensors, log_f = self.cut(at, [x.dout, x.q, x.k, x.v, x.log_f])
        dout, *leaves = (t.to(dtype) for t in tensors)
        leaves = [t.detach().requires_grad_() for t in (*leaves, log_f.to(torch.promote_types(dtype, torch.float32)))]
        out = forgetting_attention(*leaves, impl="reference", **x.options)
        grads = torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def entries(session: Session, case: Case) -> list[Entry]:
    """Every backend on one case, over the same q, k and v."""
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    x = case.inputs(session.device)
    plain = flash.Inputs(*x[:3], x.dout, x.options | {"causal": True})
    check, check_plain = Check(case, x, session.options.directions), flash.Check(case, plain, session.options.directions)
    return [Entry(backend.name, harness.in_graphs(backend, session.device) if session.options.graphs else backend, case, x, work,
                  check_plain if backend.name.startswith("softmax") else check) for backend in session.backends]


def panel(session: Session, case: Case) -> str:
    return ", ".join([f"d{case.head_dim} gate {case.gate:g}", *left_out(case, session.device)])


def left_out(case: Case, device: str) -> list[str]:
    """The share of tiles, which kernels count."""
    if torch.device(device).type != "cuda":
        return []
    from attnzoo_kernels.forgetting.blocks import passed_over

    x = case.inputs(device)
    bounds = {name: value for name, value in x.options.items() if name.startswith("cu_seqlens")}
    return [f"{passed_over(x.q, x.k, x.log_f, softmax_scale=case.head_dim**-0.5, **bounds):.0%} left out"]


def cases(session: Session) -> Iterator[tuple[int, Case]]:
    o = session.options
    for head_dim in o.head_dims:
        for length in o.lengths:
            yield length, benchmark_case(length, head_dim, o.tokens, o.hidden, gate=o.gate, dtype=session.dtype)


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length and head dim."""
    for length, case in cases(session):
        line = Line("forgetting", "speed", panel(session, case), length)
        yield from harness.compare_late_ones_last(line, entries(session, case), session.options.directions, session.timing)


def packed(session: Session) -> Iterator[list[Row]]:
    """The same of packed sequences of mixed lengths."""
    for length, case in cases(session):
        case = replace(case, lengths_q=mixed_lengths(length, max(3, round(session.options.tokens / (0.6 * length)))))
        line = Line("forgetting", "packed", panel(session, case), length)
        yield from harness.compare_late_ones_last(line, entries(session, case), session.options.directions, session.timing)


@dataclass(frozen=True)
class Seen(Case):
    """What one layer of a trained model gives the operator."""

    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        q, k, v, log_f = (x.to(device) for x in self.tensors)
        leaves = tuple(x.to(dtype).requires_grad_() for x, dtype in zip((q, k, v, log_f), (*[self.dtype] * 3, torch.float32), strict=True))
        generator = torch.Generator(device).manual_seed(seed)
        return Inputs(*leaves, torch.randn(v.shape, generator=generator, device=device, dtype=self.dtype), {})


@torch.no_grad()
def layers_of(where: str, length: int, device: str, dtype: torch.dtype) -> list[Seen]:
    """The cases of all layers, in their order."""
    given = trained.read(where, key="--checkpoint")
    loaded = checkpoint.rebuild(given.content, given.where)
    text = "".join(path.read_text() for path in sorted(Path(layers.__file__).parent.parent.rglob("*.py")))
    ids = torch.tensor([loaded.tokenizer.encode(text)[:length]], device=device)
    if ids.shape[1] < length:
        raise ValueError(f"--lengths {length}: the sources of attnzoo have {ids.shape[1]} tokens")
    found: list[Seen] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, **options) -> Tensor:
        found.append(Seen(batch=1, seqlen_q=length, heads=q.shape[-2], kv_heads=k.shape[-2], head_dim=q.shape[-1], dtype=dtype,
                          tensors=(q, k, v, log_f)))
        return forgetting_attention(q, k, v, log_f, **options)

    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype.itemsize == 2)
    with mock.patch.object(layers, "forgetting_attention", keep), autocast:
        loaded.model.to(device).eval()(ids, logits_at=torch.zeros(1, dtype=torch.int64, device=device))
    return found


def of_checkpoint(session: Session) -> Iterator[list[Row]]:
    """Forward and backward over what the layers of a trained model give the operator."""
    if session.options.checkpoint is None:
        raise SystemExit("the table trained needs --checkpoint, a run of attention=forgetting")
    for length in session.options.lengths:
        for index, case in enumerate(layers_of(session.options.checkpoint, length, session.device, session.dtype)):
            line = Line("forgetting", "trained", ", ".join([f"layer {index}", *left_out(case, session.device)]), length)
            yield from harness.compare_late_ones_last(line, entries(session, case), session.options.directions, session.timing)


TABLES = {"speed": speed, "packed": packed, "trained": of_checkpoint}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("forgetting", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [2048, 8192, 16384])
    command.add_argument("--gate", type=float, default=4.0, help="the mean of the gates' logits")
    command.add_argument("--checkpoint", help="of the table trained: a run of attention=forgetting")
    command.add_argument("--graphs", action="store_true", help="time each call as a CUDA graph")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64)
    plots = {"speed": "sequence length", "packed": "longest sequence"}
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
