"""Tokens a second of transformers' own engine, `generate_batch`, by what computes attention over its pages.

    python -m benchmarks.serving                     # Qwen2.5's shapes at 1.5 B, random weights, 8 samples a prompt
    python -m benchmarks.serving --size 7b --prompt 4096 --batches 1 8
    python -m benchmarks.serving --rounds 2          # in about two minutes
    python -m benchmarks.serving samples             # `num_samples` of generate.py behind a long prompt
    python -m benchmarks.serving tokens --models gpt2_small gpt2_xl   # one text of generate.py: how fast the weights are read
    python -m benchmarks.serving --dry-run           # on the CPU, tiny

The engine is the same for all: continuous batching, a cache in pages, samples that share their prompt's pages. A backend is an
attn_implementation, which was called "paged|..." before; "prefixes once" and "gathered" are attnzoo_flash with options of `hub.use_pages`.
A reading goes from new random prompts on the host, so that no page is found again, to all tokens on the host. What the engine prepares once
is not in it, nor that generate_batch waits for its thread to end. Each backend has one engine, as large as the largest batch needs, and
prints its rows before the next one begins.

Before a figure is printed the backend writes the likeliest tokens in float32, which must be those that transformers' eager attention writes
for each prompt alone. The figures are of `--dtype`, with drawn tokens.
"""

import contextlib
import functools
import gc
import importlib.util
import itertools
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from attnzoo.attention.flash import FlashAttention
from attnzoo.hub import use_pages
from attnzoo.models import GPT, decoding
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.cpu import composed
from benchmarks.harness import Backend, Entry, Line, Pass, Session
from benchmarks.kernels import by_kind
from benchmarks.report import Row
from benchmarks.timing import Candidate, host_bench

CHECKED_PROMPTS, CHECKED_TOKENS = 2, 16
PAGE = 256  # tokens, the engine's default
SIZES = {
    "tiny": {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2},
    "7b": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4},
}


@dataclass(frozen=True)
class Case:
    """Prompts of so many random tokens, each continued `samples` times by `new` tokens, in a model of SIZES."""

    size: str
    prompts: int
    samples: int
    prompt: int
    new: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{self.size} {self.prompts}x{self.samples} {self.prompt}+{self.new}"

    def inputs(self, seed: int) -> list[list[int]]:
        shape, high = (self.prompts, self.prompt), SIZES[self.size]["vocab_size"]
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).tolist()


def model(case: Case, implementation: str) -> nn.Module:
    """In float32, its weights the same at every call."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES[case.size], max_position_embeddings=case.prompt + case.new + CHECKED_TOKENS, use_sliding_window=False,
                         attn_implementation=implementation, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(case.device):
        return Qwen2ForCausalLM(config).eval()


def written(model: nn.Module, case: Case, prompts: list[list[int]], samples: int, new: int, top_k: int = 0) -> Tensor:
    """What the engine draws behind each prompt, of the top_k likeliest tokens (0: of all), samples next to each other: (prompts * samples,
    new)."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    vocab_size = SIZES[case.size]["vocab_size"]  # no token ends a text
    generation = GenerationConfig(max_new_tokens=new, num_return_sequences=samples, do_sample=True, top_k=top_k, eos_token_id=vocab_size,
                                  pad_token_id=vocab_size)
    pages = len(prompts) * samples * -(-(case.prompt + new) // PAGE) + 8
    engine = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=max(case.prompt, 8192 if case.device == "cuda" else 64))
    engine.auto_switch_to_flash = False  # older transformers have no such option and switch to nothing
    found = model.generate_batch(inputs=prompts, generation_config=generation, continuous_batching_config=engine, progress_bar=False,
                                 persistent_manager=True)
    lengths = [len(one.generated_tokens) for one in found.values()]
    if lengths != [new] * (len(prompts) * samples):
        raise RuntimeError(f"generate_batch wrote {sum(lengths)} tokens of {len(lengths)} texts, not {new} of each of "
                           f"{len(prompts) * samples}")
    return torch.tensor([one.generated_tokens for one in found.values()])


class Served:
    """The engine that `written` has left in the model. What generate_batch does, its thread's start and stop apart."""

    def __init__(self, model: nn.Module, case: Case):
        self.model, self.case, self.seeds = model, case, itertools.count(2)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.model.continuous_batching_context_manager(persistent_manager=True, timeout=5) as self.manager:
            yield

    def answer(self, prompts: int | None = None) -> None:
        """To as many prompts, by default the case's."""
        prompts = prompts or self.case.prompts
        self.manager.add_requests(inputs=replace(self.case, prompts=prompts).inputs(next(self.seeds)), max_new_tokens=self.case.new)
        texts = 0
        while texts < prompts * self.case.samples:
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError("the engine's thread has ended")
            if result is not None and result.is_finished():
                if len(result.generated_tokens) != self.case.new:
                    raise RuntimeError(f"a text has {len(result.generated_tokens)} new tokens, not {self.case.new}: {result.error}")
                texts += 1


