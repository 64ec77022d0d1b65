"""GPT-2 small in training: tokens a second of attnzoo's model against nanoGPT's form of it, and where a step's time goes.

    python -m benchmarks.gpt                    # bare loops, all in one run, 12, 32 and 64 rows of 1024 tokens
    python -m benchmarks.gpt profile            # which kernels a step's time goes to
    python -m benchmarks.gpt trainer            # inside the Trainer: train.py experiment=gpt2_small_throughput
    python -m benchmarks.gpt loss --runs usual fp8     # what that does to the loss: the same model on the Python standard library

A step is forward, backward and fused AdamW under bfloat16 autocast on random tokens, 124 M parameters without biases and dropout, a
vocabulary of 50304, as nanoGPT's bench.py has them. Before a figure is printed the logits are held against nanoGPT's in float32, from the
same weights: within twice the error of nanoGPT's under autocast. Columns with 8-bit products (`attnzoo.fp8`) compute the logits as all
others do, because only training steps go by 8 bits; `loss` is their check.
"""

import contextlib
import gc
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo import fp8
from attnzoo.attention.flash import FlashAttention
from attnzoo.models import GPT
from attnzoo.training.loggers import read_metrics
from attnzoo.training.module import summed_loss
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.bert import DEVICE, Training, profile_rows, rates, shares_of_peak
from benchmarks.harness import Backend, Entry, Line, Pass, Session
from benchmarks.report import Row

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Case:
    rows: int = 12
    seqlen: int = 1024
    vocab: int = 50304
    layers: int = 12
    dim: int = 768

    def __str__(self) -> str:
        return f"{self.rows}x{self.seqlen}"

    @property
    def tokens(self) -> int:
        return self.rows * self.seqlen

    def batches(self, device: str) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab, (4, self.rows, self.seqlen + 1), generator=generator).to(device)
        return [{"input_ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()} for x in ids]


def attnzoo(case: Case, **options: Any) -> GPT:
    """Our model, its weights the same at every call."""
    torch.manual_seed(0)
    return GPT(vocab_size=case.vocab, dim=case.dim, n_layers=case.layers, n_heads=case.dim // 64, attention=FlashAttention,
               train_context=case.seqlen, mlp="gelu_tanh", positions="learned", bias=False, **options)


def attnzoo_fp8(case: Case, **options: Any) -> GPT:
    """The same with 8-bit products in training steps."""
    if reason := fp8.why_not(torch.device(DEVICE)):
        raise harness.Unsupported(reason)
    model = attnzoo(case, **options)
    fp8.convert(model)
    return model


class NanoGPT(nn.Module):
    """The model in the form of nanoGPT's model.py, with the tanh GELU, from the weights of ours."""

    def __init__(self, case: Case):
        super().__init__()
        ours = attnzoo(case)
        self.token_embedding, self.position_embedding, self.final_norm = ours.token_embedding, ours.position_embedding, ours.final_norm
        self.blocks = nn.ModuleList(map(NanoBlock, ours.blocks))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token_embedding(input_ids) + self.position_embedding(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)


class NanoBlock(nn.Module):
    def __init__(self, ours: nn.Module):
        super().__init__()
        self.norms = nn.ModuleList([ours.attention_norm, ours.mlp_norm])
        weights = [projection.weight for projection in (ours.attention.q_proj, ours.attention.k_proj, ours.attention.v_proj)]
        self.in_proj = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=False)
        self.in_proj.weight = nn.Parameter(torch.cat(weights).detach())
        self.out_proj, self.up, self.down = ours.attention.o_proj, ours.mlp.up_proj, ours.mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.in_proj(self.norms[0](x)).chunk(3, -1))
        x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def attnzoo_loss(model: nn.Module, batch: dict) -> Tensor:
    loss, count = summed_loss(model, batch, fused=True)
    return loss / count


def logits_loss(model: nn.Module, batch: dict) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


