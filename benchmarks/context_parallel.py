"""One sequence on several GPUs: `attnzoo_kernels.context_parallel` against one GPU of ours, Ulysses, and the rings of PyTorch and of Zhu.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.context_parallel
    torchrun --standalone --nproc-per-node 2 -m benchmarks.context_parallel packed --lengths 65536

Figures are TFLOP/s a GPU, of the slowest rank, the median of the rounds. A round times calls that follow each other, behind as many that
are not timed, because the host runs ahead of the device and asks for more memory the farther it is ahead. The baseline is one GPU with the
whole of the work, so that the ratio to it is the share of a perfect division. Each candidate's results are checked against the baseline's
first. Ulysses (Jacobs et al. 2023, arXiv:2309.14509) exchanges tokens for heads and calls our kernel. PyTorch's ring takes no packed
sequences, and ring-flash-attention's zigzag wants every document to be divisible, so both are in the table of dense sequences only. "chunks
dealt" gives each GPU chunks of packed documents by the pairs of queries and keys that they have, fetches only these documents' keys, and
attends to all chunks of a GPU in one call.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.context_parallel dual_chunk --lengths 1048576 --rounds 1 --repeats 1

reads one sequence by Dual Chunk attention with chunks of 32768, forward only.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import dual_chunk_attention, flash_attention
from attnzoo_kernels.context_parallel import ContextParallel
from attnzoo_kernels.context_placement import deal
from attnzoo_kernels.dual_chunk.cases import Case as DualChunkCase
from attnzoo_kernels.flash.cases import Case
from benchmarks import machine, report, ring
from benchmarks.harness import RESULTS, Unsupported
from benchmarks.report import Row

DIRECTIONS = ("forward", "forward and backward")
TABLES = {"causal": DIRECTIONS, "packed": DIRECTIONS, "dual_chunk": DIRECTIONS[:1]}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ALLOWED = 2e-2  # of the norm: bfloat16 sums in another order


@dataclasses.dataclass
class Candidate:
    """attend(q, k, v) of a rank's own tokens, and which of the whole's tokens these are: own(x, dim)."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    own: Callable[[Tensor], Tensor]
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ranks: int = 1  # that share the work


class ExchangeHeads(torch.autograd.Function):
    """(own tokens, heads, width) of all ranks to (all tokens, own heads, width), or back."""

    @staticmethod
    def forward(ctx, x: Tensor, back: bool) -> Tensor:
        ctx.back = back
        ranks = dist.get_world_size()
        # the dimension that is cut goes first
        sent = x.unflatten(0, (ranks, -1)) if back else x.unflatten(1, (ranks, -1)).movedim(1, 0)
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous())
        return received.movedim(0, 1).flatten(1, 2) if back else received.flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ExchangeHeads.apply(gradient, not ctx.back), None


def operator_of(case: Case) -> Callable[..., Tensor]:
    return dual_chunk_attention if isinstance(case, DualChunkCase) else flash_attention


def ulysses(case: Case, options: dict) -> Candidate:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    packed = case.packed

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (ExchangeHeads.apply(x if packed else x[0], False) for x in (q, k, v))
        out = operator_of(case)(*((q, k, v) if packed else (q[None], k[None], v[None])), **options)
        out = ExchangeHeads.apply(out if packed else out[0], True)
        return out if packed else out[None]

    return Candidate(attend, lambda x: x.chunk(ranks, 0 if packed else 1)[rank], ranks=ranks)


def attnzoo(case: Case, options: dict, groups: int = 1, **plan_options: Any) -> Candidate:
    dim = 0 if case.packed else 1
    plan = ContextParallel(_total(case), **plan_options)
    parts = plan.parts(causal=True, cu_seqlens=options.get("cu_seqlens_q"), max_seqlen=options.get("max_seqlen_q"), merge=True)
    operator, plain = operator_of(case), {name: value for name, value in options.items() if name not in LENGTHS}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plan.attend(lambda part, q, k, v: operator(q, k, v, **plain, **part.lengths), (q,), (k, v), parts, groups)

    return Candidate(attend, lambda x: plan.shard(x, dim), ranks=plan.ranks)


