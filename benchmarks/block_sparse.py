"""`block_sparse_attention` over random causal blocks against FlexAttention with a BlockMask, and against dense kernels.

    python -m benchmarks.block_sparse                              # milliseconds by density
    python -m benchmarks.block_sparse density lengths blocks layouts
    python -m benchmarks.block_sparse density --full --backends attnzoo cudnn    # cuDNN's block-sparse attention has no causal mask
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo_kernels import BlockLayout, block_sparse_attention
from attnzoo_kernels.block_sparse.cases import Case, Inputs, benchmark_case
from attnzoo_kernels.flash import cases as dense_cases
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported, differentiable
from benchmarks.report import Row
from benchmarks.timing import Candidate

DENSE = "dense "
OWN_DENSE = DENSE + "attnzoo-"


class Check(flash.Check):
    """As flash's, on slices with their part of the layout."""

    def __init__(self, case: Case, x: Inputs, directions: list[str]):
        self.case, self.x, self.directions = case, x, directions
        self.slices = [(0, 0), (case.batch - 1, x.k.shape[-2] - 1)]
        self.expected: list[tuple[list[Tensor], list[Tensor]]] = []

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        dout, q, k, v = (t.to(dtype) for t in self.cut(at, [self.x.dout, self.x.q, self.x.k, self.x.v]))
        batch, head = (n if size > 1 else 0 for n, size in zip(at, (self.x.layout.batch, self.x.layout.heads), strict=True))
        heads = slice(head * self.group, (head + 1) * self.group) if self.x.layout.heads > 1 else slice(None)
        layout = replace(self.x.layout, mask=self.x.layout.mask[batch : batch + 1, heads])
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = block_sparse_attention(*leaves, layout, impl="reference", **self.x.options)
        grads = torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def attnzoo(impl: str | None) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return differentiable(lambda q, k, v: block_sparse_attention(q, k, v, x.layout, impl=impl, **x.options), (x.q, x.k, x.v), x.dout)

    return make


def step(impl: str | None, new_layout: bool) -> Callable[[Case, Inputs], Pass]:
    """`backward` is forward and backward here. With new_layout every call starts from the mask, as if the layout were used once."""

    def make(case: Case, x: Inputs) -> Pass:
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]

        def forward() -> Tensor:
            layout = BlockLayout.from_mask(x.layout.mask, x.layout.block_q, x.layout.block_k) if new_layout else x.layout
            return block_sparse_attention(*leaves, layout, impl=impl, **x.options)

        return Pass(forward, lambda: torch.autograd.grad(forward(), leaves, x.dout), [])

    return make


def ordered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """BlockMask's counts and indices of kept blocks."""
    return kept.sum(-1).int(), kept.int().argsort(dim=-1, descending=True, stable=True).int()


def flex(case: Case, x: Inputs) -> Pass:
    """Full blocks and those on the diagonal apart, its best case; making the BlockMask is not timed."""
    from torch.nn.attention.flex_attention import BlockMask

    if case.packed or not case.causal or case.window_size != (-1, -1) or case.block_q != (case.block_k or case.block_q):
        raise Unsupported("written for dense, causal, square blocks")
    shift = x.k.shape[1] - x.q.shape[1]
    if shift % case.block_q:
        raise Unsupported("written for lengths that differ by whole blocks")
    mask = x.layout.mask.expand(x.q.shape[0], x.q.shape[2], -1, -1)
    row = torch.arange(mask.shape[-2], device=mask.device)[:, None] + shift // case.block_q
    column = torch.arange(mask.shape[-1], device=mask.device)
    block_mask = BlockMask.from_kv_blocks(
        *ordered(mask & (row == column)), *ordered(mask & (row > column)), BLOCK_SIZE=(case.block_q, case.block_q),
        mask_mod=lambda b, h, i, j: j <= i + shift, seq_lengths=(x.q.shape[1], x.k.shape[1]))
    attend = functools.partial(peers.compiled_flex_attention(), block_mask=block_mask, enable_gqa=x.q.shape[2] != x.k.shape[2])
    return differentiable(attend, tuple(map(peers.heads_first, (x.q, x.k, x.v))), peers.heads_first(x.dout), lambda y: y.transpose(1, 2))


