"""Training without a GPU: tokens a second of gpt_tiny with each attention, and with the operators' references in their place.

    python -m benchmarks.cpu                            # 4096 tokens a step, in rows of 1024 and of 4096
    python -m benchmarks.cpu --references               # with the references too
    python -m benchmarks.cpu --threads 1 --clock cpu    # where other work runs beside: the time of its processor only

A step is forward, backward and AdamW under bfloat16 autocast, as `python train.py` makes it. Before a figure is printed the logits and
gradients of the first step are held against those by the references: at most twice the error of these, against float64 (float32 for rows
above 1024 tokens, whose scores take gigabytes).
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from attnzoo.models import from_config
from benchmarks import harness, machine, report
from benchmarks.accuracy import error_ratio
from benchmarks.bert import Training, attnzoo_loss
from benchmarks.harness import Backend, Entry, Line, Pass
from benchmarks.report import Row
from benchmarks.timing import Candidate, Timing

CONFIGS = Path(__file__).parents[1] / "configs"
VARIANTS = ("sdpa", "flash", "block_sparse", "differential", "dual_chunk", "two_frame", "sigmoid", "forgetting", "moba", "nsa")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
TOKENS = 4096  # of a step
EXACT_IN_DOUBLE = 1024  # tokens of a row


@dataclass(frozen=True)
class Case:
    rows: int
    seqlen: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.seqlen}"

    def batch(self) -> dict[str, Tensor]:
        ids = torch.randint(256, (self.rows, self.seqlen), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids}


def composed(*overrides: str) -> nn.Module:
    """The model that `python train.py` makes of these overrides, its weights the same at every call."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", list(overrides))
    torch.manual_seed(0)
    return from_config(*(OmegaConf.to_container(part, resolve=True) for part in (config.model, config.attention)))


def gpt_tiny(variant: str, seqlen: int, impl: str | None) -> nn.Module:
    """For a context of `seqlen` bytes."""
    given = [f"attention.impl={impl}"] * (impl is not None)
    return composed(f"attention={variant}", f"data.seq_len={seqlen}", "model.vocab_size=256", *given).train()


def results(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Logits, and all gradients of the loss as one tensor, in `dtype`, or under autocast."""
    if dtype is not None:
        model = model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        logits, loss = model(batch["input_ids"]), attnzoo_loss(model, batch)
    return [logits.detach(), torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])]


def backend(variant: str, impl: str | None = None) -> Backend:
    def make(case: Case, batch: dict[str, Tensor]) -> Pass:
        model = gpt_tiny(variant, case.seqlen, impl)
        saved = results(model, batch, None)
        trained = Training(model, True, attnzoo_loss, "cpu")
        trained.step(batch)
        return Pass(lambda: trained.step(batch), lambda: (), saved)

    return Backend(variant if impl is None else f"{variant}-{impl}", make)


def check(variant: str, case: Case, batch: dict[str, Tensor]) -> Callable[[Pass], float]:
    by = ("flash" if variant == "sdpa" else variant), case.seqlen, "reference"

    def share(run: Pass) -> float:
        exact = torch.float64 if case.seqlen <= EXACT_IN_DOUBLE else torch.float32
        expected = results(gpt_tiny(*by), batch, None), results(gpt_tiny(*by), batch, exact)
        return max(error_ratio(*values) for values in zip(run.saved, *expected, strict=True))

    return share


def speed(case: Case, variants: Sequence[str], timing: Timing, references: bool) -> list[Row]:
    batch = case.batch()
    backends = [(name, backend(name)) for name in variants]
    backends += [(name, backend(name, "reference")) for name in variants if references and name != "sdpa"]
    entries = [Entry(b.name, b, case, batch, {}, check(name, case, batch)) for name, b in backends]
    ready = harness.prepare(entries)
    readings = timing.measure({label: Candidate(run.forward, run.scope) for label, run in ready.passes.items()})
    ms = {label: statistics.median(times) for label, times in readings.items()}
    spread = {label: (max(times) - min(times)) / ms[label] for label, times in readings.items()}
    tokens = {label: 1e3 * case.rows * case.seqlen / time for label, time in ms.items()}
    return Line("cpu", "speed", f"gpt_tiny, {case}", case.seqlen).rows(entries, ready, "step", "tokens/s", tokens, ms=ms, spread=spread)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a variant has no figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="(default: all)")
    parser.add_argument("--lengths", nargs="+", type=harness.positive, default=[1024, 4096], help="tokens of a row")
    parser.add_argument("--tokens", type=harness.positive, default=TOKENS, help=f"of a step (default: {TOKENS})")
    parser.add_argument("--rounds", type=harness.positive, default=5, help="steps of each candidate; their median counts (default: 5)")
    parser.add_argument("--threads", type=harness.positive, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the wall, or of the processor, all threads (default: wall)")
    parser.add_argument("--references", action="store_true", help="the operators' references besides")
    parser.add_argument("--output", type=Path, help="a CSV file of the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    environment = machine.describe("cpu") | {
        "threads": options.threads, "clock": options.clock, "load": f"{os.getloadavg()[0]:.1f}"}  # of the minute before
    print(", ".join(f"{key} {value}" for key, value in environment.items()), flush=True)
    clock = CLOCKS[options.clock]

    def bench(call: Callable[[], object], warmup: float, rep: float) -> float:
        start = clock()
        call()
        return (clock() - start) * 1e3

    rows: list[Row] = []
    for seqlen in options.lengths:
        case = Case(max(1, options.tokens // seqlen), seqlen)
        rows += speed(case, options.variants, Timing(options.rounds, bench=bench), options.references)
        if options.output:
            report.write_csv(rows, environment, options.output)
    print(report.table(rows))
    return int(any(row.value is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
