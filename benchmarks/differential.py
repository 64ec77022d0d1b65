"""`differential_attention` against two or four calls of plain attention and a subtraction: speed of both versions' shapes, and memory.

    python -m benchmarks.differential                       # version 1: values twice as wide as keys
    python -m benchmarks.differential speed shared memory
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnzoo_kernels import differential_attention, flash_attention
from attnzoo_kernels.differential.cases import Case, Inputs, benchmark_case, shared_benchmark_case
from attnzoo_kernels.dispatch import IMPLEMENTATIONS
from benchmarks import harness, peers
from benchmarks.accuracy import error_ratio
from benchmarks.flash import EXACT_IN_DOUBLE, peak_megabytes
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported, differentiable
from benchmarks.report import Row


def refuse(case: Case, *features: str) -> None:
    """Raise Unsupported if the case uses one of the features."""
    used = {
        "packed input": case.packed,
        "window": case.window_size != (-1, -1),
        "unlike causal lengths": case.causal and any(m != n for m, n in case.lengths),
        "value width other than head_dim": case.value_dim not in (None, case.head_dim),
        "value width other than twice head_dim": case.value_dim != 2 * case.head_dim,
        "keys of their own": not case.shared_keys,
    }
    for feature in features:
        if used[feature]:
            raise Unsupported(f"cannot do: {feature}")


def attnzoo(impl: str) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        def attend(q1, q2, k1, *rest):
            k2, v, lam = rest if x.k2 is not None else (None, *rest)
            return differential_attention(q1, q2, k1, k2, v, lam, impl=impl, **x.options)

        return differentiable(attend, tuple(t for t in x[:6] if t is not None), x.dout)

    return make


def combined(first: Tensor, second: Tensor, lam: Tensor) -> Tensor:
    """As the published layers do it: in the outputs' dtype, (batch, seqlen, heads, width)."""
    return first - (lam.unsqueeze(-1) if lam.dim() else lam).to(first.dtype) * second


def calls(attend: Callable[..., Tensor], halves: bool = False, scope: Callable = nullcontext) -> Callable[[Case, Inputs], Pass]:
    """Two calls, or four over the two halves of the values, of a plain attention in the layout (batch, seqlen, heads, width)."""

    def make(case: Case, x: Inputs) -> Pass:
        refuse(case, "packed input", "window", "unlike causal lengths", *["value width other than twice head_dim"] * halves)

        def difference(q1, q2, k1, *rest):
            k2, v, lam = rest if x.k2 is not None else (k1, *rest)

            def path(q, k):
                if not halves:
                    return attend(q, k, v, case.causal)
                return torch.cat([attend(q, k, half, case.causal) for half in v.chunk(2, dim=-1)], dim=-1)

            return combined(path(q1, k1), path(q2, k2), lam)

        leaves = tuple(t.contiguous() for t in x[:6] if t is not None)
        return differentiable(difference, leaves, x.dout, scope=scope)

    return make


def pair_difference(out: Tensor, lam: Tensor) -> Tensor:
    """The subtraction behind one call with interleaved heads (batch, seqlen, 2 heads, width)."""
    return combined(out[..., 0::2, :], out[..., 1::2, :], lam)


@functools.cache
def compiled_pair_difference() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(pair_difference, dynamic=False)


def one_call(attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor], compiled: bool = False) -> Callable[[Case, Inputs], Pass]:
    """One call with twice the query heads, where the keys are shared, and the subtraction, in eager PyTorch or compiled."""

    def make(case: Case, x: Inputs) -> Pass:
        refuse(case, "packed input", "window", "unlike causal lengths", "keys of their own")

        subtract = compiled_pair_difference() if compiled else pair_difference

        def difference(q, k, v, lam):
            return subtract(attend(q, k, v, case.causal), lam)

        q = torch.stack((x.q1, x.q2), dim=-2).flatten(-3, -2)
        run = differentiable(difference, (q, x.k1, x.v, x.lam), x.dout)

        def backward():
            dq, *rest = run.backward()
            return dq[..., 0::2, :], dq[..., 1::2, :], *rest

        return Pass(run.forward, backward, run.saved)

    return make


def ours_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attention(q, k, v, causal=causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Views with heads first cost nothing; both backends read any strides."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    key = (q.shape[2], k.shape[2], causal)
    if key not in _flex_masks:
        _flex_masks[key] = create_block_mask(lambda b, h, i, j: i >= j, None, None, *key[:2], device=q.device) if causal else None
    return peers.compiled_flex_attention()(q, k, v, block_mask=_flex_masks[key], enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


_flex_masks = {}


class _FA3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = tuple(map(torch.empty_like, (q, k, v)))
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *grads, is_causal=ctx.causal)
        return *grads, None


def fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn.cute import flash_attn_func

    result = flash_attn_func(q, k, v, causal=causal)
    return result[0] if isinstance(result, tuple) else result


def offered(impl: str) -> str | None:
    return None if impl in IMPLEMENTATIONS else f"differential_attention has no impl={impl!r}"


PEER_LIMIT = 4.0  # they round two outputs before they subtract them, which our rule does not allow for


def _peer(name: str, make: Callable, missing: Callable = lambda: None) -> Backend:
    return Backend(name, make, missing, PEER_LIMIT)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon"), lambda: offered("gluon")),
        Backend("attnzoo-triton", attnzoo("triton"), lambda: offered("triton")),
        _peer("flash-1-call", one_call(ours_plain)),
        _peer("flash-1-call-compiled", one_call(ours_plain, True)),
        _peer("fa3-1-call-compiled", one_call(_FA3.apply, True), peers.fa3_missing),
        _peer("flash-2-calls", calls(ours_plain)),
        _peer("flash-4-calls", calls(ours_plain, True)),
        _peer("fa2-2-calls", calls(sdpa, scope=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))),
        _peer("fa2-4-calls", calls(sdpa, True, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))),
        _peer("cudnn-2-calls", calls(sdpa, scope=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))),
        _peer("cudnn-4-calls", calls(sdpa, True, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))),
        _peer("flex-2-calls", calls(flex)),
        _peer("fa3-2-calls", calls(_FA3.apply), peers.fa3_missing),
        _peer("fa4-2-calls", calls(fa4), peers.fa4_missing),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


