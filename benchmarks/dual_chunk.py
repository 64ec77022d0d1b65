"""`dual_chunk_attention` against plain causal attention of the same lengths and the three-call composition that others use.

    python -m benchmarks.dual_chunk                   # speed
    python -m benchmarks.dual_chunk speed memory long
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo_kernels import dual_chunk_attention, flash_attention
from attnzoo_kernels.dual_chunk.cases import Case, Inputs, benchmark_case
from attnzoo_kernels.dual_chunk.geometry import geometry
from attnzoo_kernels.dual_chunk.reference import rotate, stage_positions
from benchmarks import flash, harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported, differentiable, replayed
from benchmarks.peers import PEER_LIMIT, heads_first, offered
from benchmarks.report import Row


class Check(flash.Check):
    """A pass against this operator's reference."""

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        dout, q, k, v = (t.to(dtype) for t in self.cut(at, [self.x.dout, self.x.q, self.x.k, self.x.v]))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = dual_chunk_attention(*leaves, impl="reference", **self.x.options)
        grads = torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def attnzoo(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(lambda q, k, v: dual_chunk_attention(q, k, v, impl=impl, **x.options), (x.q, x.k, x.v), x.dout)

    return make


def plain(impl: str) -> Callable[[Case, Inputs], Pass]:
    """Causal attention without rotation or chunks: what the chunks' cost is counted against."""

    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(lambda q, k, v: flash_attention(q, k, v, causal=True, impl=impl), (x.q, x.k, x.v), x.dout)

    return make


class Engine:
    """One of PyTorch's attention kernels over (batch, heads, rows, width): output and LSE, and gradients for those of the merged rows."""

    def __init__(self, name: str, scale: float):
        self.name, self.scale = name, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple]:
        if self.name == "flash":
            out, lse, *state = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=self.scale)
        elif self.name == "cudnn":
            out, lse, *state = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=self.scale)
        else:
            scores = self.scores(q, k, causal)
            out, lse, state = (scores.softmax(-1).to(v.dtype) @ v), scores.logsumexp(-1), []
        return out, lse, tuple(state)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor, lse: Tensor,
                 state: tuple) -> tuple[Tensor, ...]:
        if self.name == "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, *state[:4], 0.0, causal, *state[4:6], scale=self.scale)
        if self.name == "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse, *state[4:6], None, *state[:4], 0.0, causal, scale=self.scale)
        weights = torch.exp(self.scores(q, k, causal) - lse[..., None])
        dscores = weights * ((grad @ v.mT).float() - (grad * out).float().sum(-1, keepdim=True)) * self.scale
        return dscores.to(q.dtype) @ k, dscores.to(q.dtype).mT @ q, weights.to(q.dtype).mT @ grad

    def scores(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = (q @ k.mT).float() * self.scale
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores


class ThreeCalls(torch.autograd.Function):
    """Up to three calls per chunk of queries, merged by their LSEs. Their backward gets the merged output and LSE, which is exact."""

    @staticmethod
    def stages(begin: int, chunk: int, rows: int) -> Iterator[tuple[int, slice, slice]]:
        """(stage, queries, keys) of one chunk."""
        queries, before = slice(begin, min(begin + chunk, rows)), max(begin - chunk, 0)
        for n, keys in enumerate((queries, slice(before, begin), slice(0, before))):
            if keys.stop > keys.start:
                yield n, queries, keys

    @staticmethod
    def forward(ctx, intra, successive, inter, k, v, chunk, engine):
        q, rows = (intra, successive, inter), k.shape[2]
        out, lse, states = torch.empty_like(intra), intra.new_empty(intra.shape[:3], dtype=torch.float32), []
        for begin in range(0, rows, chunk):
            outs, lses = [], []
            for n, queries, keys in ThreeCalls.stages(begin, chunk, rows):
                part, part_lse, state = engine.forward(q[n][:, :, queries], k[:, :, keys], v[:, :, keys], n == 0)
                outs.append(part)
                lses.append(part_lse.reshape(part.shape[:3]))
                states.append(state)
            merged = torch.stack(lses)
            lse[:, :, queries] = merged.logsumexp(0)
            weights = merged.softmax(0)[..., None]
            out[:, :, queries] = sum(w * part for w, part in zip(weights, outs, strict=True)).to(out.dtype)
        ctx.save_for_backward(*q, k, v, out, lse)
        ctx.chunk, ctx.engine, ctx.states = chunk, engine, states
        return out

    @staticmethod
    def backward(ctx, grad):
        *q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = [torch.zeros_like(x) for x in q], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        states, grad, rows = iter(ctx.states), grad.contiguous(), k.shape[2]
        for begin in range(0, rows, ctx.chunk):
            for n, queries, keys in ThreeCalls.stages(begin, ctx.chunk, rows):
                row_lse = lse[:, :, queries].contiguous()
                if ctx.engine.name == "cudnn":
                    row_lse = row_lse.unsqueeze(-1)
                parts = ctx.engine.backward(grad[:, :, queries], q[n][:, :, queries], k[:, :, keys], v[:, :, keys], n == 0,
                                            out[:, :, queries], row_lse, next(states))
                dq[n][:, :, queries] = parts[0]
                dk[:, :, keys] += parts[1]
                dv[:, :, keys] += parts[2]
        return *dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def composition(engine: str, compiled: bool = False) -> Callable[[Case, Inputs], Pass]:
    """Rotations in eager PyTorch or by torch.compile, three calls per chunk, merge by LSE: how others compute it."""

    def make(case: Case, x: Inputs) -> Pass:
        if case.packed or not case.causal or case.multiplier or case.seqlen_k or case.kv_heads or case.value_dim:
            raise Unsupported("cannot do: packed, bidirectional, multiplier, grouped heads, unlike lengths or widths")
        chunks = geometry(case.chunk_size, case.local_size, case.variant)
        cos, sin = x.options["cos"], x.options["sin"]
        places = stage_positions(torch.arange(case.seqlen_q, device=x.q.device)[None], chunks)

        angles = [(cos[p], sin[p]) for p in places]

        def rotated(q: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor]:
            turned = [rotate(x, *a, case.rope_interleaved) for x, a in ((q, angles[0]), (q, angles[1]), (q, angles[2]), (k, angles[0]))]
            *queries, keys = (heads_first(x) if compiled else x.transpose(1, 2) for x in turned)
            return queries, keys

        if compiled:
            rotated = torch.compile(rotated)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, keys = rotated(q, k)
            out = ThreeCalls.apply(*queries, keys, v.transpose(1, 2), chunks.chunk, Engine(engine, case.head_dim**-0.5))
            return out.transpose(1, 2)

        return differentiable(attend, (x.q, x.k, x.v), x.dout)

    return make


def captured(make: Callable[[Case, Inputs], Pass]) -> Callable[[Case, Inputs], Pass]:
    """A backend's passes as CUDA graphs: the host is left out, which launches many calls where chunks are small."""

    def make_captured(case: Case, x: Inputs) -> Pass:
        if not x.q.is_cuda:
            raise Unsupported("a CUDA graph needs a GPU")
        run, stream = make(case, x), torch.cuda.Stream()
        forward = replayed(run.forward, stream)
        with torch.cuda.stream(stream):  # autograd runs a backward on the stream of its forward
            run.backward()  # leaves its forward, outside of the graph
        return replace(run, forward=forward, backward=replayed(run.backward, stream))

    return make_captured


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("attnzoo-gluon", attnzoo("gluon"), lambda: offered("gluon")),
        Backend("plain-triton", plain("triton")),
        Backend("plain-gluon", plain("gluon"), lambda: offered("gluon")),
        Backend("three-calls-fa2", composition("flash"), limit=PEER_LIMIT),
        Backend("three-calls-cudnn", composition("cudnn"), limit=PEER_LIMIT),
        Backend("three-calls-cudnn-compiled", composition("cudnn", compiled=True), limit=PEER_LIMIT),
        Backend("three-calls-cudnn-graph", captured(composition("cudnn")), limit=PEER_LIMIT),
        Backend("three-calls-cudnn-compiled-graph", captured(composition("cudnn", compiled=True)), limit=PEER_LIMIT),
        Backend("attnzoo-reference", attnzoo("reference")),
        Backend("plain-reference", plain("reference")),
        Backend("three-calls-eager", composition("eager"), limit=PEER_LIMIT),
    )
}


