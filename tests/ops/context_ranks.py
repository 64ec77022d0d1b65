"""What each rank of tests/ops/test_context_parallel.py does: output and every gradient of its own tokens against one process."""

import contextlib
import datetime
import faulthandler
import itertools
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from attnzoo_kernels import (
    block_sparse_attention,
    differential_attention,
    distance_bias_attention,
    dual_chunk_attention,
    flash_attention,
    forgetting_attention,
    sigmoid_attention,
)
from attnzoo_kernels.block_sparse.patterns import Pattern
from attnzoo_kernels.context_parallel import ContextParallel, check_alike
from attnzoo_kernels.context_placement import deal
from attnzoo_kernels.flash.cases import Case as FlashCase
from benchmarks import context_parallel
from benchmarks.accuracy import assert_accurate

CHUNK = 19
DOCUMENTS = (1, 17, 40, 0, 5)  # which cross borders of chunks; two more entries repeat the end


class Case(NamedTuple):
    """attention(queries, keys, lengths, weight): an operator; queries, keys: (heads, width) of each, 0 wide without a width."""

    attention: Callable
    queries: tuple[tuple[int, int], ...] = ((4, 8),)
    keys: tuple[tuple[int, int], ...] = ((2, 8), (2, 6))
    causal: bool = True
    packed: bool = True
    window: int = -1
    merge: bool = True


def _flash(queries, keys, lengths, weight, **options):
    return flash_attention(*queries, *keys, **lengths, **{"causal": True, **options})


def _differential(queries, keys, lengths, weight):
    q1, q2, lam = queries
    k1, k2, v = keys
    return differential_attention(q1, q2, k1, k2, v, lam, causal=True, **lengths)


def _forgetting(queries, keys, lengths, weight):
    k, v, log_f = keys
    return forgetting_attention(*queries, k, v, -log_f.abs(), **lengths)


def _distance_bias(queries, keys, lengths, weight):
    table = weight[:, None] * torch.linspace(0, 1, 30, device=weight.device, dtype=weight.dtype)
    return distance_bias_attention(*queries, *keys, table, causal=True, **lengths)


def _dual_chunk(queries, keys, lengths, weight):
    angles = torch.arange(12, device=weight.device)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1], device=weight.device)
    return dual_chunk_attention(*queries, *keys, cos=angles.cos(), sin=angles.sin(), chunk_size=12, local_size=4, causal=True, **lengths)


def _block_sparse(queries, keys, lengths, weight):
    pattern = Pattern("longformer", block=16, causal=True, window=1, n_global=1)
    return block_sparse_attention(*queries, *keys, pattern, causal=True, **lengths)


def _sinks(queries, keys, lengths, weight):
    return flash_attention(*queries, *keys, causal=True, sinks=weight, softcap=3.0, window_size=(21, -1), **lengths)


CASES = {
    "causal": Case(_flash),
    "both directions": Case(partial(_flash, causal=False), causal=False),
    "window, sinks": Case(_sinks, window=21),
    "differential": Case(_differential, queries=((4, 8), (4, 8), (4, 0)), keys=((2, 8), (2, 8), (2, 6))),
    "forgetting": Case(_forgetting, keys=((2, 8), (2, 6), (4, 0))),
    "distance_bias": Case(_distance_bias),
    "sigmoid": Case(lambda queries, keys, lengths, weight: sigmoid_attention(*queries, *keys, causal=True, sigmoid_bias=-3.0, **lengths)),
    "dual_chunk": Case(_dual_chunk),
    "block_sparse": Case(_block_sparse, merge=False),
}


def inputs(case: Case, packed: bool, dtype: torch.dtype = torch.float64, scale: int = 1, device: str = "cpu") -> tuple:
    """queries, keys, a weight by head and the lengths of the whole. scale: of the documents' lengths."""
    generator = torch.Generator(device).manual_seed(1)
    total = sum(DOCUMENTS) * scale + 2 * packed  # tokens behind the last sequence
    rows = (total,) if packed else (2, total)

    def normal(heads: int, width: int) -> torch.Tensor:
        return torch.randn(*rows, heads, *([width] if width else []), generator=generator, dtype=dtype, device=device).requires_grad_()

    lengths = {}
    if packed:
        bounds = (torch.tensor([0, *DOCUMENTS, 0, 0]).cumsum(0) * scale).int().to(device)
        longest = max(DOCUMENTS) * scale
        lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    weight = torch.randn(4, generator=generator, dtype=dtype, device=device).requires_grad_()
    return [normal(*shape) for shape in case.queries], [normal(*shape) for shape in case.keys], weight, lengths


