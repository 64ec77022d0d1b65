"""Measure FlashAttention's tile candidates on this GPU: the figures behind the tables in attnzoo_kernels/flash/tiles.py.

    python -m benchmarks.tune --kernels forward dq dkdv --head-dims 64 128 --seqlen 8192
"""

import argparse
import csv
import functools
import itertools
import math
import multiprocessing
import random
import sys
import time
from dataclasses import astuple

import torch
import triton

from attnzoo_kernels import checks
from attnzoo_kernels.flash import backward, forward
from attnzoo_kernels.flash.options import Options
from attnzoo_kernels.flash.tiles import Tile

HIDDEN, TOKENS = 2048, 16384
SHAPES = {
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3),
                (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 2)],
    "dq": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3),
           (128, 64, 8, 2), (128, 64, 8, 3)],
    "dkdv": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 4, 3),
             (128, 64, 4, 1), (128, 64, 4, 2), (64, 128, 4, 2)],
}
CANDIDATES = {
    kernel: [Tile(*shape, tma, registers, one_loop, from_stats) for shape in shapes
             for tma, registers, one_loop, from_stats in itertools.product((False, True), repeat=4)
             if (tma or not (registers or one_loop or from_stats)) and not (registers and kernel != "forward")
             and not (one_loop and kernel == "dq") and not (from_stats and kernel != "dkdv")]
    for kernel, shapes in SHAPES.items()
}


def plausible(kernel: str, tile: Tile, head_dim: int) -> bool:
    """Accumulators and score tiles must fit the registers, tiles the shared memory."""
    threads = tile.num_warps * 32
    rows = tile.block_n if kernel == "dkdv" else tile.block_m
    accumulators = rows * head_dim * (2 if kernel == "dkdv" else 1)
    scores = tile.block_m * tile.block_n * (1 if kernel == "forward" else 2)
    walked = tile.block_m if kernel == "dkdv" else tile.block_n
    shared = 2 * head_dim * (2 * walked * tile.num_stages + rows * (1 if kernel == "forward" else 2))
    return (accumulators + scores) / threads <= 224 and shared <= 228 * 1024 and rows * 16 >= threads * 2


@functools.cache
def make_inputs(head_dim: int, seqlen: int, tokens: int = TOKENS):
    torch.manual_seed(0)
    heads = HIDDEN // head_dim
    shape = (tokens // seqlen, seqlen, heads, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def launcher(kernel: str, tile: Tile, inputs, causal: bool):
    q, k, v, do = inputs
    forward.forward_tile = lambda *_, **__: tile if kernel == "forward" else Tile(64, 64, 4, 2)
    backward.dq_tile = lambda *_, **__: tile if kernel == "dq" else Tile(64, 64, 4, 2)
    backward.dkdv_tile = lambda *_, **__: tile
    for plan in (forward._plan, backward._dq_plan, backward._dkdv_plan):
        plan.cache_clear()
    options = Options(sequences=None, softmax_scale=q.shape[-1] ** -0.5, window_right=0 if causal else -1)
    none = (None,) * 4
    if kernel == "forward":
        return lambda: forward.launch_forward(q, k, v, *none, None, options)
    out, _, stats = forward.launch_forward(q, k, v, *none, None, options)
    if kernel == "dq":
        return lambda: backward.launch_dq(do, None, q, k, v, out, stats, *none, False, options)
    row_stats = backward.launch_dq(do, None, q, k, v, out, stats, *none, False, options)[1]
    return lambda: backward.launch_dkdv(do, q, k, v, row_stats, *none, options)


def compile_one(job) -> tuple:
    kernel, tile, head_dim, causal = job
    start = time.time()
    try:
        launcher(kernel, tile, make_inputs(head_dim, 256, 256), causal)()
        torch.cuda.synchronize()
        return job, None, time.time() - start
    except Exception as error:  # a candidate that does not compile is a result
        return job, f"{type(error).__name__}: {error}".splitlines()[0][:120], time.time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--best", type=int, default=6)
    parser.add_argument("--csv", default=None)
    args = parser.parse_args()
    checks.choice("masks", args.masks[0], ("full", "causal"))

    jobs = [(kernel, tile, d, mask == "causal") for kernel in args.kernels for d in args.head_dims for mask in args.masks
            for tile in CANDIDATES[kernel] if plausible(kernel, tile, d)]
    random.Random(0).shuffle(jobs)
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        failed = {job: error for job, error, _ in pool.imap_unordered(compile_one, jobs) if error}
    print(f"compiled {len(jobs)} candidates in {time.time() - start:.0f} s, {len(failed)} failed", flush=True)

    rows = []
    for job in jobs:
        if job in failed:
            rows.append((*job, math.nan, failed[job]))
            continue
        kernel, tile, head_dim, causal = job
        inputs = make_inputs(head_dim, args.seqlen)
        run = launcher(kernel, tile, inputs, causal)
        milliseconds = triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")
        products = {"forward": 2, "dq": 3, "dkdv": 4}[kernel]
        flops = products * 2 * TOKENS * args.seqlen * HIDDEN / (2 if causal else 1)
        rows.append((*job, flops / milliseconds / 1e9, ""))
    for kernel, head_dim, mask in itertools.product(args.kernels, args.head_dims, args.masks):
        group = [r for r in rows if r[0] == kernel and r[2] == head_dim and r[3] == (mask == "causal")]
        print(f"{kernel} D={head_dim} {mask}: raw TFLOP/s (all products that the kernel computes)")
        for row in sorted(group, key=lambda r: -r[4] if r[4] == r[4] else 0)[: args.best]:
            print(f"   {row[4]:6.0f}  {row[1]}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["kernel", "head_dim", "causal", "block_m", "block_n", "num_warps", "num_stages", "tma", "q_registers",
                             "one_loop", "from_stats", "q_select", "raw_tflops", "error"])
            for kernel, tile, d, causal, rate, error in rows:
                writer.writerow([kernel, d, causal, *astuple(tile), f"{rate:.1f}", error])


if __name__ == "__main__":
    sys.exit(main())
