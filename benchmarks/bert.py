"""BERT-base MLM training: real tokens a second of attnzoo's model, packed, against Hugging Face's BertForMaskedLM, padded.

    python -m benchmarks.bert                   # tokens a second, both trained in one run on the same sequences and masks
    python -m benchmarks.bert profile           # which kernels a step's time goes to
    python -m benchmarks.bert loss              # loss curves from the same weights on the Python standard library's sources

A step is 64 sequences of 128 to 512 random tokens (mean 320; in the second line all 512, where nothing is padded), 15 % of them to guess:
forward, backward and fused AdamW under bfloat16 autocast, no dropout. Before a figure is printed the logits are held against Hugging Face's
in float32, from the same weights: within twice the error of Hugging Face's under autocast.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.data import sources, tokenizers
from attnzoo.data.masking import MaskedRows
from attnzoo.data.tokenized import TokenStore, prepare
from attnzoo.hub import from_huggingface
from attnzoo.training.module import INPUTS, summed_loss
from attnzoo.training.optimizer import AdamWRecipe
from attnzoo.training.schedule import Schedule
from attnzoo.training.throughput import peak_flops
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session
from benchmarks.kernels import by_kind
from benchmarks.report import Row
from benchmarks.timing import Candidate

MASK_RATE = 0.15
CONSTANT = Schedule("linear", decay_share=0.0)
RECIPE = AdamWRecipe(lr=1e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, schedule=CONSTANT, warmup_steps=50, final_lr=0.0)
STEPS = 20  # of one reading


@dataclass(frozen=True)
class Case:
    """A global batch: `rows` sequences of `min_len` to `seqlen` tokens of a vocabulary, for a BERT of `layers` x `dim`."""

    rows: int = 64
    seqlen: int = 512
    min_len: int = 128
    vocab: int = 30522
    layers: int = 12
    dim: int = 768

    def __str__(self) -> str:
        return f"{self.rows}x{self.min_len}-{self.seqlen}"


class RandomDocuments:
    """What MaskedRows needs of a TokenStore: documents of random tokens, each one sequence with its [CLS] and [SEP]."""

    def __init__(self, case: Case, n_steps: int):
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(case.min_len, case.seqlen, case.rows * n_steps, endpoint=True) - 1
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.tokens = rng.integers(5, case.vocab, self.offsets[-1])


@dataclass(frozen=True)
class Data:
    """The same sequences and masks packed, as attnzoo trains them, and padded, as Hugging Face does."""

    case: Case
    store: RandomDocuments | TokenStore
    tokenizer: object
    min_seq_len: int | None = None
    orders: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> dict[bool, MaskedRows]:
        options = {"tokenizer": self.tokenizer, "mask_rate": MASK_RATE, "seed": 0, "shuffle": True, "min_seq_len": self.min_seq_len}
        return {packed: MaskedRows(self.store, self.case.seqlen, packed=packed, batching="balanced" if packed else "random", **options)
                for packed in (True, False)}

    def batch(self, step: int, packed: bool, device: str) -> dict:
        rows = self.layouts[True]
        epoch, step = divmod(step, rows.n_rows // self.case.rows)
        if epoch not in self.orders:
            self.orders[epoch] = rows.order(epoch, self.case.rows)
        mine = self.orders[epoch][step * self.case.rows :][: self.case.rows]
        batch = self.layouts[packed].batch(epoch, mine)
        return {key: to_device(value, device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def to_device(value: Tensor, device: str) -> Tensor:
    return value.pin_memory().to(device, non_blocking=True) if device == "cuda" else value


def random_data(case: Case, n_steps: int) -> Data:
    return Data(case, RandomDocuments(case, n_steps), SimpleNamespace(vocab_size=case.vocab, pad_id=0, cls_id=2, sep_id=3, mask_id=4))


def huggingface(case: Case) -> nn.Module:
    """Hugging Face's model with SDPA and without dropout, its weights the same at every call."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(vocab_size=case.vocab, hidden_size=case.dim, num_hidden_layers=case.layers, num_attention_heads=case.dim // 64,
                        intermediate_size=4 * case.dim, max_position_embeddings=case.seqlen, attn_implementation="sdpa",
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config)