class Check:
    """A pass against the operator's reference, on the first and the last sequence and key head of the full-size result.

    lambda's gradient counts where it is per token, and only ours: the peers' is rounded with their outputs.
    """

    def __init__(self, case: Case, x: Inputs, directions: list[str]):
        self.case, self.x, self.directions = case, x, directions
        self.slices = [(0, 0), (len(x.q1) - 1, x.k1.shape[-2] - 1)]
        self.expected: list[tuple[list[Tensor], list[Tensor]]] = []

    def __call__(self, run: Pass, with_lambda: bool) -> float:
        results = [run.restore(run.forward()).detach()]
        if "backward" in self.directions:
            grads = list(map(run.restore, run.backward()))
            results += grads if with_lambda and self.case.lam == "token" else grads[:-1]
        if not self.expected:
            self.expected = [(self.reference(at, self.x.q1.dtype), self.reference(at, self.exact_dtype)) for at in self.slices]
        return max(
            error_ratio(self.cut(at, value, heads), eager, exact)
            for at, (eagers, exacts) in zip(self.slices, self.expected, strict=True)
            for value, heads, eager, exact in zip(results, self.heads_of_results, eagers, exacts, strict=False))

    @property
    def exact_dtype(self) -> torch.dtype:
        queries, keys = (max(lengths) for lengths in zip(*self.case.lengths, strict=True))
        return torch.float64 if 2 * self.group * queries * keys <= EXACT_IN_DOUBLE else torch.float32

    @property
    def group(self) -> int:
        return self.x.q1.shape[-2] // self.x.k1.shape[-2]

    @property
    def heads_of_results(self) -> list[int]:
        """Heads per key head of out, dq1, dq2, dk1, (dk2,) dv, dlam; lambda has its heads last."""
        return [self.group] * 3 + [1] * (2 if self.x.k2 is None else 3) + [self.group]

    def cut(self, at: tuple[int, int], tensor: Tensor, heads: int) -> Tensor:
        row, head = at
        chosen = slice(head * heads, (head + 1) * heads)
        return tensor[row : row + 1, :, chosen] if tensor.dim() > 2 else tensor

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        x, group = self.x, self.group
        q1, q2, dout = (self.cut(at, t, group) for t in (x.q1, x.q2, x.dout))
        k1, k2, v = (t if t is None else self.cut(at, t, 1) for t in (x.k1, x.k2, x.v))
        lam = x.lam[at[1] * group : (at[1] + 1) * group] if x.lam.dim() == 1 else self.cut(at, x.lam, group)
        leaves = [t if t is None else t.to(dtype).detach().requires_grad_() for t in (q1, q2, k1, k2, v)]
        leaves.append(lam.to(torch.promote_types(dtype, torch.float32)).detach().requires_grad_())
        out = differential_attention(*leaves, impl="reference", **x.options)
        wanted = [t for t in leaves if t is not None]
        grads = torch.autograd.grad(out, wanted, dout.to(dtype)) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def entries(session: Session, case: Case) -> list[Entry]:
    """Every backend on one case, over the same inputs and the same check."""
    x = case.inputs(session.device)
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    check = Check(case, x, session.options.directions)
    return [
        Entry(backend.name, backend, case, x, work, lambda run, ours=backend.name.startswith("attnzoo"): check(run, ours))
        for backend in session.backends
    ]


def cases(session: Session, make: Callable[..., Case]) -> Iterator[tuple[str, int, Case]]:
    o = session.options
    for head_dim in o.head_dims:
        for mask in o.masks:
            for length in o.lengths:
                yield f"d{head_dim} {mask}", length, make(length, head_dim, mask == "causal", o.tokens, o.hidden, dtype=session.dtype)


def speed(session: Session) -> Iterator[list[Row]]:
    """Version 1's shape: keys of their own, values twice as wide, a scalar lambda."""
    for panel, length, case in cases(session, benchmark_case):
        line = Line("differential", "speed", panel, length)
        yield harness.compare(line, entries(session, case), session.options.directions, session.timing)


def shared(session: Session) -> Iterator[list[Row]]:
    """Version 2's shape: shared keys and values, lambda per token and head."""
    for panel, length, case in cases(session, shared_benchmark_case):
        line = Line("differential", "shared", panel, length)
        yield harness.compare(line, entries(session, case), session.options.directions, session.timing)


def memory(session: Session) -> Iterator[list[Row]]:
    """Peak of one forward and backward beyond inputs and output gradient, version 1's shape."""
    for panel, length, case in cases(session, benchmark_case):
        columns = entries(session, case)
        ready = harness.prepare(columns)
        for run in ready.passes.values():
            run.saved.clear()
        peaks = {label: peak_megabytes(session.device, run) for label, run in ready.passes.items()}
        yield Line("differential", "memory", panel, length).rows(columns, ready, "forward+backward", "MB", peaks)


TABLES = {f.__name__: f for f in (speed, shared, memory)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("differential", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [2048, 8192, 16384], hidden="heads * value width")
    command.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["causal"])
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64)
    plots = {"speed": "sequence length", "shared": "sequence length", "memory": "sequence length"}
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