def cudnn(case: Case, x: Inputs) -> Pass:
    """Of NVIDIA's cudnn-frontend. Its backward makes the lists of keys' blocks in every call, ours are kept with the layout."""
    from cudnn import BSA

    peers.refuse(case, "packed input", "window", "softcap", "alibi", "sinks", "dropout", "values of another width")
    if case.causal:
        raise Unsupported("has no causal mask: --full")
    if case.block_q not in (64, 128) or case.block_q != (case.block_k or case.block_q):
        raise Unsupported("written for square blocks of 64 or 128")
    counts, blocks = ordered(x.layout.mask.expand(x.q.shape[0], x.q.shape[2], -1, -1))
    lists = {"q2k_block_index": blocks[..., : counts.max()].contiguous(), "q2k_block_nums": counts}
    options = {"sparse_block_size": case.block_q, "layout": "bshd"}
    saved: list[Tensor] = []

    def forward() -> Tensor:
        return BSA.block_sparse_attention_forward(x.q, x.k, x.v, **lists, **options)["o_tensor"]

    def backward() -> tuple[Tensor, ...]:
        if not saved:
            saved.extend(BSA.block_sparse_attention_forward(x.q, x.k, x.v, **lists, **options).values())
        return tuple(BSA.block_sparse_attention_backward(x.dout, x.q, x.k, x.v, *saved, **lists, **options).values())

    return Pass(forward, backward, saved)


@dataclass(frozen=True)
class Dense:
    """A peer's backend over the same q, k and v without the layout."""

    name: str

    def __call__(self, case: dense_cases.Case, x: dense_cases.Inputs) -> Pass:
        return peers.BACKENDS[self.name].make(case, x)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo", attnzoo(None)),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("flex", flex, limit=peers.PEER_LIMIT),
        Backend("cudnn", cudnn, peers.importable("cudnn", "BSA", "pip install nvidia-cudnn-frontend, 1.30 or later"),
                limit=peers.PEER_LIMIT, on_request=True),
        *(Backend(DENSE + name, Dense(name), peers.BACKENDS[name].missing, peers.BACKENDS[name].limit)
          for name in ("attnzoo-gluon", "attnzoo-triton", "sdpa-cudnn", "fa3", "fa4")),
        Backend("attnzoo-reference", attnzoo("reference")),
        Backend(DENSE + "attnzoo-reference", Dense("attnzoo-reference")),
    )
}
DRY_RUN = ["attnzoo-reference", DENSE + "attnzoo-reference"]


def entries(session: Session, case: Case, dense: bool = True) -> list[Entry]:
    x = case.inputs(session.device)
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    check = Check(case, x, session.options.directions)
    result = [Entry(b.name, b, case, x, work, check) for b in session.backends if not b.name.startswith(DENSE)]
    whole = dense_cases.Case(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, heads=case.heads, kv_heads=case.kv_heads,
                             head_dim=case.head_dim, value_dim=case.value_dim, causal=case.causal, dtype=case.dtype)
    y = dense_cases.Inputs(x.q, x.k, x.v, x.dout, {"causal": case.causal})
    check = flash.Check(whole, y, session.options.directions)
    return result + [Entry(b.name, b, whole, y, work, check) for b in session.backends if b.name.startswith(DENSE) and dense]


def compare(session: Session, line: Line, columns: list[Entry], kept: float) -> list[Row]:
    """Milliseconds. Our columns' notes say how the time stands to `kept` (the density) times that of our dense kernels."""
    ready = harness.prepare(columns)
    rows = []
    for direction in session.options.directions:
        readings = session.timing.measure({name: Candidate(getattr(run, direction), run.scope) for name, run in ready.passes.items()})
        ms = {name: statistics.median(times) for name, times in readings.items()}
        spread = {name: (max(times) - min(times)) / ms[name] for name, times in readings.items()}
        for row in line.rows(columns, ready, direction, "ms", ms, ms=ms, spread=spread):
            if row.value and row.label.startswith("attnzoo"):
                shares = [f"{row.value / (kept * dense):.2f} times density times {name}"
                          for name, dense in ms.items() if name.startswith(OWN_DENSE)]
                row = replace(row, note="; ".join(filter(None, (row.note, f"density {kept:.3f}", *shares))))
            rows.append(row)
    return rows


def make_case(session: Session, seqlen: int, density: float, block: int, causal: bool = True) -> Case:
    o = session.options
    return replace(benchmark_case(seqlen, density, block, o.head_dim, o.heads, dtype=session.dtype), causal=causal)


def break_even(points: list[tuple[float, float, float]]) -> float | None:
    """The density at which our time reaches a dense kernel's, interpolated; points are (density, ours, dense) from low to high density."""
    for (density, ours, dense), (next_density, next_ours, next_dense) in itertools.pairwise(points):
        gap, next_gap = dense - ours, next_dense - next_ours
        if gap > 0 >= next_gap:
            return density + (next_density - density) * gap / (gap - next_gap)
    return None