def dealt(packed: bool, total: int, scale: int, ranks: int, chunks: int, case: Case, chunk: int | None = None) -> dict[str, Any]:
    """A placement by the pairs of the documents, or of the one dense sequence, with padding behind them."""
    documents = [length * scale for length in DOCUMENTS] if packed else [total]
    windows = (case.window,)
    owned = deal(total, documents, ranks, causal=case.causal, windows=windows, chunks=chunks, chunk=chunk)
    return {"owned": owned, "chunk": chunk, "documents": documents if packed else None}


def shares(plan: ContextParallel, case: Case, queries, keys, weight, lengths, dout, groups: int = 1) -> tuple[torch.Tensor, list]:
    """The rank's own output and gradients. Chunks are merged where the operator and the plan allow it."""
    dim = 0 if lengths else 1
    own_queries, own_keys = ([plan.shard(x.detach(), dim).requires_grad_() for x in tensors] for tensors in (queries, keys))
    bounds = {"cu_seqlens": lengths["cu_seqlens_q"], "max_seqlen": lengths["max_seqlen_q"]} if lengths else {}
    parts = plan.parts(causal=case.causal, window=case.window, merge=case.merge, **bounds)
    n = len(queries)
    out = plan.attend(lambda part, *tensors: case.attention(tensors[:n], tensors[n:], part.lengths, part.own_heads(weight)),
                      own_queries, own_keys, parts, groups)
    return out, torch.autograd.grad(out, (*own_queries, *own_keys, weight), plan.shard(dout, dim), allow_unused=True)


def check(name: str, packed: bool, group: dist.ProcessGroup | None, options: tuple[tuple[bool, int], ...]) -> None:
    """options: whether keys are kept, and the groups of heads."""
    case = CASES[name]
    queries, keys, weight, lengths = inputs(case, packed)
    expected = case.attention(queries, keys, lengths, weight)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
    gradients = torch.autograd.grad(expected, (*queries, *keys, weight), dout, allow_unused=True)
    dim, ranks = (0 if packed else 1), dist.get_world_size(group)
    total = expected.shape[dim]
    chunks = {n: total // (n * ranks) + 1 for n in (2, 4)}
    placements = ({"chunk": CHUNK}, *(dealt(packed, total, 1, ranks, n, case, chunk) for n, chunk in chunks.items()))
    for placed, (keep_keys, groups) in itertools.product(placements, options):
        plan = ContextParallel(total, group, keep_keys=keep_keys, **placed)
        out, own = shares(plan, case, queries, keys, weight, lengths, dout, groups)
        exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12, msg=partial("{}, {}, {} groups: {}".format, name, placed, groups))
        real = plan.shard(torch.ones(plan.total), 0).bool()
        for found, wanted in zip((out, *own[:-1]), (expected, *gradients[:-1]), strict=True):
            exact(found.movedim(dim, 0)[real], plan.shard(wanted, dim).movedim(dim, 0)[real])
        if own[-1] is not None:  # the weight's is a share
            dist.all_reduce(own[-1], group=group)
            exact(own[-1], gradients[-1])
        exact(plan.gather(out.detach(), dim), expected.detach())


def check_memory() -> None:
    """Of what was gathered nothing stays between forward and backward, unless it was asked for. Two backwards of one graph agree."""
    for keep_keys, groups in itertools.product((False, True), (1, 2)):
        plan = ContextParallel(4 * 19, chunk=CHUNK, keep_keys=keep_keys)
        q, k, v = torch.randn(3, 1, plan.local, 2, 8, dtype=torch.float64).unbind()
        held = []

        def attention(part, q, k, v, held=held):
            held.append(k)
            return flash_attention(q, k, v, causal=True)

        out = plan.attend(attention, (q.requires_grad_(),), (k.requires_grad_(), v.requires_grad_()), plan.parts(causal=True), groups)
        assert [bool(x.untyped_storage().nbytes()) for x in held] == [keep_keys] * 2 * groups
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        assert [bool(x.untyped_storage().nbytes()) for x in held] == [keep_keys] * 2 * groups
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), first, rtol=0, atol=0)


