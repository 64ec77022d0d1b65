"""Every operator of this checkout against another checkout of this project, in one run: what a change to the kernels costs or gains.

    git worktree add ../before HEAD~20
    python -m benchmarks.side_by_side --other ../before --output side_by_side.csv "flash gluon" differential

Two processes hold one checkout each; the readings alternate between them in random order, so that both meet the same clock of the card.
"""

import argparse
import csv
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LENGTHS = (512, 2048, 8192, 16384)


def cells() -> dict[str, tuple[str, str, dict]]:
    """(operator, implementation, arguments of its benchmark case) by name."""
    found: dict[str, tuple[str, str, dict]] = {}
    for impl in ("gluon", "triton"):
        for width in (64, 128):
            for causal in (False, True):
                mask = "causal" if causal else "full"
                for n in LENGTHS:
                    shape = {"seqlen": n, "head_dim": width, "causal": causal}
                    found[f"flash {impl} {width} {mask} {n}"] = ("flash", impl, shape)
                    if n < 16384:
                        found[f"differential {impl} {width} {mask} {n}"] = ("differential", impl, shape)
                        found[f"differential_shared {impl} {width} {mask} {n}"] = ("differential_shared", impl, shape)
                for n in (2048, 8192):
                    found[f"flash_packed {impl} {width} {mask} {n}"] = (
                        "flash_packed", impl, {"longest": n, "head_dim": width, "causal": causal})
            for n in (4096, 16384):
                found[f"dual_chunk {impl} {width} {n}"] = ("dual_chunk", impl, {"seqlen": n, "head_dim": width, "chunk_size": 1024})
            for density in (0.06, 0.25):
                for block in (64, 128):
                    found[f"block_sparse {impl} {width} {density} blocks of {block}"] = (
                        "block_sparse", impl, {"seqlen": 8192, "density": density, "block": block, "head_dim": width, "batch": 2})
            found[f"flash_window {impl} {width} 8192"] = (
                "flash", impl, {"seqlen": 8192, "head_dim": width, "causal": True, "window_size": (1023, 0)})
            found[f"flash_gqa {impl} {width} 8192"] = (
                "flash", impl, {"seqlen": 8192, "head_dim": width, "causal": True, "kv_heads": 2048 // width // 4})
    for width in (64, 128):
        shape = {"seqlen": 4096, "head_dim": width, "causal": True}
        for name, feature in (("alibi", {"alibi": True}), ("sinks", {"sinks": True}), ("softcap", {"softcap": 30.0}),
                              ("dropout", {"dropout_p": 0.1})):
            found[f"flash_{name} triton {width} 4096"] = ("flash", "triton", shape | feature)
        for causal in (False, True):
            for n in (2048, 8192):
                found[f"flash_fp8 gluon {width} {'causal' if causal else 'full'} {n}"] = (
                    "flash_fp8", "gluon", {"seqlen": n, "head_dim": width, "causal": causal})
    for batch, length in ((64, 4096), (8, 8192), (1, 65536)):
        found[f"decode triton {batch} {length}"] = ("decode", "triton", {"batch": batch, "length": length})
    return found


def build(operator: str, impl: str, shape: dict, device: str):
    """({direction: pass}, what the outputs were) of one cell in this process's checkout; the backward runs on what one forward left."""
    import torch

    import attnzoo_kernels as zoo

    leaves = []
    if operator == "flash_fp8":
        from attnzoo_kernels.flash.cases import benchmark_case

        case = benchmark_case(**shape)
        x = case.inputs(device)
        inputs = zoo.quantize_fp8(x.q, x.k, x.v)._asdict()

        def forward():
            return zoo.flash_attention_fp8(**inputs, causal=case.causal, out_dtype=case.dtype, impl=impl)
    elif operator == "decode":
        from attnzoo_kernels.decode.cases import benchmark_case

        x = benchmark_case(**shape).inputs(device)

        def forward():
            return zoo.decode_attention(*x[:3], impl=impl, **x.options)
    elif operator.startswith("flash"):
        from attnzoo_kernels.flash.cases import benchmark_case, packed_benchmark_case

        x = (packed_benchmark_case if operator == "flash_packed" else benchmark_case)(**shape).inputs(device)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]

        def forward():
            return zoo.flash_attention(*leaves, impl=impl, **x.options)
    elif operator == "dual_chunk":
        from attnzoo_kernels.dual_chunk.cases import benchmark_case

        x = benchmark_case(**shape).inputs(device)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]

        def forward():
            return zoo.dual_chunk_attention(*leaves, impl=impl, **x.options)
    elif operator == "block_sparse":
        from attnzoo_kernels.block_sparse.cases import benchmark_case

        x = benchmark_case(**shape).inputs(device)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]

        def forward():
            return zoo.block_sparse_attention(*leaves, x.layout, impl=impl, **x.options)
    else:
        from attnzoo_kernels.differential.cases import benchmark_case, shared_benchmark_case

        x = (shared_benchmark_case if operator == "differential_shared" else benchmark_case)(**shape).inputs(device)
        leaves = [t.requires_grad_() for t in (x.q1, x.q2, x.k1, x.k2, x.v, x.lam) if t is not None]

        def forward():
            q1, q2, k1, *rest = leaves
            k2, v, lam = rest if x.k2 is not None else (None, *rest)
            return zoo.differential_attention(q1, q2, k1, k2, v, lam, impl=impl, **x.options)

    out = forward()

    def backward():
        return torch.autograd.grad(out, leaves, x.dout, retain_graph=True)

    passes = {"forward": forward, **({"backward": backward} if leaves else {})}
    digest = hashlib.sha256(out.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
    scale = [float(t.float().abs().mean()) for t in (out.detach(), *(backward() if leaves else ()))]
    return passes, {"bits": digest, "scale": scale, "directions": list(passes)}


def reading(call, rep: float, device: str) -> float:
    """Milliseconds."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return do_bench(call, warmup=8, rep=rep, return_mode="median")


def worker(device: str) -> None:
    """Answers a JSON line on standard input with one on standard output: build a cell, take a reading, or forget it."""
    import torch

    passes = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict = {}
        try:
            if order["do"] == "build":
                passes, answer = build(*order["cell"], device)
            elif order["do"] == "time":
                answer = {"ms": reading(passes[order["direction"]], order["rep"], device)}
            else:
                passes = {}
                gc.collect()
                torch.cuda.empty_cache() if device == "cuda" else None
        except Exception as problem:  # the row says what happened; the other cells go on
            answer = {"error": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
        print(json.dumps(answer), flush=True)


class Checkout:
    """A process with one checkout's kernels."""

    def __init__(self, root: Path, device: str, first: str = ""):
        self.root = root
        path = os.pathsep.join(filter(None, [first, str(root), str(root / "kernels"), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, "PYTHONPATH": path}, cwd=root)

    def ask(self, **order) -> dict:
        self.send(**order)
        return self.answer()

    def send(self, **order) -> None:
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.root} ended")
        return json.loads(line)


def compare(name: str, cell, checkouts: dict[str, Checkout], rounds: int, rep: float, order: random.Random) -> list[dict]:
    for checkout in checkouts.values():
        checkout.send(do="build", cell=cell)
    built = {label: checkout.answer() for label, checkout in checkouts.items()}
    errors = "; ".join(f"{label}: {b['error']}" for label, b in built.items() if "error" in b)
    rows = []
    for direction in built["this"].get("directions", ["forward"]):
        row = {"cell": name, "direction": direction, "note": errors}
        if not errors:
            readings = {label: [] for label in checkouts}
            for _ in range(rounds):
                for label in order.sample(list(checkouts), len(checkouts)):
                    time.sleep(0.05)
                    readings[label].append(checkouts[label].ask(do="time", direction=direction, rep=rep).get("ms", float("nan")))
            ms = {label: statistics.median(values) for label, values in readings.items()}
            same = built["this"]["bits"] == built["other"]["bits"]
            far = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(built["this"]["scale"], built["other"]["scale"], strict=True))
            row |= {"this_ms": f"{ms['this']:.5f}", "other_ms": f"{ms['other']:.5f}", "speed": f"{ms['other'] / ms['this']:.4f}",
                    "forward_bits_equal": same, "mean_magnitudes_differ_by": f"{far:.1e}"}
        rows.append(row)
    for checkout in checkouts.values():
        checkout.ask(do="forget")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("match", nargs="*", help="words that a cell's name must all begin with or hold, as 'flash gluon'; none: every cell")
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--other-pythonpath", default="", help="what comes first on the other's path, such as another Triton")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep", type=float, default=40, help="milliseconds of a reading")
    parser.add_argument("--shard", default="0/1", help="which part of the cells, as 1/2 for the second half")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell is begun after this time")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, one tiny cell: the figures mean nothing")
    parser.add_argument("--worker", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    if options.other is None or not (options.other / "kernels/attnzoo_kernels").is_dir():
        parser.error(f"--other={options.other} must be the folder of another checkout")
    from benchmarks import machine  # which a worker in another checkout does not have

    begun = time.monotonic()
    environment = machine.describe("cpu" if options.dry_run else "cuda")
    print(", ".join(f"{key} {value}" for key, value in environment.items()), flush=True)
    shard, shards = map(int, options.shard.split("/"))
    every = {"flash reference": ("flash", "reference", {"seqlen": 32, "head_dim": 16, "causal": True, "tokens": 32, "hidden": 32})}
    every = every if options.dry_run else cells()
    chosen = {name: cell for name, cell in every.items()
              if not options.match or any(all(word in name.split() for word in match.split()) for match in options.match)}
    chosen = dict(list(chosen.items())[shard::shards])
    device = "cpu" if options.dry_run else "cuda"
    checkouts = {"this": Checkout(HERE, device), "other": Checkout(options.other.resolve(), device, options.other_pythonpath)}
    rows: list[dict] = []
    for name, cell in chosen.items():
        if time.monotonic() - begun > options.seconds:
            rows.append({"cell": name, "note": "not measured: out of time"})
            continue
        rows += compare(name, cell, checkouts, options.rounds, options.rep, random.Random(name))
        for row in [row for row in rows if row["cell"] == name]:
            print(f"{row['cell']:45s} {row['direction']:8s} {row.get('speed', '-'):>7s}  {row.get('other_ms', '')} -> "
                  f"{row.get('this_ms', '')} {'' if row.get('forward_bits_equal', True) else 'other bits'} {row['note']}", flush=True)
    if options.output:
        columns = list(dict.fromkeys([*(key for row in rows for key in row), *environment]))
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows({**row, **environment} for row in rows)


if __name__ == "__main__":
    main()