def density(session: Session) -> Iterator[list[Row]]:
    """By the density that is drawn; the diagonal comes to it, and notes say the share of the blocks that touch the causal triangle, or with
    `--full` of all. Dense kernels stand beside, and a note says where the fastest of them is as fast."""
    o = session.options
    for seqlen in o.lengths:
        points: dict[str, list[tuple[float, float, float]]] = {direction: [] for direction in o.directions}
        for share in sorted(o.densities):
            case = make_case(session, seqlen, share, o.block, causal=not o.full)
            line = Line("block_sparse", "density", f"n{seqlen} blocks of {o.block}{', full' if o.full else ''}", share)
            rows = compare(session, line, entries(session, case), case.kept)
            for n, row in enumerate(rows):
                dense = [(r.value, r.label) for r in rows if r.direction == row.direction and r.label.startswith(DENSE) and r.value]
                if row.label == row.baseline and row.value and dense:
                    before = points[row.direction]
                    before.append((case.kept, row.value, min(dense)[0]))
                    if (at := break_even(before[-2:])) is not None:
                        rows[n] = replace(row, note=f"{row.note}; breaks even with {min(dense)[1]} at density {at:.2f}".strip("; "))
            yield rows


def lengths(session: Session) -> Iterator[list[Row]]:
    """By length at a mean of `--row-blocks` blocks a row: time should grow with the length, not with its square."""
    o = session.options
    for seqlen in o.growing_lengths:
        case = make_case(session, seqlen, min(1.0, 2 * o.row_blocks * o.block / seqlen), o.block)
        line = Line("block_sparse", "lengths", f"{o.row_blocks} blocks of {o.block} a row", seqlen)
        yield compare(session, line, entries(session, case, dense=False), case.kept)


def blocks(session: Session) -> Iterator[list[Row]]:
    """By block size at one density, the diagonal among it, all sizes in one comparison: what small blocks cost. Notes say how each
    backend's time stands to its own with blocks of `--block`."""
    o = session.options
    columns = []
    for block in o.block_sizes:
        diagonal = 2 / (-(-o.lengths[0] // block) + 1)
        case = make_case(session, o.lengths[0], max(0.0, (o.block_density - diagonal) / (1 - diagonal)), block)
        columns += [replace(entry, label=f"{block} {entry.label}") for entry in entries(session, case, dense=False)]
    rows = compare(session, Line("block_sparse", "blocks", f"n{o.lengths[0]} density {o.block_density:g}", 0), columns, o.block_density)
    ms = {(row.direction, row.label): row.value for row in rows}
    baseline = session.backends[0].name
    for n, row in enumerate(rows):
        block, label = row.label.split(" ", 1)
        value, ours, usual = (ms.get((row.direction, name)) for name in (row.label, f"{block} {baseline}", f"{o.block} {label}"))
        note = f"{value / usual:.2f} times blocks of {o.block}" if value and usual else ""
        rows[n] = replace(row, x=float(block), label=label, baseline=baseline, ratio=value / ours if value and ours else None,
                          note="; ".join(filter(None, (row.note, note))))
    yield rows


def layouts(session: Session) -> Iterator[list[Row]]:
    """A layout used again against one made for every call, by forward, and by forward and backward (called backward) together."""
    o = session.options
    impl = "reference" if session.device == "cpu" else None
    for share in o.densities:
        case = make_case(session, o.lengths[0], share, o.block)
        x = case.inputs(session.device)
        check = Check(case, x, o.directions)
        work = {"forward": 1.0, "backward": 1.0}
        backends = [Backend("reused layout", step(impl, False)), Backend("new layout", step(impl, True))]
        columns = [Entry(backend.name, backend, case, x, work, check) for backend in backends]
        yield compare(session, Line("block_sparse", "layouts", f"n{o.lengths[0]} blocks of {o.block}", share), columns, case.kept)


TABLES = {f.__name__: f for f in (density, lengths, blocks, layouts)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("block_sparse", list(TABLES), list(BACKENDS))
    command.add_argument("--lengths", nargs="+", type=harness.positive, default=[16384, 32768])
    command.add_argument("--densities", nargs="+", type=float, default=[0.06, 0.12, 0.25, 0.5, 1.0], help="drawn; the diagonal is added")
    command.add_argument("--block", type=harness.positive, default=128)
    command.add_argument("--full", action="store_true", help="of the density table: without the causal mask")
    command.add_argument("--block-sizes", nargs="+", type=harness.positive, default=[16, 32, 64, 128, 256])
    command.add_argument("--block-density", type=float, default=0.25, help="density of the blocks table (default: 0.25)")
    command.add_argument("--growing-lengths", nargs="+", type=harness.positive, default=[8192, 16384, 24576, 32768, 49152])
    command.add_argument("--row-blocks", type=harness.positive, default=16, help="blocks a row in the lengths table (default: 16)")
    command.add_argument("--heads", type=harness.positive, default=16)
    command.add_argument("--head-dim", type=harness.positive, default=128)
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[64], densities=[0.3, 1.0], block=16, block_sizes=[16, 32], growing_lengths=[32, 64], row_blocks=2,
                             heads=2, head_dim=16)
    plots = {"density": "density drawn, to which the diagonal comes", "lengths": "sequence length", "blocks": "block"}
    return harness.main(command, TABLES, BACKENDS, DRY_RUN, plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