class Recorded(ContextParallel):
    """Notes when collectives begin and when they are waited for."""

    def gather_into(self, *arguments: Any) -> Callable:
        return self._noted("gather", super().gather_into(*arguments))

    def reduce(self, *arguments: Any) -> Callable:
        return self._noted("reduce", super().reduce(*arguments))

    def _noted(self, name: str, finish: Callable) -> Callable:
        self.events.append(name)

        def noted(*arguments: Any) -> Any:
            self.events.append(f"wait {name}")
            return finish(*arguments)

        return noted


def check_order() -> None:
    """Collectives of a group begin before another group is attended to, and are waited for behind it; also all ranks alike."""
    plan = Recorded(4 * CHUNK, chunk=CHUNK)
    events = plan.events = []
    x, y = (torch.randn(1, plan.local, 3, 8, dtype=torch.float64).requires_grad_() for _ in range(2))

    def attention(part, q, k):
        events.append(f"{part.head_group} of {part.head_groups}")
        out = q * k[:, : part.queries]
        out.register_hook(lambda gradient: events.append(f"back {part.head_group}"))
        return out

    out = plan.attend(attention, (x,), (y,), plan.parts(causal=True), 3)
    assert events == ["gather"] + [
        "wait gather", "gather", "0 of 3", "0 of 3",
        "wait gather", "gather", "1 of 3", "1 of 3",
        "wait gather", "2 of 3", "2 of 3"], events
    events.clear()
    out.sum().backward()
    assert events == ["gather"] + [
        "wait gather", "gather", "back 2", "back 2", "reduce",
        "wait gather", "gather", "back 1", "back 1", "wait reduce", "reduce",
        "wait gather", "back 0", "back 0", "wait reduce", "reduce", "wait reduce"], events
    check_alike(events=events)
    events.clear()
    out = plan.attend(attention, (x,), (y,), plan.parts(causal=True), 3, overlap=False)
    assert events == [event for group in range(3) for event in ("gather", "wait gather", *[f"{group} of 3"] * 2)], events
    events.clear()
    out.sum().backward()
    assert events == [event for group in (2, 1, 0) for event in ("gather", "wait gather", *[f"back {group}"] * 2, "reduce", "wait reduce")]


def check_recomputed() -> None:
    """What activation checkpointing computes again is read before it is given back, also where chunks are merged, and where nothing has to
    travel, because each chunk is a document."""
    def block(plan: ContextParallel, groups: int, bounds: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        # products keep the gathered memory itself for the backward
        parts = plan.parts(causal=True, merge=True, **bounds)
        assert len(parts) == (1 if bounds else 2)
        return plan.attend(lambda part, q, k: q * k.narrow(q.dim() - 3, 0, part.queries), (x,), (x * 2,), parts, groups).tanh()

    for keep_keys, groups, use_reentrant, documents in itertools.product((False, True), (1, 2), (False, True), (None, (38, 38), (19,) * 4)):
        plan = ContextParallel(4 * 19, chunk=CHUNK, keep_keys=keep_keys, documents=documents)
        bounds = {} if documents is None else {"cu_seqlens": torch.tensor([0, *documents]).cumsum(0).int(), "max_seqlen": 38}
        shape = (1, -1, 2, 8) if documents is None else (-1, 2, 8)
        x, again = (torch.linspace(-1, 1, 16 * plan.local, dtype=torch.float64).view(shape).requires_grad_() for _ in range(2))
        block(plan, groups, bounds, x).sum().backward()
        checkpoint(block, plan, groups, bounds, again, use_reentrant=use_reentrant).sum().backward()
        torch.testing.assert_close(again.grad, x.grad, rtol=0, atol=0)


def check_nothing_stays() -> None:
    """A block whose activations are computed again keeps neither its own keys between the passes nor those that were gathered."""
    for keep_keys, groups in itertools.product((False, True), (1, 2)):
        plan = ContextParallel(4 * 19, chunk=CHUNK, keep_keys=keep_keys)
        storages = []

        def attention(part, q, k, storages=storages):
            storages.append(StorageWeakRef(k.untyped_storage()))
            return q * k[:, : part.queries]

        def block(x, plan=plan, groups=groups, storages=storages, attention=attention):
            keys = x * 2
            storages.append(StorageWeakRef(keys.untyped_storage()))
            return plan.attend(attention, (x,), (keys,), plan.parts(causal=True), groups).tanh()

        out = checkpoint(block, torch.randn(1, plan.local, 2, 8, requires_grad=True), use_reentrant=False)
        assert len(storages) == 1 + 2 * groups
        end = time.monotonic() + 20  # gloo's threads let go of what they have sent a moment later
        while not all(map(is_freed, storages)):
            assert time.monotonic() < end, list(map(is_freed, storages))
        out.sum().backward()


def is_freed(storage: StorageWeakRef) -> bool:
    alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return alive is None or alive.nbytes() == 0


def check_padding_alone() -> None:
    """Only the first rank has tokens."""
    plan = ContextParallel(3)
    x = torch.ones(plan.local, 2, requires_grad=True)
    plan.gather(x, 0).sum().backward()
    wanted = torch.zeros(plan.local, 2)
    wanted[: 3 if plan.rank == 0 else 0] = plan.ranks
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)