# the model, its loss, the mode of torch.compile
TRAININGS: dict[str, tuple[Callable[[Case], nn.Module], Callable[[nn.Module, dict], Tensor], str | None]] = {
    "attnzoo-graphs": (attnzoo, attnzoo_loss, "reduce-overhead"),
    "attnzoo-residual": (partial(attnzoo, autocast_residual=True), attnzoo_loss, "reduce-overhead"),
    "attnzoo-split": (partial(attnzoo, split_residual=True), attnzoo_loss, "reduce-overhead"),
    "attnzoo-fp8": (attnzoo_fp8, attnzoo_loss, "reduce-overhead"),
    "attnzoo-fp8-residual": (partial(attnzoo_fp8, autocast_residual=True), attnzoo_loss, "reduce-overhead"),
    "attnzoo-fp8-split": (partial(attnzoo_fp8, split_residual=True), attnzoo_loss, "reduce-overhead"),
    "nanogpt": (NanoGPT, logits_loss, "default"),
    "attnzoo": (attnzoo, attnzoo_loss, "default"),
    "attnzoo-logits": (attnzoo, logits_loss, "reduce-overhead"),  # all logits in memory, as `fused_loss=false`
    "nanogpt-graphs": (NanoGPT, logits_loss, "reduce-overhead"),
    "attnzoo-eager": (attnzoo, attnzoo_loss, None),
    "nanogpt-eager": (NanoGPT, logits_loss, None),
}
USUAL = ("attnzoo-graphs", "attnzoo-split", "nanogpt")  # the others when they are named
EAGER = ("attnzoo-eager", "nanogpt-eager")


def backend(name: str) -> Backend:
    make_model, loss, mode = TRAININGS[name]

    def make(case: Case, batches: list[dict]) -> Pass:
        model = make_model(case).to(DEVICE).train()
        error = logits_error(model, case, batches[0]["input_ids"][:1])
        # what one case compiles must not make the next one's shapes dynamic
        of_loss = loss if mode is None else torch.compile(loss, mode=None if mode == "default" else mode, dynamic=False)
        trained, turn = Training(model, True, of_loss, DEVICE), itertools.cycle(batches)
        run = Pass(lambda: trained.step(next(turn)), lambda: (), [error])
        for _ in range(4 if mode else 1):  # compiles, and captures graphs
            run.forward()
        return run

    return Backend(name, make)


@torch.no_grad()
def logits_error(model: nn.Module, case: Case, input_ids: Tensor) -> Tensor:
    """The logits of a row before any training as a share of the allowed error."""
    theirs = NanoGPT(case).to(DEVICE)
    exact = theirs(input_ids)
    model.eval()
    with torch.autocast(DEVICE, torch.bfloat16):
        eager, value = theirs(input_ids), model(input_ids)
    model.train()
    return torch.tensor(error_ratio(value, eager, exact))


BACKENDS = {name: backend(name) for name in TRAININGS}


def cases(session: Session) -> list[Case]:
    if session.options.dry_run:
        return [Case(2, 32, 500, 2, 128)]
    return [Case(rows) for rows in session.options.rows]


def chosen(session: Session) -> list[Backend]:
    return session.backends if session.options.backends or session.options.dry_run else [BACKENDS[name] for name in USUAL]


def forget() -> None:
    """Frees what was compiled and captured, and its memory."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def speed(session: Session) -> Iterator[list[Row]]:
    """Tokens a second of bare loops, and the share of the card's peak that their matrix products are."""
    for case in cases(session):
        batches = case.batches(DEVICE)
        work = {"forward": float(case.tokens)}
        columns = [Entry(b.name, b, case, batches, work, lambda run: run.saved[0].item()) for b in chosen(session)]
        rows = rates(session, Line("gpt", "speed", "bare loop", case.rows), columns, "step")
        yield [*rows, *shares_of_peak(rows, attnzoo(case).flops([case.seqlen] * case.rows))]
        forget()


def profile(session: Session) -> Iterator[list[Row]]:
    """Milliseconds of device time a step by kind of kernel, and the twenty longest kernels."""
    for case, b in itertools.product(cases(session), chosen(session)):
        yield profile_rows("gpt", b.name, case.rows, case, b.make(case, case.batches(DEVICE)))
        forget()


# of a run inside the Trainer, by column. `usual`: as the model's configuration has it, with `split_residual`
UNSPLIT = "model.split_residual=false"
TRAINERS: dict[str, list[str]] = {
    "usual": [],
    "unsplit": [UNSPLIT],
    "residual": [UNSPLIT, "model.autocast_residual=true"],
    "all logits": ["fused_loss=false"],
    "fp8": ["trainer.precision=fp8"],
    "fp8 unsplit": [UNSPLIT, "trainer.precision=fp8"],
    "fp8 residual": [UNSPLIT, "trainer.precision=fp8", "model.autocast_residual=true"],
    "gate by element": ["model.attention_gate=elementwise"],
    "gate by head": ["model.attention_gate=head"],
}