def entries(session: Session, case: Case) -> list[Entry]:
    """Every backend on one case; plain attention is held against its own reference."""
    x = case.inputs(session.device)
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    check = Check(case, x, session.options.directions)
    plain_check = flash.Check(case, Inputs(*x[:4], {"causal": True}), session.options.directions)
    return [Entry(b.name, b, case, x, work, plain_check if b.name.startswith("plain") else check) for b in session.backends]


def main_cases(session: Session) -> Iterator[tuple[str, int, Case]]:
    o = session.options
    for head_dim in o.head_dims:
        for chunk_size in o.chunk_sizes:
            for length in o.lengths:
                yield f"d{head_dim} chunk_size {chunk_size}", length, benchmark_case(
                    length, head_dim, chunk_size, o.tokens, o.hidden, dtype=session.dtype)


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by length, head dim and chunk size; TFLOP/s of causal attention."""
    for panel, length, case in main_cases(session):
        line = Line("dual_chunk", "speed", panel, length)
        yield harness.compare(line, entries(session, case), session.options.directions, session.timing)


def memory(session: Session) -> Iterator[list[Row]]:
    """Peak of one forward and backward beyond inputs and output gradient (outputs, gradients and scratch), as the allocator counts it."""
    for panel, length, case in main_cases(session):
        columns = [entry for entry in entries(session, case) if not entry.label.endswith("-graph")]  # a graph keeps what it uses
        ready = harness.prepare(columns)
        for run in ready.passes.values():
            run.saved.clear()
        peaks = {label: flash.peak_megabytes(session.device, run) for label, run in ready.passes.items()}
        yield Line("dual_chunk", "memory", panel, length).rows(columns, ready, "forward+backward", "MB", peaks)


def long(session: Session) -> Iterator[list[Row]]:
    """One forward over very many tokens, 32 query heads and 8 key heads of 128: seconds and MB."""
    n = session.options.long_length
    # large logits: under small ones a million values average to nothing that could be checked
    case = Case(seqlen_q=n, heads=32, kv_heads=8, head_dim=128, chunk_size=32768, local_size=8192, q_scale=3.0, dtype=session.dtype)
    if session.device == "cpu":
        case = replace(case, heads=4, kv_heads=2, head_dim=16, chunk_size=16, local_size=4)
    x = case.inputs(session.device)
    q, k, v, options = x.q, x.k, x.v, x.options
    del x
    impl = None if session.device == "cuda" else "reference"
    for _ in range(2):  # the first compiles
        out, seconds, megabytes = measured(session.device, lambda: dual_chunk_attention(q, k, v, impl=impl, **options))
    error = last_rows_error(q, k, v, out, options)
    place = {"operator": "dual_chunk", "table": "long", "panel": "d128 h32kv8", "x": n, "label": "attnzoo", "case": str(case)}
    yield [Row(direction="forward", unit=unit, value=value if error <= 1 else None, baseline="attnzoo", error=error,
               note="checked on the last 64 queries of two key heads", **place) for unit, value in (("s", seconds), ("MB", megabytes))]


@torch.no_grad()
def last_rows_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: dict, rows: int = 64) -> float:
    """error_ratio of the last rows, which see every key, in the groups of the first and the last key head."""
    group, errors = q.shape[2] // k.shape[2], []
    for head in (0, k.shape[2] - 1):
        queries, keys = (slice(None), slice(-rows, None), slice(head * group, (head + 1) * group)), (slice(None), slice(None), [head])
        eager, exact = (dual_chunk_attention(*(t.to(dtype) for t in (q[queries], k[keys], v[keys])), impl="reference", **options)
                        for dtype in (q.dtype, torch.float64))
        errors.append(error_ratio(out[queries], eager, exact))
    return max(errors)


@torch.no_grad()
def measured(device: str, call: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
    """The result of one call, its seconds and its peak of CUDA memory beyond what was there, in MB (0 on a CPU)."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    start = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e6 if cuda else 0.0


TABLES = {f.__name__: f for f in (speed, memory, long)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("dual_chunk", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [8192, 16384, 32768])
    command.add_argument("--chunk-sizes", nargs="+", type=harness.positive, default=[4096], help="local_size is a quarter of it")
    command.add_argument("--long-length", type=harness.positive, default=2**20, help="tokens of the long table (default: 1048576)")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 60], head_dims=[16], chunk_sizes=[16], tokens=120, hidden=32, long_length=64)
    plots = {"speed": "sequence length", "memory": "sequence length"}
    references = [name for name in BACKENDS if name.endswith(("-reference", "-eager"))]
    return harness.main(command, TABLES, BACKENDS, references, plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