def check_refused() -> None:
    plan = ContextParallel(4 * 19, chunk=CHUNK)
    q, k = torch.randn(1, plan.local, 6, 8), torch.randn(1, plan.local, 2, 8)
    for tensors, message in (((q, k), "dimension 2 of the keys, got 3 and shape (1, 38, 2, 8)"),
                             ((k, q), "dimension 2 of the queries, got 3 and shape (1, 38, 2, 8)"),
                             ((q[..., 0, 0], q), "dimension 2 of the queries, got 3 and shape (1, 38)")):
        try:
            plan.attend(lambda part, q, k: q, *([x] for x in tensors), plan.parts(causal=True), groups=3)
        except ValueError as error:
            assert str(error) == f"groups: must divide the heads, which are {message}"
        else:
            raise AssertionError("heads that cannot be divided were not refused")


def check_benchmark() -> None:
    """Each candidate gets the right result, and a figure."""
    for shape in ({"lengths_q": context_parallel.documents(256)}, {"seqlen_q": 256}):
        case = FlashCase(heads=4, kv_heads=4, head_dim=16, causal=True, dtype=torch.float32, **shape)
        rows = list(context_parallel.measure("packed" if case.packed else "causal", case, "cpu", rounds=1, repeats=1))
        assert len(rows) == (18 if "lengths_q" in shape else 12) and all(row.value and row.error < 1e-3 for row in rows), rows