@dataclass
class Training:
    """A model in training; `step` takes a batch and returns its mean loss, on the device."""

    model: nn.Module
    packed: bool
    loss: Callable[[nn.Module, dict], Tensor]
    device: str

    def __post_init__(self):
        matrices = {name for name, parameter in self.model.named_parameters() if parameter.ndim >= 2}
        self.optimizer, self.schedule = RECIPE.build(
            self.model.named_parameters(), matrices=matrices, total_steps=lambda: 1, scaled_gradients=False)

    def step(self, batch: dict) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach().clone()  # the next replay of a graph overwrites the other


def attnzoo_loss(model: nn.Module, batch: dict) -> Tensor:
    loss, count = summed_loss(model, batch)
    return loss / count


def huggingface_loss(model: nn.Module, batch: dict) -> Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss


TRAININGS: dict[str, tuple[bool, str | None]] = {  # ours or theirs, mode of torch.compile
    "attnzoo-graphs": (True, "reduce-overhead"),
    "attnzoo": (True, "default"),
    "huggingface": (False, "default"),
    "huggingface-eager": (False, None),
    "attnzoo-eager": (True, None),
}


def training(name: str, case: Case, device: str) -> Training:
    ours, mode = TRAININGS[name]
    model = huggingface(case)
    model = from_huggingface(model) if ours else model
    loss = attnzoo_loss if ours else huggingface_loss
    # the batches' shapes are static; what the one compiles must not make the other's dynamic
    loss = loss if mode is None else torch.compile(loss, mode=None if mode == "default" else mode, dynamic=False)
    return Training(model.to(device).train(), ours, loss, device)


def backend(name: str) -> Backend:
    def make(case: Case, data: Data) -> Pass:
        trained = training(name, case, DEVICE)
        turn = itertools.cycle([keep(data.batch(step, trained.packed, DEVICE)) for step in range(4)])
        error = logits_error(trained, case, data)
        run = Pass(lambda: trained.step(next(turn)), lambda: (), [error])
        for _ in range(4):  # compiles, and captures graphs
            run.forward()
        return run

    return Backend(name, make)


@torch.no_grad()
def logits_error(trained: Training, case: Case, data: Data) -> Tensor:
    """The logits at the targets of a batch, before any training, as a share of the allowed error."""
    padded, packed = data.batch(0, False, DEVICE), data.batch(0, True, DEVICE)
    theirs, inputs = huggingface(case).to(DEVICE), {key: padded[key] for key in ("input_ids", "attention_mask")}
    at, targets = padded["logits_at"], padded["n_targets"]

    def logits(autocast: bool) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return theirs(**inputs).logits.flatten(0, 1)[at]

    exact, eager = logits(False), logits(True)
    value = eager
    if trained.packed:
        with torch.autocast(DEVICE, torch.bfloat16):
            value = trained.model(packed["input_ids"], **{key: packed[key] for key in INPUTS if key in packed})[:targets]
    return torch.tensor(error_ratio(value, eager, exact))


BACKENDS = {name: backend(name) for name in TRAININGS}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cases(session: Session) -> list[Case]:
    if session.options.dry_run:
        return [Case(4, 64, 16, 500, 2, 128)]
    return [Case(), Case(min_len=512)]


def wall_clock(call: Callable[[], object], warmup: float, rep: float) -> float:
    """Milliseconds a step, host and device together, as a training run sees them."""
    finish = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    steps = STEPS if DEVICE == "cuda" else 1
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    finish()
    return (time.perf_counter() - start) / steps * 1e3


def tokens_a_second(session: Session, table: str, backends: list[Backend], case: Case, data: Data, direction: str) -> list[Row]:
    """Real tokens a second of each backend's pass over the same four batches."""
    n_tokens = float(np.mean([data.batch(step, True, "cpu")["n_tokens"] for step in range(4)]))
    line = Line("bert", table, f"{case.rows} rows, mean {n_tokens / case.rows:.0f}", case.seqlen)
    columns = [Entry(b.name, b, case, data, {"forward": n_tokens}, lambda run: run.saved[0].item()) for b in backends]
    return rates(session, line, columns, direction)


def rates(session: Session, line: Line, columns: list[Entry], direction: str) -> list[Row]:
    """Tokens a second of each column, whose pass is a step."""
    ready = harness.prepare(columns)
    timing = replace(session.timing, bench=wall_clock)
    readings = timing.measure({label: Candidate(run.forward, run.scope) for label, run in ready.passes.items()})
    ms = {label: float(np.median(times)) for label, times in readings.items()}
    spread = {label: (max(times) - min(times)) / ms[label] for label, times in readings.items()}
    values = {e.label: e.work["forward"] / ms[e.label] * 1e3 for e in columns if e.label in ms}
    return line.rows(columns, ready, direction, "tokens/s", values, ms=ms, spread=spread)


