"""A training step of GPT-2 on prompts with several continuations: packed as trees, against each sequence by itself.

    python -m benchmarks.tree_step

A step is forward, backward and fused AdamW under bfloat16 autocast, no dropout, on batches that lie on the device. It has one prompt, or
several (`--prompts`), with which the host has more time for its launches. The columns "-graphs" (`--backends`) compile the forward and the
backward to CUDA graphs, with which the host does not count. The loss is the same: the mean over the continuations' tokens.
Tokens are counted in both as those of the sequences by themselves. Before a figure is printed the loss of each target and the gradients of
all matrices are held against those of the sequences in float32, from the same weights: within twice the error that the sequences have under
autocast. Steps of more than two prompts are checked with two.
"""

import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from attnzoo.attention.flash import FlashAttention
from attnzoo.data.trees import PromptRows
from attnzoo.models import GPT
from attnzoo.training.module import INPUTS, READ, summed_loss
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.bert import DEVICE, Training, to_device, wall_clock
from benchmarks.harness import Backend, Entry, Line, Pass, Session
from benchmarks.report import Row
from benchmarks.timing import Candidate

BATCHES = 2  # taken in turn


@dataclass(frozen=True)
class Case:
    """A batch is `prompts` prompts of so many tokens, each with `answers` continuations of `answer` tokens; a GPT of `layers` x `dim`."""

    prompt: int = 4096
    answer: int = 1024
    answers: int = 8
    vocab: int = 50257
    layers: int = 12
    dim: int = 768
    prompts: int = 1

    def __str__(self) -> str:
        return f"{f'{self.prompts}x' if self.prompts > 1 else ''}{self.prompt}+{self.answers}x{self.answer}"

    @property
    def seqlen(self) -> int:
        return self.prompt + self.answer


class RandomPrompts:
    """What PromptRows needs of a TokenStore: prompts of random tokens, whose continuations differ from the first token on. Both are sorted,
    so that a tree has the same order."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(0)
        n_prompts = BATCHES * case.prompts
        self.lengths = np.tile([case.prompt + 1, *[case.answer] * case.answers], n_prompts)
        self.labels = np.tile([0, *[1] * case.answers], n_prompts)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.tokens = rng.integers(case.vocab, size=self.offsets[-1])
        begins = self.offsets[:-1][self.labels == 1].reshape(n_prompts, -1)
        self.tokens[self.offsets[:-1][self.labels == 0]] = np.sort(rng.permutation(case.vocab)[:n_prompts])
        self.tokens[begins] = np.sort([rng.permutation(case.vocab)[: case.answers] for _ in range(n_prompts)])


def batches(case: Case, trees: bool) -> list[dict]:
    rows = PromptRows(RandomPrompts(case), case.seqlen, pad_id=0, seed=0, shuffle=False, trees=trees, predict_prompts=False)
    made = (rows.batch(0, mine) for mine in np.arange(BATCHES * case.prompts).reshape(BATCHES, -1))
    return [{name: to_device(value, DEVICE) if isinstance(value, Tensor) else value for name, value in batch.items() if name in READ}
            for batch in made]


def model(case: Case, impl: str | None) -> nn.Module:
    """GPT-2, its weights the same at every call."""
    torch.manual_seed(0)
    return GPT(vocab_size=case.vocab, dim=case.dim, n_layers=case.layers, n_heads=case.dim // 64, mlp="gelu_tanh", positions="learned",
               train_context=case.seqlen, pad_vocab_multiple=64, attention=partial(FlashAttention, impl=impl)).to(DEVICE).train()


def loss(model: nn.Module, batch: dict) -> Tensor:
    summed, count = summed_loss(model, batch, fused=DEVICE == "cuda")
    return summed / count


def results(model: nn.Module, batch: dict, autocast: bool) -> list[Tensor]:
    """The loss of each target, and the gradients of all matrices."""
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        losses = model(batch["input_ids"], targets=batch["labels"], target_weights=batch["weights"], reduction="none", **inputs)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    return [losses.detach(), *torch.autograd.grad(losses.mean(), matrices)]


def errors(case: Case, trees: bool, impl: str | None) -> Tensor:
    """The largest error as a share of what is allowed, before any training."""
    made, sequences = batches(case, trees)[0], batches(case, False)[0]
    ours = results(model(case, impl), made, True)
    eager, exact = (results(model(case, impl), sequences, autocast) for autocast in (True, False))
    return torch.tensor(max(error_ratio(*three) for three in zip(ours, eager, exact, strict=True)))


def backend(name: str, trees: bool, impl: str | None = None, graphs: bool = False) -> Backend:
    def make(case: Case, _) -> Pass:
        error = errors(replace(case, prompts=min(case.prompts, 2)), trees, impl)
        step_loss = torch.compile(loss, mode="reduce-overhead", dynamic=False) if graphs else loss
        trained = Training(model(case, impl), True, step_loss, DEVICE)
        turn = itertools.cycle(batches(case, trees))
        run = Pass(lambda: trained.step(next(turn)), lambda: (), [error])
        for _ in range(2 * BATCHES):  # compiles, and captures graphs
            run.forward()
        return run

    return Backend(name, make)


BACKENDS = {
    one.name: one
    for one in (
        backend("trees", True),
        backend("sequences", False),
        replace(backend("trees-graphs", True, graphs=True), on_request=True),
        replace(backend("sequences-graphs", False, graphs=True), on_request=True),
        backend("trees-reference", True, "reference"),
        backend("sequences-reference", False, "reference"),
    )
}


def step(session: Session) -> Iterator[list[Row]]:
    """Tokens a second, those of the sequences by themselves."""
    timing = replace(session.timing, bench=wall_clock)
    for prompts in session.options.prompts:
        case = Case(24, 8, 3, 500, 2, 128, prompts) if session.options.dry_run else Case(prompts=prompts)
        n_tokens = prompts * case.answers * case.seqlen
        columns = [Entry(b.name, b, case, None, {}, lambda run: run.saved[0].item()) for b in session.backends]
        ready = harness.prepare(columns)
        readings = timing.measure({label: Candidate(run.forward, run.scope) for label, run in ready.passes.items()})
        ms = {label: statistics.median(times) for label, times in readings.items()}
        spread = {label: (max(times) - min(times)) / ms[label] for label, times in readings.items()}
        values = {label: n_tokens / time * 1e3 for label, time in ms.items()}
        panel = f"{case.answers} answers of {case.answer}" + (f", {prompts} prompts" if prompts > 1 else "")
        yield Line("tree", "step", panel, case.prompt).rows(
            columns, ready, "step", "tokens/s", values, ms=ms, spread=spread)


TABLES = {"step": step}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("tree_step", list(TABLES), list(BACKENDS))
    command.add_argument("--prompts", nargs="+", type=harness.positive, default=[1, 2], help="prompts of a step (default: 1 2)")
    return harness.main(command, TABLES, BACKENDS, ["trees-reference", "sequences-reference"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