@functools.lru_cache(maxsize=1)
def expected(case: Case) -> Tensor:
    """What eager attention writes behind each of the checked prompts alone, (CHECKED_PROMPTS, CHECKED_TOKENS)."""
    eager = model(case, "eager")
    how = {"max_new_tokens": CHECKED_TOKENS, "do_sample": False, "pad_token_id": 0}
    rows = [torch.tensor([ids], device=case.device) for ids in case.inputs(0)]
    return torch.cat([eager.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, ids.shape[1] :].cpu() for ids in rows])


def backend(name: str, package: str | None = None, implementation: str | None = None, pages: dict[str, bool] | None = None) -> Backend:
    def missing() -> str | None:
        found = package is None or importlib.util.find_spec(package) is not None
        return None if found else f"cannot run: the package {package} is not installed"

    def make(case: Case, _) -> Pass:
        ours = model(case, implementation or name)
        if pages is not None:
            use_pages(ours, **pages)
        checked = replace(case, prompts=CHECKED_PROMPTS)
        found = written(ours, checked, checked.inputs(0), 2, CHECKED_TOKENS, top_k=1)  # the likeliest
        equal = torch.equal(found, expected(checked).repeat_interleave(2, dim=0))
        ours.destroy_cached_continuous_batching_manager()
        ours.to(case.dtype)
        written(ours, case, case.inputs(1), case.samples, case.new)  # makes the engine, compiles, captures
        served = Served(ours, case)
        return Pass(served.answer, lambda: (), [torch.tensor(0.0 if equal else torch.inf)], scope=served.running)

    return Backend(name, make, missing)


BACKENDS = {one.name: one for one in (
    backend("attnzoo_flash"), backend("prefixes once", implementation="attnzoo_flash", pages={"share_prefixes": True}),
    backend("gathered", implementation="attnzoo_flash", pages={"gather": True}), backend("sdpa"),
    backend("flash_attention_2", "flash_attn"), backend("flash_attention_3", "flash_attn_interface"))}


def speed(session: Session) -> Iterator[list[Row]]:
    """New tokens a second of all samples together, by the number of prompts."""
    o = session.options
    case = Case(o.size, max(o.batches), o.samples, o.prompt, o.new_tokens, session.dtype, session.device)
    of_baseline: dict[float, float] = {}
    for one in session.backends:
        for row in rows(session, case, one):
            if one is session.backends[0] and row.value:
                of_baseline[row.x] = row.value
            ratio = of_baseline[row.x] / row.value if row.value and row.x in of_baseline else None
            yield [replace(row, baseline=session.backends[0].name, ratio=ratio)]
        gc.collect()  # its engine goes before the next one comes
        if session.device == "cuda":
            torch.cuda.empty_cache()


def rows(session: Session, case: Case, one: Backend) -> Iterator[Row]:
    entry = Entry(one.name, one, case, None, {}, lambda run: run.saved[0].item())
    ready = harness.prepare([entry])
    timing = replace(session.timing, bench=host_bench)
    for prompts in session.options.batches:
        values, extra = {}, {}
        if one.name in ready.passes:
            run = ready.passes[one.name]
            call = functools.partial(run.forward, prompts)
            with run.scope():
                call()  # captures what a batch of this size needs
            times = timing.measure({one.name: Candidate(call, run.scope)})[one.name]
            ms = statistics.median(times)
            values[one.name] = prompts * case.samples * case.new / ms * 1e3
            extra = {"ms": {one.name: ms}, "spread": {one.name: (max(times) - min(times)) / ms}}
        line = Line("serving", "speed", f"{case.size}, {case.prompt}+{case.new}, {case.samples} samples", prompts)
        yield from line.rows([replace(entry, case=replace(case, prompts=prompts))], ready, "generate", "tokens/s", values, **extra)


def samples(session: Session) -> Iterator[list[Row]]:
    """Our own decoding, greedy, of samples behind one prompt of 8192 tokens: in the prompt's pages, and each in a copy of its own.

    Before a figure is printed both write equal tokens in float32. A reading is 16 steps, each a CUDA graph's replay on a GPU.
    """
    dry, steps = session.options.dry_run, 16
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 4} if dry else {"dim": 2048, "n_layers": 8, "n_heads": 16}
    prompt = torch.randint(97, (1, 128 if dry else 8192), device=session.device)
    gpt = GPT(vocab_size=97, train_context=prompt.shape[1] + 64, n_kv_heads=sizes["n_heads"] // 4, positions="rotary",
              attention=FlashAttention, **sizes).eval().to(session.device)

    def made(dtype: torch.dtype, count: int, shared: bool) -> decoding.Decoding:
        with torch.autocast(session.device, dtype, dtype != torch.float32):
            return gpt.decoding(prompt, steps + 2, samples=count, temperature=0, graph=None, pages=shared)

    def tokens(count: int, shared: bool) -> Tensor:
        found = made(torch.float32, count, shared)
        return torch.cat([found.step().clone() for _ in range(steps)], dim=1)

    def passed(count: int, shared: bool) -> Pass:
        found = made(session.dtype, count, shared)
        for _ in range(decoding.GRAPHED):
            found.step()

        def forward() -> Tensor:
            found.rewind()
            for _ in range(steps):
                found.step()
            if session.device == "cuda":
                torch.cuda.synchronize()
            return found.drawn

        return Pass(forward, lambda: (), [])

    def column(name: str, count: int, shared: bool, equal: bool) -> Entry:
        return Entry(name, Backend(name, lambda case, x: passed(count, shared)), f"{count} behind {prompt.shape[1]}", None,
                     {"forward": count * steps * 1e12}, lambda run: 0.0 if equal else torch.inf)

    for count in (2,) if dry else (16, 64):
        equal = torch.equal(tokens(count, True), tokens(count, False))
        columns = [column("the prompt's pages", count, True, equal), column("a copy each", count, False, equal)]
        line = Line("serving", "samples", f"{sizes['n_layers']} layers, {prompt.shape[1]} tokens", count)
        yield harness.compare(line, columns, ["forward"], replace(session.timing, bench=host_bench), unit="tokens/s")