def shares_of_peak(rows: list[Row], flops: float) -> list[Row]:
    """The share of the card's peak that the matrix products of a step are, as further rows; none where the peak is not known."""
    peak = peak_flops(torch.device(DEVICE), "bf16")
    return [replace(row, direction="mfu", unit="of peak", value=row.ms and flops / row.ms * 1e3 / peak) for row in rows] if peak else []


def speed(session: Session) -> Iterator[list[Row]]:
    """Real tokens a second, and the share of the card's peak that their matrix products are."""
    for case in cases(session):
        data = random_data(case, 4)
        rows = tokens_a_second(session, "speed", session.backends, case, data, "step")
        yield [*rows, *shares_of_peak(rows, step_flops(case, data))]
        torch._dynamo.reset()


def step_flops(case: Case, data: Data) -> float:
    """Of a step's real tokens, the head on the targets only, whatever a model computes beside them."""
    model = from_huggingface(huggingface(case))
    batches = [data.batch(step, True, "cpu") for step in range(4)]
    return float(np.mean([model.flops(batch["lengths"].tolist(), n_logits=batch["n_targets"]) for batch in batches]))


def profile(session: Session) -> Iterator[list[Row]]:
    """Milliseconds of device time a step by kind of kernel, and the twenty longest kernels."""
    case = cases(session)[0]
    for b in session.backends:
        run = b.make(case, random_data(case, 4))
        yield profile_rows("bert", b.name, case.seqlen, case, run)
        torch._dynamo.reset()


def profile_rows(operator: str, name: str, x: float, case: object, run: Pass) -> list[Row]:
    return [Row(operator, "profile", kind, x, name, str(case), "step", "ms", ms, ms, baseline=name)
            for kind, ms in by_kind(name, run.forward).items()]


def loss(session: Session) -> Iterator[list[Row]]:
    """Mean training loss in nats over the last tenth of the steps up to each row, all from the same weights on the same sequences."""
    case = cases(session)[0]
    n_steps = 10 if session.options.dry_run else 250
    with tempfile.TemporaryDirectory() as folder:
        data = text_data(case, Path(folder))
        curves = {}
        for b in session.backends:
            trained = training(b.name, case, DEVICE)
            losses = []
            for step in range(n_steps):
                losses.append(trained.step(keep(data.batch(step, trained.packed, DEVICE))))
                if step + 1 == n_steps // 2:
                    losses[-1].item()  # waits, so that the second half can be timed
                    start = time.perf_counter()
            curves[b.name] = torch.stack(losses).float().cpu()
            ms = 1e3 * (time.perf_counter() - start) / (n_steps - n_steps // 2)
            tenths = " ".join(f"{part.mean():.4f}" for part in curves[b.name].chunk(10))
            print(f"{b.name}: {ms:.1f} ms a step with its batch; mean loss of each tenth of {n_steps} steps: {tenths}", flush=True)
            del trained
            torch._dynamo.reset()
    window = n_steps // 10
    first = session.backends[0].name
    for end in range(window, n_steps + 1, window):
        means = {name: curve[end - window : end].mean().item() for name, curve in curves.items()}
        yield [Row("bert", "loss", "steps", end, name, str(case), "train", "nats", mean, baseline=first, ratio=mean / means[first])
               for name, mean in means.items()]
    for name, curve in curves.items():
        gap = (curve - curves[first]).abs()
        print(f"{name}: loss of a step differs from {first}'s by {gap.mean():.5f} nats in the mean, {gap.max():.5f} at most")


def keep(batch: dict) -> dict:
    return {key: value for key, value in batch.items() if key in ("input_ids", "labels", *INPUTS)}


def text_data(case: Case, folder: Path) -> Data:
    """The standard library's sources under a WordPiece vocabulary of their own."""
    from tokenizers import BertWordPieceTokenizer

    source = sources.python_stdlib()
    trained = BertWordPieceTokenizer(lowercase=False)
    trained.train_from_iterator((d["text"] for d in source.documents()), vocab_size=case.vocab, show_progress=False)
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = tokenizers.load(str(folder / "tokenizer.json"))
    return Data(case, TokenStore(prepare(source, tokenizer, folder), "train"), tokenizer, case.min_len)


TABLES = {f.__name__: f for f in (speed, profile, loss)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("bert", list(TABLES), list(BACKENDS))
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-eager"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
