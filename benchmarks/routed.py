"""Attention over chosen blocks of keys: MoBA, MSA and NSA beside dense attention, FlexAttention with a mask of the blocks, and others' NSA.

    python -m benchmarks.routed                             # MoBA by length
    python -m benchmarks.routed moba selected msa nsa lists indexer rows decode
    python -m benchmarks.routed selected nsa --heads 64 --kv-heads 4 --compress-size 64 --compress-stride 64    # fla takes these
    python -m benchmarks.routed selected --backends attnzoo nsa-triton fsa
    python -m benchmarks.routed selected --backends attnzoo nsa-cudnn --directions forward

Queries and keys are random, and each query chooses its blocks by them: no two choose alike, so that the blocks of a tile of queries are
soon all that there are. A rate counts the pairs of a query and a key that it reads, for dense kernels too: its ratios are those of the
times. Blocks are given where a column does not say that it chooses them. FlexAttention's block mask is made outside of the timing.

FlexAttention and fla take minutes to compile on a fresh machine. A line has their figures last, from a comparison of its own with the
baseline beside them. So it has those of the other NSAs, which are taken where --backends names them.
"""

import functools
import importlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.attention.cache import Newest
from attnzoo_kernels import (
    decode_attention,
    flash_attention,
    moba_attention,
    moba_blocks,
    msa_attention,
    msa_blocks,
    nsa_attention,
    routed_attention,
)
from attnzoo_kernels.decode import cases as decode_cases
from attnzoo_kernels.flash import cases as dense_cases
from attnzoo_kernels.nsa import cases as nsa_cases
from attnzoo_kernels.nsa import compressed_bounds
from attnzoo_kernels.routed import cases
from attnzoo_kernels.routed.routes import Blocks, routes
from benchmarks import decode, flash, harness, peers
from benchmarks.accuracy import error_ratio
from benchmarks.block_sparse import DENSE, Dense, ordered
from benchmarks.harness import Backend, Entry, Line, Pass, Prepared, Session, Unsupported, differentiable
from benchmarks.report import Row
from benchmarks.timing import Candidate

TILE = 128  # of FlexAttention


@dataclass
class Problem:
    """leaves: q, k, v and what else has a gradient. call: the operator as a function of leaves, blocks and impl. index: MSA's index queries
    and keys, where they choose."""

    leaves: list[Tensor]
    dout: Tensor
    blocks: Tensor
    call: Callable[..., Tensor]
    index: tuple[Tensor, Tensor] | None = None

    @property
    def q(self) -> Tensor:
        return self.leaves[0]

    @property
    def k(self) -> Tensor:
        return self.leaves[1]


