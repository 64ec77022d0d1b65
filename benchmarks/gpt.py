"""GPT-2 small in training: tokens a second of attnzoo's model against nanoGPT's form of it, and where a step's time goes.

    python -m benchmarks.gpt                    # bare loops, all in one run, 12, 32 and 64 rows of 1024 tokens
    python -m benchmarks.gpt profile            # which kernels a step's time goes to
    python -m benchmarks.gpt trainer            # inside the Trainer: train.py experiment=gpt2_small_throughput

A step is forward, backward and fused AdamW under bfloat16 autocast on random tokens, 124 M parameters without biases and dropout, a
vocabulary of 50304, as nanoGPT's bench.py has them. Before a figure is printed the logits are held against nanoGPT's in float32, from the
same weights: within twice the error of nanoGPT's under autocast.
"""

import contextlib
import gc
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    "nanogpt": (NanoGPT, logits_loss, "default"),
    "attnzoo": (attnzoo, attnzoo_loss, "default"),
    "attnzoo-logits": (attnzoo, logits_loss, "reduce-overhead"),  # all logits in memory, as `fused_loss=false`
    "nanogpt-graphs": (NanoGPT, logits_loss, "reduce-overhead"),
    "attnzoo-eager": (attnzoo, attnzoo_loss, None),
    "nanogpt-eager": (NanoGPT, logits_loss, None),
}
USUAL = ("attnzoo-graphs", "attnzoo-residual", "nanogpt")  # the others when they are named
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
    with torch.autocast(DEVICE, torch.bfloat16):
        eager, value = theirs(input_ids), model(input_ids)
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


# of a run inside the Trainer, by column
TRAINERS: dict[str, list[str]] = {
    "usual": [],
    "residual": ["model.autocast_residual=true"],
    "all logits": ["fused_loss=false"],
}


def trainer(session: Session) -> Iterator[list[Row]]:
    """Tokens a second inside the Trainer: the median of what it logs but the first, which compiles."""
    dry = session.options.dry_run
    for case, label in itertools.product(cases(session), session.options.runs):
        settings = ["experiment=gpt2_small_throughput", f"data.batch_size={case.rows}", *TRAINERS[label],
                    *(["trainer=cpu", "model=gpt_tiny", "model.vocab_size=null", "model.dim=32", "model.n_layers=1", "model.n_heads=2",
                       f"data.seq_len={case.seqlen}", "compile=false", "trainer.max_steps=6", "trainer.log_every_n_steps=2"] if dry
                      else ["trainer=gpu", "trainer.max_steps=200", "trainer.log_every_n_steps=25"])]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, ROOT / "train.py", *settings, f"hydra.run.dir={folder}", "callbacks.progress=null"],
                                  capture_output=True, text=True, cwd=ROOT)
            read: dict = {}
            with contextlib.suppress(FileNotFoundError):
                read = read_metrics(Path(folder) / "metrics.csv")
        row = Row("gpt", "trainer", "inside the Trainer", case.rows, label, str(case), "step", "tokens/s", baseline=label)
        yield of_run(row, case, read) if done.returncode == 0 else [Row(**vars(row) | {"note": f"failed: {done.stderr.strip()[-300:]}"})]


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


TABLES = {f.__name__: f for f in (speed, profile, trainer)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("gpt", list(TABLES), list(BACKENDS))
    command.add_argument("--rows", nargs="+", type=harness.positive, default=[12, 32, 64], help="of 1024 tokens (default: 12 32 64)")
    command.add_argument("--runs", nargs="+", choices=list(TRAINERS), default=["usual", "residual"], help="inside the Trainer")
    return harness.main(command, TABLES, BACKENDS, list(EAGER), {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