def ring_flash_attn(case: Case) -> Candidate:
    attend = ring.zigzag()
    plan = ContextParallel(_total(case), chunk=_total(case) // (2 * dist.get_world_size()))  # its two blocks of a rank are our chunks
    return Candidate(partial(attend, causal=True), lambda x: plan.shard(x, 1), ranks=plan.ranks)


def torch_ring(case: Case, backend: str, group: int) -> Candidate:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    plan = ContextParallel(_total(case), chunk=_total(case) // (2 * dist.get_world_size()))  # its head and tail are our chunks
    mesh = init_device_mesh("cuda", (plan.ranks,))

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        # it wants a buffer to cut, and learns the length and the head and tail chunks by it
        shape = torch.empty(1, 1, plan.total, 1, device="cuda")
        with context_parallel(mesh, buffers=[shape], buffer_seq_dims=[2]), sdpa_kernel(getattr(SDPBackend, backend)):
            yield

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # its ring takes as many key heads as heads, (batch, heads, the rank's tokens, width), which it takes for shards of longer ones
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    return Candidate(attend, lambda x: plan.shard(x, 1), scope, plan.ranks)


def candidates(case: Case, options: dict, device: str) -> dict[str, Callable[[], Candidate]]:
    def dealt(groups: int) -> Candidate:
        owned = deal(_total(case), case.lengths_q, dist.get_world_size())
        return attnzoo(case, options, groups, owned=owned, documents=case.lengths_q)

    divided = [groups for groups in (2, 4) if (case.kv_heads or case.heads) % groups == 0]
    makers: dict[str, Callable[[], Candidate]] = {
        "one GPU": lambda: Candidate(partial(operator_of(case), **options), lambda x: x),
        "attnzoo": lambda: attnzoo(case, options),
        **({"attnzoo, chunks dealt": partial(dealt, 1)} if case.packed else {}),
        "attnzoo, keys kept": lambda: attnzoo(case, options, keep_keys=True),
        **{f"attnzoo, {groups} groups of heads": partial(attnzoo, case, options, groups) for groups in divided},
        **{f"attnzoo, chunks dealt, {groups} groups of heads": partial(dealt, groups) for groups in divided if case.packed},
        "Ulysses over attnzoo": lambda: ulysses(case, options),
    }
    if device == "cuda" and not case.packed and operator_of(case) is flash_attention:
        group = case.heads // (case.kv_heads or case.heads)
        makers["torch, cuDNN"] = lambda: torch_ring(case, "CUDNN_ATTENTION", group)
        makers["torch, FlashAttention-2"] = lambda: torch_ring(case, "FLASH_ATTENTION", group)
        makers["ring-flash-attn, zigzag, over PyTorch's FlashAttention-2"] = lambda: ring_flash_attn(case)
    return makers


def _total(case: Case) -> int:
    return sum(case.lengths_q) if case.lengths_q else case.seqlen_q


def documents(total: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of up to a quarter that add up to total."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(draw.randint(1, total // 4), total - sum(lengths)))
    return tuple(lengths)


def results(candidate: Candidate, leaves: tuple, dout: Tensor) -> list[Tensor]:
    """The output, and the gradients if the leaves have them."""
    out = candidate.attend(*leaves)
    return [out.detach(), *(torch.autograd.grad(out, leaves, dout) if out.requires_grad else ())]


def wrong(candidate: Candidate, found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of what `results` gives on any rank, as a share of its norm."""
    real = candidate.own(torch.ones_like(expected[0][..., :1, :1]))  # and not padding
    pairs = zip(found, map(candidate.own, expected), strict=True)
    worst = torch.stack([(real * (x - y)).float().norm() / y.float().norm().clamp(min=1e-20) for x, y in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Of one of `repeats` calls that follow each other, as the layers of a step do, so that the host is ahead of the device where it can
    be. It is the slowest rank's; all ranks begin together."""
    dist.barrier()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        mean = (time.perf_counter() - start) * 1e3 / repeats
    else:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        mean = begin.elapsed_time(end) / repeats
    slowest = torch.tensor(mean, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(table: str, case: Case, device: str, rounds: int, repeats: int) -> Iterator[Row]:
    x, directions = case.inputs(device), TABLES[table]
    options = x.options if table == "dual_chunk" else {name: value for name, value in x.options.items() if name in ("causal", *LENGTHS)}
    whole = (x.q, x.k, x.v)
    ready: dict[str, tuple[Candidate, tuple, Tensor]] = {}
    errors, notes, expected, reference = {}, {}, None, None
    for name, make in candidates(case, options, device).items():
        try:
            candidate = make()
            leaves = tuple(candidate.own(y).detach().clone().requires_grad_(directions == DIRECTIONS) for y in whole)
            dout = candidate.own(x.dout).clone()
            with candidate.scope():
                found = results(candidate, leaves, dout)
                if expected is None:
                    expected, reference = found, name
                errors[name] = wrong(candidate, found, expected) / ALLOWED
                del found
        except (RuntimeError, ValueError, AssertionError, TypeError, AttributeError, ImportError, Unsupported) as error:
            notes[name] = f"could not run: {(str(error) or type(error).__name__).splitlines()[0][:120]}"
            continue
        if errors[name] <= 1:
            ready[name] = candidate, leaves, dout
        else:
            notes[name] = f"its error is {errors[name]:.1f} times what is allowed"
    del expected
    if reference not in ("one GPU", None):
        notes[reference] = "one GPU could not run, so that the others were held against this one"
    order, times = random.Random(0), {(name, direction): [] for name in ready for direction in directions}
    for _ in range(rounds):
        for name, direction in order.sample(list(times), len(times)):
            candidate, leaves, dout = ready[name]

            def call(candidate=candidate, leaves=leaves, dout=dout, direction=direction) -> None:
                out = candidate.attend(*leaves)
                if direction != "forward":
                    torch.autograd.grad(out, leaves, dout)

            time.sleep(0.1)
            with candidate.scope():
                for _ in range(repeats):
                    call()
                times[name, direction].append(milliseconds(call, device, repeats))
    for direction in directions:
        flops = case.flops() + case.flops(backward=True) * (direction != "forward")
        rates = {name: flops / ready[name][0].ranks / statistics.median(times[name, direction]) / 1e9 for name in ready}
        for name in errors | notes:
            ms = statistics.median(times[name, direction]) if name in ready else None
            yield Row("context_parallel", table, f"{dist.get_world_size()} ranks", _total(case), name,
                      str(case), direction, "TFLOP/s a GPU", rates.get(name), ms=ms, baseline="one GPU",
                      ratio=rates["one GPU"] / rates[name] if {name, "one GPU"} <= rates.keys() else None,
                      error=errors.get(name), note=notes.get(name, ""))


@contextlib.contextmanager
def process_group(dry_run: bool) -> Iterator[str]:
    """All processes that torchrun has started, on CPUs in a dry run. Gives the kind of device."""
    if not dry_run:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if dry_run else "nccl")
    torch.manual_seed(0)
    try:
        yield "cpu" if dry_run else "cuda"
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("tables", nargs="*", default=["causal", "packed"], help=f"{', '.join(TABLES)}; causal and packed")
    command.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536])
    command.add_argument("--heads", type=int, default=32)
    command.add_argument("--kv-heads", type=int, default=8)
    command.add_argument("--head-dim", type=int, default=128)
    command.add_argument("--rounds", type=int, default=4)
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--dry-run", action="store_true", help="on CPUs, a few tokens, no file")
    o = command.parse_args(arguments)
    if unknown := set(o.tables) - set(TABLES):
        command.error(f"there is no table {', '.join(unknown)}; {', '.join(TABLES)} are")
    if o.dry_run:
        o.lengths, o.heads, o.kv_heads, o.head_dim, o.rounds, o.repeats = [1024], 4, 2, 16, 1, 1
    with process_group(o.dry_run) as device:
        for table in o.tables:
            rows: list[Row] = []
            for length in o.lengths:
                shape = {"lengths_q": documents(length)} if table == "packed" else {"seqlen_q": length}
                if table == "dual_chunk":  # logits that are large enough for a million values not to average to nothing
                    shape |= {"chunk_size": min(32768, length // 4), "local_size": min(8192, length // 16), "q_scale": 3.0}
                case = (DualChunkCase if table == "dual_chunk" else Case)(
                    heads=o.heads, kv_heads=o.kv_heads, head_dim=o.head_dim, causal=True,
                    dtype=torch.float32 if device == "cpu" else torch.bfloat16, **shape)
                rows += measure(table, case, device, o.rounds, o.repeats)
                if dist.get_rank() == 0:
                    print(report.table([row for row in rows if row.x == length]), flush=True)
                    if not o.dry_run:
                        report.write_csv(rows, machine.describe(device), RESULTS / f"context_parallel-{table}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