def trainer(session: Session) -> Iterator[list[Row]]:
    """Tokens a second inside the Trainer: the median of what it logs but the first, which compiles."""
    dry = session.options.dry_run
    for case, label in itertools.product(cases(session), session.options.runs):
        steps, every = (6, 2) if dry else (200, 25)
        read, failure = run_in_trainer(session, case, label, f"trainer.max_steps={steps}", f"trainer.log_every_n_steps={every}")
        row = Row("gpt", "trainer", "inside the Trainer", case.rows, label, str(case), "step", "tokens/s", baseline=label)
        yield [replace(row, note=failure)] if failure else of_run(row, case, read)


def run_in_trainer(session: Session, case: Case, label: str, *settings: str) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """What a run logged, and why it failed."""
    device = ["trainer=cpu", "model=gpt_tiny", "model.vocab_size=null", "model.dim=32", "model.n_layers=1", "model.n_heads=2",
              f"data.seq_len={case.seqlen}", "compile=false"] if session.options.dry_run else ["trainer=gpu"]
    told = ["experiment=gpt2_small_throughput", f"data.batch_size={case.rows}", *device, *settings, *TRAINERS[label]]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, ROOT / "train.py", *told, f"hydra.run.dir={folder}", "callbacks.progress=null"],
                              capture_output=True, text=True, cwd=ROOT)
        read: dict = {}
        with contextlib.suppress(FileNotFoundError):
            read = read_metrics(Path(folder) / "metrics.csv")
    return read, "" if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"


def loss(session: Session) -> Iterator[list[Row]]:
    """Training loss in nats over each tenth of the steps, by seed and kind of run. A seed's runs have the same weights and batches, and the
    learning rate of GPT-2 small's recipe."""
    options = session.options
    case, n_steps = cases(session)[0], 10 if options.dry_run else options.steps
    model = [] if options.dry_run else [f"model={options.model}", "model.vocab_size=null", "model.bias=false"]
    for seed in options.seeds:
        first: list[float] | None = None
        for label in options.runs:
            settings = f"seed={seed}", f"trainer.max_steps={n_steps}", "optimizer.lr=6e-4", "trainer.gradient_clip_val=1.0"
            read, failure = run_in_trainer(session, case, label, *model, *settings, "trainer.log_every_n_steps=1")
            losses = [value for _, value in read.get("train/loss", [])]
            row = Row("gpt", "loss", f"{options.model}, seed {seed}", n_steps, label, str(case), "train", "nats", baseline=options.runs[0])
            if failure or len(losses) != n_steps:
                yield [replace(row, note=failure or f"{len(losses)} losses")]
                continue
            means = [statistics.fmean(losses[n_steps * k // 10 : n_steps * (k + 1) // 10]) for k in range(10)]
            first = means if label == options.runs[0] else first
            tenths = " ".join(f"{mean:.4f}" for mean in means)
            print(f"{label}, seed {seed}: mean loss of each tenth of {n_steps} steps: {tenths}", flush=True)
            yield [replace(row, x=n_steps * (k + 1) // 10, value=mean, ratio=mean / first[k] if first else None)
                   for k, mean in enumerate(means)]


def of_run(row: Row, case: Case, read: dict[str, list[tuple[int, float]]]) -> list[Row]:
    """Rows of what a run logged of its speed."""
    rows = []
    for metric, direction, unit in (("perf/tokens_per_second", "step", "tokens/s"), ("perf/mfu", "mfu", "of peak")):
        if values := [value for _, value in read.get(metric, [])[1:]]:
            value = statistics.median(values)
            ms = case.tokens / value * 1e3 if direction == "step" else None
            rows.append(Row(**vars(row) | {"direction": direction, "unit": unit, "value": value, "ms": ms,
                                           "spread": (max(values) - min(values)) / value}))
    return rows


TABLES = {f.__name__: f for f in (speed, profile, trainer, loss)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("gpt", list(TABLES), list(BACKENDS))
    command.add_argument("--rows", nargs="+", type=harness.positive, default=[12, 32, 64], help="of 1024 tokens (default: 12 32 64)")
    command.add_argument("--runs", nargs="+", choices=list(TRAINERS), default=["usual", "unsplit"], help="inside the Trainer")
    command.add_argument("--steps", type=harness.positive, default=1000, help="of a run for its loss (default: 1000)")
    command.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of runs for their loss (default: 1 2 3)")
    command.add_argument("--model", choices=("gpt2_small", "gpt2_medium"), default="gpt2_small", help="of runs for their loss")
    return harness.main(command, TABLES, BACKENDS, list(EAGER), {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
