"""`flash_attention` over key ranges: against the same sequences packed by their lengths, and against FlexAttention with a mask of the list.

    python -m benchmarks.ranges                             # the main table
    python -m benchmarks.ranges speed lists

A rate counts visible pairs. The tables of a list and FlexAttention's block mask are made outside of the timing, and inside of it in those
columns that say so.
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo_kernels import KeyRanges, flash_attention
from attnzoo_kernels.flash.cases import Case, Inputs, mixed_lengths
from attnzoo_kernels.flash.range_cases import RangeCase
from attnzoo_kernels.ranges import CAUSAL, CAUSAL_TOP_LEFT, FULL, make_tables
from benchmarks import flash, harness, peers
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported, differentiable
from benchmarks.report import Row
from benchmarks.timing import Candidate

PACKED = "packed "
WITH = " with its lists"
UNROLLED = 64  # ranges that a mask of FlexAttention looks at one by one


def attnzoo(impl: str, lists: bool = False) -> Callable[[RangeCase, Inputs], Pass]:
    """lists: the tables are made in every call."""

    def make(case: RangeCase, x: Inputs) -> Pass:
        ranges = x.options["ranges"] if lists else KeyRanges.of(x.options["ranges"])
        attend = functools.partial(flash_attention, impl=impl, deterministic=False, **x.options | {"ranges": ranges})
        return differentiable(attend, (x.q, x.k, x.v), x.dout)

    return make


def mask_of(case: RangeCase) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod of a list."""
    left, right = case.window_size
    if len(case.ranges) > UNROLLED:
        raise Unsupported(f"written for lists of up to {UNROLLED} ranges")

    def mask(b, h, i, j):
        any_sees = j < 0
        for q_begin, q_end, k_begin, k_end, kind in case.ranges:
            diagonal = k_begin - q_begin if kind == CAUSAL_TOP_LEFT else k_end - q_end
            seen = (i >= q_begin) & (i < q_end) & (j >= k_begin) & (j < k_end)
            if kind != FULL or right >= 0:
                seen = seen & (j - i <= diagonal + (right if kind == FULL else 0))
            if left >= 0:
                seen = seen & (j - i >= diagonal - left)
            any_sees = any_sees | seen
        return any_sees

    return mask


@functools.cache
def compiled_block_mask() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def flex(mask_mod: Callable, lists: bool) -> Callable[[Case, Inputs], Pass]:
    """lists: the block mask is made in every call, by a compiled function, which for some masks takes minutes to compile. mask_mod: from a
    case and its inputs."""

    def make(case: Case, x: Inputs) -> Pass:
        from torch.nn.attention.flex_attention import create_block_mask

        q, k, v, dout = (peers.heads_first(t[None]) for t in (x.q, x.k, x.v, x.dout))
        create = compiled_block_mask() if lists else create_block_mask
        block_mask = functools.partial(create, mask_mod(case, x), None, None, q.shape[2], k.shape[2], device=q.device)
        made = block_mask()
        attend = functools.partial(peers.compiled_flex_attention(), enable_gqa=q.shape[1] != k.shape[1])
        return differentiable(lambda q, k, v: attend(q, k, v, block_mask=block_mask() if lists else made), (q, k, v), dout,
                              lambda y: y.transpose(1, 2)[0])

    return make


def backends(attnzoo: Callable[..., Callable], mask_mod: Callable, packed: str) -> dict[str, Backend]:
    """Ours and FlexAttention, with lists made outside of the timing and inside, and ours on packed sequences under names that begin with
    `packed`. attnzoo: from impl and lists to what makes a pass. mask_mod: as `flex` takes it."""
    found = (
        Backend("attnzoo-gluon", attnzoo("gluon")),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("attnzoo-gluon" + WITH, attnzoo("gluon", lists=True)),
        Backend("flex", flex(mask_mod, False), limit=peers.PEER_LIMIT, late=True),
        Backend("flex" + WITH, flex(mask_mod, True), limit=peers.PEER_LIMIT, late=True),
        *(Backend(packed + name, peers.BACKENDS[name].make) for name in ("attnzoo-gluon", "attnzoo-triton")),
        Backend("attnzoo-reference", attnzoo("reference")),
        Backend(packed + "attnzoo-reference", peers.BACKENDS["attnzoo-reference"].make),
    )
    return {backend.name: backend for backend in found}


BACKENDS = backends(attnzoo, lambda case, x: mask_of(case), PACKED)


