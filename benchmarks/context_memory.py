"""The longest training row that fits: peak memory of a GPT's training step by context length, on one GPU and on several that share the row.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.context_memory
    torchrun --standalone --nproc-per-node 4 -m benchmarks.context_memory --dim 512 --layers 10 --heads 8 --kv-heads 8 --vocab 260

One row is read, in bfloat16 autocast, with AdamW. One GPU reads each of the lengths, and R GPUs together read R times as many tokens. The
row lies whole on each GPU, as a run's loader gives it. Memory is what PyTorch has allocated at most, on the GPU that has the most; NCCL's
own buffers are not in it. "context at equal memory" is the context of the R GPUs at one GPU's memory, over one GPU's context, interpolated
linearly between the measured lengths. It is measured with all activations kept, and with the recomputation of every block
(`activation_checkpointing=1`).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from attnzoo.attention.flash import FlashAttention
from attnzoo.models import GPT
from attnzoo_kernels.context_parallel import ContextParallel
from benchmarks import machine, report
from benchmarks.context_parallel import process_group
from benchmarks.harness import RESULTS
from benchmarks.report import Row

UNIT = "GB"


def make_step(o: argparse.Namespace, device: str) -> Callable[[int, int, int | None], None]:
    """step(length, ranks, recompute_every): one training step, in which the first `ranks` GPUs share a row."""
    model = GPT(vocab_size=o.vocab, pad_vocab_multiple=64, dim=o.dim, n_layers=o.layers, n_heads=o.heads, n_kv_heads=o.kv_heads,
                train_context=o.lengths[0], attention=FlashAttention, mlp="swiglu", norm="rmsnorm", bias=False).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # DistributedDataParallel keeps them as well
    optimizer.step()

    def step(length: int, ranks: int, recompute_every: int | None) -> None:
        model.recompute_every = recompute_every
        row = torch.randint(o.vocab, (2, 1, length), device=device)
        plan = ContextParallel(length) if ranks > 1 else None
        input_ids, labels = (x if plan is None else plan.shard(x, -1) for x in row)
        with torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext():
            loss = model(input_ids, targets=labels.flatten(), **({} if plan is None else {"context": plan}))
        (loss / length).backward()
        if plan is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def peak(step: Callable[[], None], device: str, ranks: int) -> float | None:
    """The peak memory in GB of the GPU that has the most; None where it is not enough. Only the first `ranks` GPUs take part."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    if dist.get_rank() < ranks:
        try:
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step()
            found.fill_(torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 1.0)
        except torch.OutOfMemoryError:
            if ranks > 1:
                raise  # the others wait in a collective
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item() or None


def at_equal_memory(one: dict[int, float], several: dict[int, float]) -> float | None:
    """The context of `several` at the memory of the longest row of `one`, over that row's length. Both: peak memory by length."""
    length, memory = max(one.items())
    points = sorted(several.items())
    for (short, low), (long, high) in zip(points, points[1:], strict=False):
        if low <= memory < high:
            return (short + (memory - low) / (high - low) * (long - short)) / length
    return None


def measure(o: argparse.Namespace, device: str) -> Iterator[Row]:
    world = dist.get_world_size()
    step = make_step(o, device)
    panel = f"{o.layers} layers of {o.dim}, {o.heads} heads over {o.kv_heads}"
    # compiles the kernels, and makes what libraries keep
    for ranks in (1, world):
        peak(partial(step, 2048, ranks, None), device, ranks)
    for recompute_every in (None, 1):
        direction = "all kept" if recompute_every is None else "blocks recomputed"
        peaks: dict[int, dict[int, float]] = {1: {}, world: {}}
        for ranks, of_ranks in peaks.items():
            label = "one GPU" if ranks == 1 else f"{ranks} GPUs"
            lengths = o.lengths if ranks == 1 else [ranks * length for length in o.lengths]
            for length in lengths:
                found = peak(partial(step, length, ranks, recompute_every), device, ranks)
                note = "out of memory" if found is None else ""
                yield Row("context_parallel", "memory", panel, length, label, panel, direction, UNIT, found, baseline="one GPU", note=note)
                if found is not None:
                    of_ranks[length] = found
        times = at_equal_memory(peaks[1], peaks[world]) if peaks[1] else None
        yield Row("context_parallel", "memory", panel, max(o.lengths), "context at equal memory", panel, direction, "times", times,
                  note="" if times else "one GPU's memory lies outside of what was measured")


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--lengths", nargs="+", type=int, default=[65536, 122880], help="of one GPU, increasing")
    for name, default in (("dim", 768), ("layers", 12), ("heads", 12), ("kv-heads", 12), ("vocab", 50257)):
        command.add_argument(f"--{name}", type=int, default=default)
    command.add_argument("--dry-run", action="store_true", help="on CPUs, a few tokens, no file")
    o = command.parse_args(arguments)
    if len(o.lengths) < 2 or sorted(set(o.lengths)) != o.lengths:
        command.error(f"--lengths: must be at least two, increasing, got {o.lengths}")
    if o.dry_run:
        o.lengths, o.dim, o.layers, o.heads, o.kv_heads, o.vocab = [256, 512], 32, 2, 2, 1, 64
    with process_group(o.dry_run) as device:
        if dist.get_world_size() == 1:
            command.error("needs several processes: start it by torchrun")
        rows: list[Row] = []
        for row in measure(o, device):
            rows.append(row)
            if dist.get_rank() == 0:
                print(f"{row.label}, {row.direction}, {row.x}: {row.value} {row.unit} {row.note}", flush=True)
        if dist.get_rank() == 0:
            print(report.table(rows))
            if not o.dry_run:
                report.write_csv(rows, machine.describe(device), RESULTS / f"context_parallel-memory-{o.layers}x{o.dim}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