class Check(flash.Check):
    """As flash's, on slices with the blocks of their heads. The reference takes one query head at a time, and adds up what keys get."""

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.float64 if self.case.seqlen_q**2 <= flash.EXACT_IN_DOUBLE else torch.float32

    def cut(self, at: tuple[int, int], tensors: list[Tensor]) -> list[Tensor]:
        batch, head = at
        return self.heads(tensors, slice(head * self.group, (head + 1) * self.group), slice(head, head + 1), batch)

    def heads(self, tensors: list[Tensor], of_queries: slice, of_keys: slice, batch: int) -> list[Tensor]:
        heads = self.x.q.shape[-2]
        return [t[batch : batch + 1, :, of_queries if t.shape[-2] == heads else of_keys] for t in tensors]

    def reference(self, at: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        batch, head = at
        by_head = [self.one_head(batch, slice(h, h + 1), slice(head, head + 1), dtype)
                   for h in range(head * self.group, (head + 1) * self.group)]
        of_queries = [True, *(t.shape[-2] == self.x.q.shape[-2] for t in self.x.leaves)]
        return [torch.cat(parts, -2) if apart else torch.stack(parts).sum(0)
                for apart, parts in zip(of_queries, zip(*by_head, strict=True), strict=False)]

    def one_head(self, batch: int, of_queries: slice, of_keys: slice, dtype: torch.dtype) -> list[Tensor]:
        dout, *leaves = (t.to(dtype) for t in self.heads([self.x.dout, *self.x.leaves], of_queries, of_keys, batch))
        leaves = [t.detach().requires_grad_() for t in leaves]
        (blocks,) = self.heads([self.x.blocks], of_queries, of_keys, batch)
        out = self.x.call(*leaves, blocks=blocks, impl="reference")
        grads = torch.autograd.grad(out, leaves, dout) if "backward" in self.directions else ()
        return [out.detach(), *grads]


def attnzoo(impl: str | None) -> Callable[[Any, Problem], Pass]:
    def make(case: Any, x: Problem) -> Pass:
        return differentiable(functools.partial(x.call, blocks=x.blocks, impl=impl), tuple(x.leaves), x.dout)

    return make


def choosing(case: Any, x: Problem) -> Pass:
    """The choice in every call."""
    if isinstance(case, nsa_cases.Case):
        return differentiable(functools.partial(x.call, blocks=None, impl=None), tuple(x.leaves), x.dout)
    if x.index is not None:
        index_q, index_k = x.index
        attend = functools.partial(msa_attention, index_q=index_q, index_k=index_k, block_size=case.block_size, top_k=case.slots + 1)
        return differentiable(attend, tuple(x.leaves), x.dout)
    if case.shared:
        raise Unsupported("MoBA chooses by query head")
    attend = functools.partial(moba_attention, block_size=case.block_size, top_k=case.slots + 1)
    return differentiable(attend, tuple(x.leaves), x.dout)


def flex_lists(read: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """BlockMask's counts and indices of tiles in part and of whole ones. read: which blocks of `size` keys, of the query's own causally and
    of earlier ones, each query reads, bool (batch, heads, seqlen, blocks)."""
    if TILE % size and size % TILE:
        raise Unsupported(f"written for blocks that divide {TILE} or are a multiple of it")
    missing = -read.shape[2] % TILE
    some, every = (F.pad(read, (0, 0, 0, missing), value=value).unflatten(2, (-1, TILE)) for value in (False, True))
    some, every = some.any(3), every.all(3)
    if size < TILE:
        missing = -read.shape[3] % (TILE // size)
        some, every = (F.pad(tiles, (0, missing)).unflatten(3, (-1, TILE // size)) for tiles in (some, every))
        some, every = some.any(4), every.all(4)
    some, every = (tiles.repeat_interleave(max(size // TILE, 1), dim=3)[..., : some.shape[2]] for tiles in (some, every))
    row, column = (torch.arange(n, device=read.device) for n in some.shape[2:])
    earlier, own = column < row[:, None], column == row[:, None]
    return *ordered(some & (earlier & ~every | own)), *ordered(every & earlier)


def flex(case: Any, x: Problem) -> Pass:
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(case, nsa_cases.Case):
        raise Unsupported("written for the chosen blocks alone")
    seqlen, heads, size = x.q.shape[1], x.q.shape[2], case.block_size
    group, count = heads // x.blocks.shape[2], -(-seqlen // size)
    own = torch.arange(seqlen, device=x.q.device) // size
    # (batch, choosers, queries, blocks)
    read = torch.zeros(*x.blocks.shape[:-1], count + 1, dtype=torch.bool, device=x.q.device).scatter_(-1, x.blocks.long() + 1, True)
    read = ((read[..., 1:] & (torch.arange(count, device=x.q.device) < own[:, None])[:, None]) | F.one_hot(own, count).bool()[:, None])
    read = read.transpose(1, 2).contiguous()

    def mask(b, h, i, j):
        return (j <= i) & read[b, h // group, i, j // size]

    lists = (tiles.repeat_interleave(group, dim=1) for tiles in flex_lists(read, size))
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=mask, seq_lengths=(seqlen, seqlen))
    attend = functools.partial(peers.compiled_flex_attention(), block_mask=block_mask, enable_gqa=heads != x.k.shape[2])
    return differentiable(attend, tuple(map(peers.heads_first, x.leaves)), peers.heads_first(x.dout), lambda y: y.transpose(1, 2))


@functools.cache
def compile_configurations_together() -> None:
    """Triton's tuner compiles a kernel's configurations one after the other. fla's kernels have a dozen each."""
    import triton
    from triton.runtime.autotuner import Autotuner

    run, compiled = Autotuner.run, set()

    def compile_then_run(self, *args, **kwargs):
        if self not in compiled and self.base_fn.__module__.startswith("fla."):
            compiled.add(self)
            with ThreadPoolExecutor(os.cpu_count()) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
                self.warmup(*args, **{name: value for name, value in kwargs.items() if name != "warmup"})
        return run(self, *args, **kwargs)

    Autotuner.run = compile_then_run


def fla(case: Any, x: Problem) -> Pass:
    """Its kernels with our blocks and the queries' own ones. All branches are its own two and our window: it leaves that to flash-attn."""
    from fla.ops.nsa.compression import parallel_nsa_compression
    from fla.ops.nsa.parallel import ParallelNSAFunction

    size, heads, kv_heads = case.block_size, x.q.shape[2], x.k.shape[2]
    if x.blocks.shape[2] != kv_heads:
        raise Unsupported("heads of a key head choose together")
    if heads // kv_heads not in (16, 32, 64, 128):
        raise Unsupported(f"a key head has a power of two of heads, 16 or more, not {heads // kv_heads}")
    compile_configurations_together()
    own = torch.arange(x.q.shape[1], device=x.q.device, dtype=torch.int32).view(1, -1, 1, 1) // size
    blocks = torch.cat((own.expand(*x.blocks.shape[:-1], 1), x.blocks.where(x.blocks < own, -1)), -1).contiguous()

    def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ParallelNSAFunction.apply(q, k, v, blocks, blocks.shape[-1], size, q.shape[-1] ** -0.5, None)

    def whole(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor) -> Tensor:
        compressed, _ = parallel_nsa_compression(q, k_cmp, v_cmp, k.shape[1], size)
        near = flash_attention(q, k, v, causal=True, window_size=(case.window - 1, 0))
        out = torch.addcmul(selected(q, k, v) * gates[..., 1:2], compressed, gates[..., :1])
        return torch.addcmul(out, near, gates[..., 2:])

    if not isinstance(case, nsa_cases.Case):
        return differentiable(selected, tuple(x.leaves), x.dout)
    if not case.compress_size == case.compress_stride == size or x.k.shape[1] % size:
        raise Unsupported("a block is a compressed key")
    return differentiable(whole, tuple(x.leaves), x.dout)


NOWHERE = torch.iinfo(torch.int32).max  # of a list of blocks, behind all of them


def lists_of_blocks(case: Any, x: Problem) -> Tensor:
    """The blocks that each query of a sequence reads, of its own causally, in ascending order and with -1 behind them: int32
    (seqlen, kv_heads, slots + 1)."""
    if isinstance(case, nsa_cases.Case):
        raise Unsupported("written for the chosen blocks alone")
    if x.q.shape[0] != 1:
        raise Unsupported("written for one sequence")
    if x.blocks.shape[2] != x.k.shape[2]:
        raise Unsupported("heads of a key head choose together")
    blocks = x.blocks[0]
    own = torch.arange(blocks.shape[0], device=blocks.device, dtype=torch.int32).view(-1, 1, 1) // case.block_size
    blocks = blocks.where((blocks >= 0) & (blocks < own), NOWHERE)
    blocks = torch.cat((blocks, own.expand(*blocks.shape[:-1], 1)), -1).sort(-1).values
    return blocks.where(blocks < NOWHERE, -1)


def by_token(module: str, function: str) -> Callable[[Any, Problem], Pass]:
    """A function of NSA in Triton, or of FSA, which is made from it and has its signature: lists of blocks by key head."""

    def make(case: Any, x: Problem) -> Pass:
        blocks = lists_of_blocks(case, x).transpose(0, 1).contiguous()
        if case.block_size not in (32, 64, 128, 256):
            raise Unsupported(f"blocks have 32, 64, 128 or 256 tokens, not {case.block_size}")
        attend, size = getattr(importlib.import_module(module), function), case.block_size
        bounds = torch.tensor([0, x.q.shape[1]], device=x.q.device, dtype=torch.int32)
        leaves = tuple(leaf.squeeze(0) for leaf in x.leaves)
        return differentiable(lambda q, k, v: attend(q, k, v, blocks, size, bounds), leaves, x.dout.squeeze(0), lambda y: y.unsqueeze(0))

    return make


def nsa_cudnn(case: Any, x: Problem) -> Pass:
    """The forward of chosen blocks of NVIDIA's cudnn-frontend, which has no backward."""
    from cudnn import NSA

    blocks, group = lists_of_blocks(case, x), x.q.shape[2] // x.k.shape[2]
    if group > 16:
        raise Unsupported(f"a key head has at most 16 heads, not {group}")
    if case.block_size not in (16, 32, 64, 128):
        raise Unsupported(f"blocks have 16, 32, 64 or 128 tokens, not {case.block_size}")
    q, k, v = (leaf.squeeze(0) for leaf in x.leaves)
    counts, seqlen = (blocks >= 0).sum(-1, dtype=torch.int32), q.shape[0]
    bounds = torch.tensor([0, seqlen], device=q.device, dtype=torch.int32)

    def forward() -> Tensor:
        return NSA.selection_attention_wrapper(
            q, k, v, blocks, counts, bounds, bounds, block_size=case.block_size, scale_softmax=q.shape[-1] ** -0.5, max_s_q=seqlen,
            max_s_k=seqlen, is_causal=True)["o_tensor"]

    def backward() -> tuple[Tensor, ...]:
        raise Unsupported("has no backward: --directions forward")

    return Pass(forward, backward, [], lambda y: y.unsqueeze(0))


CHECKOUT = "a checkout of github.com/{} on PYTHONPATH, and einops"
OTHER_NSA = (
    Backend("nsa-triton", by_token("native_sparse_attention.ops", "topk_sparse_attention"),
            peers.importable("native_sparse_attention.ops", where=CHECKOUT.format("XunhaoLai/native-sparse-attention-triton")),
            limit=peers.PEER_LIMIT, on_request=True, late=True),
    Backend("fsa", by_token("fsa.ops", "FSA_topk_sparse_attention"),
            peers.importable("fsa.ops", where=CHECKOUT.format("Relaxed-System-Lab/Flash-Sparse-Attention")),
            limit=peers.PEER_LIMIT, on_request=True, late=True),
    Backend("nsa-cudnn", nsa_cudnn, peers.importable("cudnn", "NSA", "pip install nvidia-cudnn-frontend, 1.31 or later"),
            limit=peers.PEER_LIMIT, on_request=True, late=True),
)
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo", attnzoo(None)),
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("attnzoo with its choice", choosing),
        Backend("flex", flex, limit=peers.PEER_LIMIT, late=True),
        Backend("fla", fla, peers.importable("fla.ops.nsa.parallel", "ParallelNSAFunction"), limit=peers.PEER_LIMIT, late=True),
        *OTHER_NSA,
        *(Backend(DENSE + name, Dense(name), peers.BACKENDS[name].missing, peers.BACKENDS[name].limit)
          for name in ("attnzoo-gluon", "attnzoo-triton", "sdpa-cudnn")),
        Backend("attnzoo-reference", attnzoo("reference")),
        Backend(DENSE + "attnzoo-reference", Dense("attnzoo-reference")),
    )
}
DRY_RUN = ["attnzoo-reference", DENSE + "attnzoo-reference"]


def compare(session: Session, line: Line, case: Any, x: Problem) -> Iterator[list[Row]]:
    o = session.options
    work = {"forward": case.flops(), "backward": case.flops(backward=True)}
    dense = dense_cases.Case(seqlen_q=case.seqlen_q, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, causal=True,
                             dtype=case.dtype)
    y = dense_cases.Inputs(*x.leaves[:3], x.dout, {"causal": True})
    whole = Problem(x.leaves[:3], x.dout, x.blocks, lambda q, k, v, *, blocks, impl: flash_attention(q, k, v, causal=True, impl=impl))
    check, dense_check = Check(case, x, o.directions), Check(dense, whole, o.directions)
    columns = []
    for b in session.backends:
        run = harness.in_graphs(b, session.device) if o.graphs else b
        columns.append(Entry(b.name, run, dense, y, work, dense_check) if b.name.startswith(DENSE) else
                       Entry(b.name, run, case, x, work, check))
    yield from harness.compare_late_ones_last(line, columns, o.directions, session.timing)


def by_blocks(session: Session, table: str, case: cases.Case, seqlen: int,
              index: tuple[Tensor, Tensor] | None = None) -> Iterator[list[Row]]:
    q, k, v, _, dout, _ = case.inputs(session.device)
    choosers = q[..., :: case.heads // (case.kv_heads or case.heads), :] if case.shared else q
    choose = functools.partial(moba_blocks, choosers, k) if index is None else functools.partial(msa_blocks, *index)
    blocks = choose(block_size=case.block_size, top_k=case.slots + 1)
    call = functools.partial(routed_attention, block_size=case.block_size)
    x = Problem([q, k, v], dout, blocks, lambda q, k, v, *, blocks, impl: call(q, k, v, blocks, impl=impl), index)
    panel = f"d{case.head_dim}, {case.slots + 1} blocks of {case.block_size}, {case.heads} heads of {case.kv_heads or case.heads}"
    yield from compare(session, Line("routed", table, panel, seqlen), case, x)


def moba(session: Session) -> Iterator[list[Row]]:
    """By length, each head by itself; a query reads `--top-k` blocks of `--block-size`."""
    o = session.options
    for seqlen in o.lengths:
        case = cases.benchmark_case(seqlen, o.head_dim, o.heads, o.block_size, o.top_k - 1, dtype=session.dtype)
        yield from by_blocks(session, "moba", case, seqlen)


def selected(session: Session) -> Iterator[list[Row]]:
    """NSA's blocks by length: `--block-count` of `--selected-size`, by key head."""
    o = session.options
    for seqlen in o.selected_lengths:
        case = cases.benchmark_case(seqlen, o.head_dim, o.heads, o.selected_size, o.block_count - 1, kv_heads=o.kv_heads, shared=True,
                                    dtype=session.dtype)
        yield from by_blocks(session, "selected", case, seqlen)


def msa_case(session: Session, seqlen: int) -> tuple[cases.Case, tuple[Tensor, Tensor]]:
    """With index queries and keys, as wide as a head."""
    o = session.options
    case = cases.benchmark_case(seqlen, o.head_dim, o.heads, o.index_size, o.block_count - 1, kv_heads=o.kv_heads, shared=True,
                                dtype=session.dtype)
    generator = torch.Generator(session.device).manual_seed(1)
    return case, tuple(torch.randn(1, seqlen, heads, o.head_dim, device=session.device, generator=generator).to(session.dtype)
                       for heads in (o.kv_heads, 1))


def msa(session: Session) -> Iterator[list[Row]]:
    """MSA by length: `--block-count` blocks of `--index-size`, which an indexer chooses by key head."""
    for seqlen in session.options.selected_lengths:
        case, index = msa_case(session, seqlen)
        yield from by_blocks(session, "msa", case, seqlen, index)


def nsa(session: Session) -> Iterator[list[Row]]:
    """NSA's three branches by length, over one set of keys and values."""
    o = session.options
    for seqlen in o.selected_lengths:
        case = nsa_cases.benchmark_case(seqlen, o.head_dim, o.heads, o.kv_heads, compress_size=o.compress_size,
                                        compress_stride=o.compress_stride, block_size=o.selected_size, block_count=o.block_count,
                                        window=o.window, dtype=session.dtype)
        *leaves, dout, _ = case.inputs(session.device)
        call = functools.partial(nsa_attention, **case.sizes)
        with torch.no_grad():
            blocks = call(*leaves, return_blocks=True)[1]
        panel = (f"d{o.head_dim}, {o.block_count} blocks of {o.selected_size}, window {o.window}, keys of {o.compress_size}, "
                 f"{o.heads} heads of {o.kv_heads}")
        yield from compare(session, Line("routed", "nsa", panel, seqlen), case, Problem(leaves, dout, blocks, call))


def order(q: Tensor, k: Tensor, blocks: Tensor, case: cases.Case) -> Any:
    return routes(blocks[0], Blocks.of(q, k, None, None, case.block_size), case.heads, case.heads, case.seqlen_q)


def milliseconds(session: Session, line: Line, case: cases.Case, calls: dict[str, Callable[[], Any]]) -> list[Row]:
    """A line with the median milliseconds of each call."""
    readings = session.timing.measure({name: Candidate(call, nullcontext) for name, call in calls.items()})
    ms = {name: statistics.median(times) for name, times in readings.items()}
    columns = [Entry(name, session.backends[0], case, None, {}, float) for name in calls]
    return line.rows(columns, Prepared({}, {}, {}), "forward", "ms", ms, ms=ms)


def lists(session: Session) -> Iterator[list[Row]]:
    """Milliseconds of MoBA's forward, and of what it consists of beside products: the choice, and the order of pairs by block. On a GPU
    also the device's time alone, of a CUDA graph of each."""
    o = session.options
    for seqlen in o.lengths:
        case = cases.benchmark_case(seqlen, o.head_dim, o.heads, o.block_size, o.top_k - 1, dtype=session.dtype)
        x = case.inputs(session.device)
        choose = functools.partial(moba_blocks, x.q, x.k, block_size=case.block_size, top_k=o.top_k)
        calls = {"forward with its choice": functools.partial(moba_attention, *x[:3], block_size=case.block_size, top_k=o.top_k),
                 "choice": choose}
        if x.q.is_cuda:  # a CPU's attention needs no order
            calls["order"] = functools.partial(order, x.q, x.k, choose(), case)
            calls |= {f"{name}, device": harness.replayed(call) for name, call in calls.items()}
        yield milliseconds(session, Line("routed", "lists", f"d{o.head_dim}, {o.top_k} blocks of {o.block_size}", seqlen), case, calls)


def indexer(session: Session) -> Iterator[list[Row]]:
    """Milliseconds of MSA's choice, and of forward and backward with it, without and with the indexer's loss."""
    o = session.options
    for seqlen in o.selected_lengths:
        case, index = msa_case(session, seqlen)
        x = case.inputs(session.device)
        sizes = {"block_size": case.block_size, "top_k": o.block_count}
        leaves = [t.requires_grad_() for t in (*x[:3], *index)]

        def attend(sizes: dict[str, int] = sizes, leaves: list[Tensor] = leaves, dout: Tensor = x.dout) -> Any:
            return torch.autograd.grad(msa_attention(*leaves, **sizes), leaves[:3], dout)

        def learn(sizes: dict[str, int] = sizes, leaves: list[Tensor] = leaves, dout: Tensor = x.dout) -> Any:
            out, loss = msa_attention(*leaves, return_loss=True, **sizes)
            return torch.autograd.grad((out, loss), leaves, (dout, torch.ones_like(loss)))

        calls = {"choice": functools.partial(msa_blocks, *index, **sizes), "forward and backward": attend, "with the loss": learn}
        line = Line("routed", "indexer", f"d{case.head_dim}, {o.block_count} blocks of {case.block_size}", seqlen)
        yield milliseconds(session, line, case, calls)


def rows(session: Session) -> Iterator[list[Row]]:
    """Milliseconds of forward and backward over many short sequences, at the sizes of experiment=extrapolation_moba, _nsa and _msa."""
    o = session.options

    def leaf(seqlen: int, heads: int, width: int = 64) -> Tensor:
        return torch.randn(o.rows, seqlen, heads, width, device=session.device, dtype=session.dtype).requires_grad_()

    (q, k, v), seqlen = (leaf(o.row_length, 8) for _ in range(3)), o.row_length
    compressed, gates = [leaf((seqlen - 32) // 16 + 1, 8) for _ in range(2)], leaf(seqlen, 8, 3)
    index, dout = (leaf(seqlen, 8), leaf(seqlen, 1)), torch.randn_like(v)

    def learn() -> Any:
        out, loss = msa_attention(q, k, v, *index, block_size=64, top_k=4, return_loss=True)
        return torch.autograd.grad((out, loss), (q, k, v, *index), (dout, torch.ones_like(loss)))

    def derive(attend: Callable[..., Tensor], *leaves: Tensor, **options: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(*leaves, **options), leaves, dout)

    sizes = {"compress_size": 32, "compress_stride": 16, "block_size": 64, "block_count": 4, "window": 128}
    calls = {"flash": derive(flash_attention, q, k, v, causal=True), "moba": derive(moba_attention, q, k, v, block_size=64, top_k=3),
             "nsa": derive(nsa_attention, q, k, v, *compressed, gates, **sizes), "msa with its loss": learn}
    case = cases.Case(batch=o.rows, seqlen_q=seqlen, heads=8, head_dim=64, block_size=64, slots=2, dtype=session.dtype)
    yield milliseconds(session, Line("routed", "rows", f"d64, {o.rows} rows, blocks of 64", seqlen), case, calls)


def newest(session: Session, case: decode_cases.Case) -> Iterator[Entry]:
    """Attention of each row's newest token, as layers with a cache call it, and choices alone. NaN lies behind the rows' tokens."""
    o, rows, tokens, max_len = session.options, case.batch, case.lengths[0], case.max_len
    x, generator = case.inputs(session.device), torch.Generator(session.device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=session.device, generator=generator).to(session.dtype)

    q, k, v = x.q[:, 0], *(t.flatten(0, 1) for t in x[1:3])
    index = draw(rows, o.kv_heads, o.head_dim), draw(rows * max_len, 1, o.head_dim)
    gates, compressed = draw(rows, o.heads, 3).sigmoid(), [draw(rows * max_len // o.compress_stride, o.kv_heads, o.head_dim) for _ in "kv"]
    bounds_q, bounds_k = Newest(torch.full((rows,), tokens - 1, device=session.device), max_len).packed()
    packed = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "max_seqlen_q": 1, "max_seqlen_k": max_len,
              "impl": "reference" if o.dry_run else None}

    def entry(label: str, call: Callable[[], Tensor], check: Callable[[Pass], float]) -> Entry:
        backend = Backend(label, lambda *_: decode.only_forward(harness.replayed(call) if q.is_cuda else call))
        return Entry(label, backend, case, x, {}, check)

    def against(reference: Callable[..., Tensor], blocks: Tensor, *more: Tensor, **sizes: int) -> Callable[[Pass], float]:
        """A check of the first and the last row. more: of the reference, by row, beside queries, keys and values."""
        def exact(row: int, dtype: torch.dtype) -> Tensor:
            leaves = (t[row : row + 1].to(dtype) for t in (x.q, *(t[:, :tokens] for t in x[1:3]), *more))
            return reference(*leaves, blocks=blocks[row : row + 1, None], impl="reference", **sizes)[:, 0]

        def check(run: Pass) -> float:
            out = run.forward()
            return max(error_ratio(out[row : row + 1], exact(row, q.dtype), exact(row, torch.float64)) for row in (0, rows - 1))

        return check

    def means(size: int) -> dict[str, Tensor]:
        blocks = max_len // size
        whole = k.unflatten(0, (rows, max_len))[:, : blocks * size].unflatten(1, (blocks, size)).mean(2, dtype=torch.float32)
        return {"block_means": whole.flatten(0, 1), "block_starts": (torch.arange(2 * rows, device=q.device) // 2 * blocks).int()}

    yield entry("decode_attention", functools.partial(decode_attention, *x[:3], **x.options, impl=packed["impl"]), decode.check(case, x))
    for name, attend, choose, of_index, size, count in (
            ("moba", moba_attention, moba_blocks, (), o.block_size, o.top_k),
            ("moba", moba_attention, moba_blocks, (), o.selected_size, o.block_count),
            ("msa", msa_attention, msa_blocks, index, o.index_size, o.block_count)):
        sizes = {"block_size": size, "top_k": count} | (means(size) if name == "moba" else {})
        choice, label = functools.partial(choose, *(of_index or (q, k)), **sizes, **packed), f"{name}, {count} blocks of {size}"
        blocks = choice()
        yield entry(label, functools.partial(attend, q, k, v, *of_index, **sizes, **packed),
                    against(routed_attention, blocks, block_size=size))
        yield entry(f"{label}: choice", choice, lambda run, blocks=blocks: 0.0 if run.forward().equal(blocks) else float("inf"))

    sizes = {"compress_size": o.compress_size, "compress_stride": o.compress_stride, "block_size": o.selected_size,
             "block_count": o.block_count, "window": o.window}
    count = (tokens - o.compress_size) // o.compress_stride + 1
    starts = compressed_bounds(bounds_k, o.compress_size, o.compress_stride)[:-1:2].tolist()
    call = functools.partial(nsa_attention, q, k, v, *compressed, gates, **sizes, **packed)
    blocks = call(return_blocks=True)[1]
    of_rows = (torch.stack([t[at : at + count] for at in starts]) for t in compressed)
    check = against(nsa_attention, blocks, *of_rows, gates[:, None], **sizes)
    yield entry("nsa", call, check)
    yield entry("nsa, blocks given", functools.partial(call, blocks=blocks), check)
    yield entry(f"{o.block_count} blocks of {o.selected_size}, given",
                functools.partial(routed_attention, q, k, v, blocks, block_size=o.selected_size, **packed),
                against(routed_attention, blocks, block_size=o.selected_size))


def new_token(session: Session) -> Iterator[list[Row]]:
    """Microseconds of one new token of each row behind a long cache, beside dense attention to all of it: a CUDA graph of each call."""
    o = session.options
    for batch, tokens in dict.fromkeys(decode.shape(session, *size) for size in itertools.product((1, 16), (4096, 16384, 65536))):
        case = decode_cases.benchmark_case(batch, tokens, max_len=tokens + 64, heads=o.heads, kv_heads=o.kv_heads, head_dim=o.head_dim,
                                           dtype=session.dtype)
        yield harness.compare(Line("routed", "decode", f"batch {batch}", tokens), list(newest(session, case)), ["forward"], session.timing,
                              unit="us")


TABLES = {f.__name__: f for f in (moba, selected, msa, nsa, lists, indexer, rows)} | {"decode": new_token}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("routed", list(TABLES), list(BACKENDS))
    command.add_argument("--lengths", nargs="+", type=harness.positive, default=[4096, 8192, 16384, 32768])
    command.add_argument("--selected-lengths", nargs="+", type=harness.positive, default=[4096, 8192, 16384],
                         help="of the tables selected, msa, nsa and indexer")
    command.add_argument("--heads", type=harness.positive, default=16)
    command.add_argument("--kv-heads", type=harness.positive, default=4, help="of the tables selected, msa, nsa and indexer (default: 4)")
    command.add_argument("--head-dim", type=harness.positive, default=128)
    command.add_argument("--block-size", type=harness.positive, default=512)
    command.add_argument("--top-k", type=harness.positive, default=3)
    command.add_argument("--selected-size", type=harness.positive, default=64)
    command.add_argument("--index-size", type=harness.positive, default=128, help="tokens of MSA's blocks (default: 128)")
    command.add_argument("--compress-size", type=harness.positive, default=32, help="tokens of NSA's compressed keys (default: 32)")
    command.add_argument("--compress-stride", type=harness.positive, default=16)
    command.add_argument("--block-count", type=harness.positive, default=16)
    command.add_argument("--window", type=harness.positive, default=512)
    command.add_argument("--graphs", action="store_true", help="time each call of the tables moba, selected, msa and nsa as a CUDA graph")
    command.add_argument("--rows", type=harness.positive, default=64, help="sequences of the table rows (default: 64)")
    command.add_argument("--row-length", type=harness.positive, default=1024, help="tokens of each of them (default: 1024)")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[64], selected_lengths=[96], heads=4, kv_heads=2, head_dim=16, block_size=16, top_k=2,
                             selected_size=16, index_size=16, block_count=3, window=16, rows=2, row_length=192)
    plots = dict.fromkeys(("moba", "selected", "msa", "nsa"), "sequence length")
    return harness.main(command, TABLES, BACKENDS, DRY_RUN, plots, arguments)


if __name__ == "__main__":
    sys.exit(main())