def of_sequences(lengths: tuple[int, ...]) -> tuple[tuple[int, int, int, int, int], ...]:
    return tuple((a, b, a, b, CAUSAL) for a, b in itertools.pairwise((0, *itertools.accumulate(lengths))))


def cases(session: Session) -> Iterator[tuple[str, int, RangeCase, Case | None]]:
    """(panel, tokens, case, the same sequences packed by their lengths)."""
    o = session.options
    for head_dim, total in itertools.product(o.head_dims, o.lengths):
        shape = {"heads": o.hidden // head_dim, "kv_heads": o.hidden // head_dim // o.group, "head_dim": head_dim, "dtype": session.dtype}
        lengths = mixed_lengths(total // 4, 7)
        rows = sum(lengths)
        packed = Case(lengths_q=lengths, causal=True, **shape)
        plain = RangeCase(lengths_q=(rows,), ranges=of_sequences(lengths), label="sequences", **shape)
        yield f"d{head_dim} sequences", total, plain, packed
        window = (total // 16 - 1, -1)
        yield (f"d{head_dim} sequences in windows", total, replace(plain, window_size=window, label="windows"),
               replace(packed, window_size=window))
        # a prefix that eight sequences share
        prefix, own = total // 2, total // 16
        shared = ((0, total, 0, prefix, CAUSAL_TOP_LEFT), *(tuple(n + prefix for n in row[:4]) + (CAUSAL,)
                                                           for row in of_sequences((own,) * 8)))
        yield f"d{head_dim} shared prefix", total, RangeCase(lengths_q=(total,), ranges=shared, label="prefix", **shape), None
        # what the second of four GPUs sees of a sequence: its second chunk of eight, and its seventh
        chunk = total // 8
        of_rank = ((0, chunk, 0, 2 * chunk, CAUSAL), (chunk, 2 * chunk, 0, 7 * chunk, CAUSAL))
        yield (f"d{head_dim} one GPU of four", total,
               RangeCase(lengths_q=(2 * chunk,), lengths_k=(8 * chunk,), ranges=of_rank, label="chunks", **shape), None)


def entries(session: Session, case: RangeCase, packed: Case | None) -> Iterator[Entry]:
    for one, chosen in ((case, [b for b in session.backends if not b.name.startswith(PACKED)]),
                        (packed, [b for b in session.backends if b.name.startswith(PACKED)])):
        if one is not None:
            x = one.inputs(session.device)
            work = {"forward": one.flops(), "backward": one.flops(backward=True)}
            check = flash.Check(one, x, session.options.directions)
            yield from (Entry(backend.name, backend, one, x, work, check) for backend in chosen)


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by number of tokens and kind of list."""
    for panel, total, case, packed in cases(session):
        yield from harness.compare_late_ones_last(Line("ranges", "speed", panel, total), [*entries(session, case, packed)],
                                                  session.options.directions, session.timing)


def lists(session: Session) -> Iterator[list[Row]]:
    """What making the tables of a list costs, by its ranges; their order is random."""
    for count in session.options.counts:
        rows = torch.tensor(of_sequences((16,) * count), dtype=torch.int32, device=session.device)
        rows = rows[torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(session.device)]
        if session.device == "cpu":
            continue
        readings = session.timing.measure({"attnzoo": Candidate(functools.partial(make_tables, rows), Pass.scope)})
        us = 1e3 * statistics.median(readings["attnzoo"])
        yield [Row("ranges", "lists", "tables of a list", count, "attnzoo", f"{count} ranges", "forward", "us", us, baseline="attnzoo",
                   ratio=1.0)]


TABLES = {f.__name__: f for f in (speed, lists)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("ranges", list(TABLES), list(BACKENDS))
    command.add_argument("--lengths", nargs="+", type=harness.positive, default=[8192, 16384], help="tokens of a list")
    command.add_argument("--head-dims", nargs="+", type=harness.positive, default=[64, 128])
    command.add_argument("--hidden", type=harness.positive, default=2048, help="heads * head_dim (default: 2048)")
    command.add_argument("--group", type=harness.positive, default=4, help="query heads of a key head (default: 4); the check of more than "
                         "16384 tokens has memory for 1 only")
    command.add_argument("--counts", nargs="+", type=harness.positive, default=[10, 100, 1000, 10000], help="ranges of the table `lists`")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[64], head_dims=[16], hidden=64)
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference", PACKED + "attnzoo-reference"], {"speed": "tokens"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