def tokens(session: Session) -> Iterator[list[Row]]:
    """Our own decoding of one text, greedy, by models of configs/model with random weights: TB/s of the weights that a token reads, beside
    a copy, tokens a second, and on a GPU milliseconds of a token's kernels by kind, and their number.

    Before a figure is printed a step's logits are held against those of the whole text: within twice autocast's error against float32. A
    reading is 16 steps, each a CUDA graph's replay on a GPU.
    """
    for name in session.options.models:
        yield from tokens_of(session, name)


def tokens_of(session: Session, name: str) -> Iterator[list[Row]]:
    length, steps = session.options.prompt, 16
    positions = length + steps + 2
    with torch.device(session.device):
        gpt = composed(f"model={name}", "attention=flash", f"data.seq_len={positions}", f"model.max_positions={positions}",
                       "model.vocab_size=50257").eval()
    prompt = torch.randint(gpt.vocab_size, (1, length), device=session.device)
    autocast = functools.partial(torch.autocast, session.device, session.dtype, session.dtype != torch.float32)
    with autocast():
        found = gpt.decoding(prompt, steps + 2, lengths=torch.full((1,), length, device=session.device), temperature=0, graph=None)
    text, last = torch.cat([prompt, found.step()], dim=1), torch.tensor([length], device=session.device)
    with torch.no_grad():
        exact = gpt(text, logits_at=last)
        with autocast():
            eager = gpt(text, logits_at=last)
    with patch.object(found, "_drawn_from", wraps=found._drawn_from) as drawn_from:
        found.step()
    error = error_ratio(drawn_from.call_args.args[0], eager, exact)
    for _ in range(2, decoding.GRAPHED):
        found.step()
    size = sum(layer.weight.nbytes for layer in found.fast.modules() if isinstance(layer, nn.Linear))
    source, target = torch.zeros(2, size // 2, dtype=torch.uint8, device=session.device)  # a copy reads half and writes half

    def written() -> Tensor:
        found.rewind()
        for _ in range(steps):
            found.step()
        return waited_for(found.drawn)

    def copied() -> Tensor:
        for _ in range(steps):
            target.copy_(source)
        return waited_for(target)

    def column(label: str, call: Callable[[], Tensor], error: float) -> Entry:
        backend = Backend(label, lambda case, x: Pass(call, lambda: (), []))
        return Entry(label, backend, f"{name} behind {length}", None, {"forward": float(steps * size)}, lambda run: error)

    line = Line("serving", "tokens", f"{name}, {size / 1e9:.3g} GB", length)
    rows = harness.compare(line, [column("attnzoo", written, error), column("copy", copied, 0.0)], ["forward"],
                           replace(session.timing, bench=host_bench), unit="TB/s")
    yield rows
    yield [replace(rows[0], unit="tokens/s", value=rows[0].ms and steps / rows[0].ms * 1e3)]
    if session.device == "cuda":
        found.rewind()
        yield [replace(rows[0], panel=f"{name}, {kind}", unit="ms", value=ms, ms=ms, spread=None)
               for kind, ms in by_kind(name, found.step, steps).items()]


def waited_for(x: Tensor) -> Tensor:
    if x.is_cuda:
        torch.cuda.synchronize()
    return x


TABLES = {"speed": speed, "samples": samples, "tokens": tokens}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("serving", list(TABLES), list(BACKENDS))
    command.add_argument("--size", choices=list(SIZES), default="1.5b", help="of the model, random weights (default: 1.5b)")
    command.add_argument("--batches", nargs="+", type=harness.positive, default=[1, 4, 16], help="prompts at once (default: 1 4 16)")
    command.add_argument("--samples", type=harness.positive, default=8, help="of each prompt (default: 8)")
    command.add_argument("--prompt", type=harness.positive, default=1024, help="tokens of a prompt (default: 1024)")
    command.add_argument("--models", nargs="+", default=["gpt2_xl"], help="of configs/model, for `tokens` (default: gpt2_xl)")
    command.add_argument("--new-tokens", type=harness.positive, default=128, help="of each sample (default: 128)")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(size="tiny", models=["gpt_tiny"], batches=[2], prompt=12, new_tokens=4, dtype="float32")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return harness.main(command, TABLES, BACKENDS, None, {"speed": "prompts"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