def main(rank: int, ranks: int, sizes: tuple[int, ...], store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size in sizes:
        group = dist.new_group(range(size))
        for name, case in CASES.items() if rank < size else ():
            for packed in (True, False)[not case.packed :]:
                check(name, packed, group, ((name == "causal", 1), (False, 2), (True, 2)))
    check_memory()
    check_order()
    check_recomputed()
    check_nothing_stays()
    check_padding_alone()
    check_refused()
    check_benchmark()
    check_alike(dtype="float32", total=3)
    try:
        check_alike(dtype="float32", total=3 + rank)
    except ValueError as error:
        assert str(error).startswith("total: must be the same on all ranks, got 3 on rank 0, 4 on rank 1")
    else:
        raise AssertionError("unlike values were not refused")
    dist.destroy_process_group()


def main_gpu(rank: int, ranks: int, name: str, packed: bool, store: str) -> None:
    """In bfloat16. Gradients repeat, and are as near as the field's rule asks; the forward of chunks that are long enough for one entry of
    the tile tables is one GPU's bit by bit, but for packed sigmoid attention."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank),
                            timeout=datetime.timedelta(seconds=60))
    check_gpu(name, packed, scale=30, accurate=True)
    check_gpu(name, packed, scale=150, accurate=False)
    dist.destroy_process_group()


def check_gpu(name: str, packed: bool, scale: int, accurate: bool) -> None:
    case = CASES[name]._replace(queries=((4, 64),), keys=((2, 64), (2, 64)))
    if name == "differential":
        case = case._replace(queries=((4, 64), (4, 64), (4, 0)), keys=((2, 64), (2, 64), (2, 64)))
    *tensors, lengths = inputs(case, packed, scale=scale, device="cuda")
    n = len(case.queries)

    def reference(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, w = in_dtype(dtype)
        out = case.attention(q, k, {**lengths, "impl": "reference"}, w)
        return [out.detach(), *torch.autograd.grad(out, (*q, *k), dout.to(out.dtype))]

    def in_dtype(dtype: torch.dtype) -> tuple:
        # numbers of a query or a head are never in 16 bits
        wide = torch.promote_types(dtype, torch.float32)
        return tuple([x.detach().to(dtype if x.shape[-1] == 64 else wide).requires_grad_() for x in group]
                     for group in tensors[:2]) + (tensors[2].detach().to(wide).requires_grad_(),)

    q, k, w = in_dtype(torch.bfloat16)
    shape = q[0].shape  # and the output's
    dout = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda", dtype=torch.float64)
    dim = 0 if packed else 1
    with deterministic():
        exact, eager = map(reference, (torch.float64, torch.bfloat16)) if accurate else (None, None)
        of_one = None if accurate else case.attention(q, k, lengths, w).detach()
        # packed, chunks are merged in one placement at least, with four ranks
        dealt_chunks = [dealt(packed, shape[dim], scale, dist.get_world_size(), n, case) for n in (4, 2)] if packed else []
        for placed in ({}, *dealt_chunks):
            plan = ContextParallel(shape[dim], **placed)
            real = plan.shard(torch.ones(plan.total, device="cuda"), 0).bool()

            def own(x: torch.Tensor, plan=plan, real=real) -> torch.Tensor:
                return plan.shard(x, dim).movedim(dim, 0)[real]

            repeated = []
            for groups in (1, 1, 2, 2):
                out, found = shares(plan, case, *in_dtype(torch.bfloat16), lengths, dout.to(torch.bfloat16), groups)
                repeated.append([x.movedim(dim, 0)[real] for x in (out.detach(), *found[: n + len(k)])])
            one, again, two, two_again = repeated
            assert all(map(torch.equal, one, again)) and all(map(torch.equal, two, two_again)), f"{name}, {placed}: does not repeat"
            assert torch.equal(one[0], two[0]), f"{name}, {placed}: the forward of groups of heads differs from that of all heads"
            if accurate:
                for results in (one, two):
                    assert_accurate(*(of_all_ranks(x) for x in (results, map(own, eager), map(own, exact))))
            elif name == "sigmoid" and packed:
                # weights of rows that lie 8 apart in a tile share a reciprocal, and in a part a document's rows lie elsewhere in a tile: a
                # few in a million weights are rounded the other way
                torch.testing.assert_close(one[0], own(of_one), rtol=2**-7, atol=2**-6)
            elif case.window < 0 or not packed:  # else tiles of a document's keys begin elsewhere
                assert torch.equal(one[0], own(of_one)), f"{name}, {placed}: the forward is not one GPU's"


def of_all_ranks(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Whole results. The rule is about them: one rank's part can miss the queries on which eager's error is largest."""
    found: list[list[torch.Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, [x.cpu() for x in tensors])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def main_failing(rank: int, ranks: int, hangs: bool, store: str) -> None:
    """The last rank does not come to a collective in which the others wait."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if rank < ranks - 1:
        dist.barrier()
    elif hangs:
        time.sleep(100)
    raise RuntimeError(f"of rank {rank}")


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(ranks: int, *arguments: Any, target: Callable = main, start_method: str = "forkserver", seconds: int = 300) -> None:
    """target(rank, ranks, *arguments, a file to meet at) in as many processes. By default a server that has imported torch once forks them.
    The first rank that fails ends all, and the error begins with its traceback. Ranks that take longer than `seconds` say where they are.
    """
    multiprocessing.set_forkserver_preload(["torch", "sympy", "attnzoo_kernels", "benchmarks.context_parallel"])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        processes = torch.multiprocessing.start_processes(_run_rank, (ranks, arguments, target, folder, seconds), ranks, join=False,
                                                          start_method=start_method)
        try:
            while not processes.join(grace_period=5):  # in which other ranks that fail, too, can say so
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            said = sorted((file for file in folder.glob("[0-9]*") if file.stat().st_size), key=os.path.getmtime)
            raise AssertionError("\n".join((str(error), *(f"Rank {file.name}:\n{file.read_text()}" for file in said)))) from None


def _run_rank(rank: int, ranks: int, arguments: tuple, target: Callable, folder: pathlib.Path, seconds: int) -> None:
    with (folder / str(rank)).open("w") as said:
        faulthandler.enable(said)  # NCCL aborts the process when a collective's time is over
        faulthandler.dump_traceback_later(seconds, exit=True, file=said)
        try:
            target(rank, ranks, *arguments, str(folder / "store"))
        except Exception:
            traceback.print_exc(file=said)
            said.flush()
            os._exit(1)  # at once: to leave the process group, NCCL waits for the other ranks, which may wait for this one in a collective
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
