"""The cost of a context length: prefill time, tokens per second, memory, decoding speed and training speed."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from attnzoo.batch import Batch
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.results import Row
from attnzoo.models.decoding import GRAPHED
from attnzoo.training.module import summed_loss

TASK = "cost"
FACTOR = 2.0  # ratio of the slowest to the fastest repetition above which a note reports it


def cost(
    model: torch.nn.Module,
    data,
    *,
    lengths: Sequence[int],
    context: int | None = None,
    batch_size: int = 1,
    repeats: int = 5,
    new_tokens: int = 16,
    training_tokens: int | None = None,
) -> Plan:
    """The model reads `batch_size` rows of random tokens and predicts the next one. Times are medians of `repeats`, after one warm-up.

    Rows: tokens_per_second and prefill_seconds. On a GPU peak_memory_gb, which includes the weights but not what else was allocated before
    (layouts that operators keep, other models). For models with a KV cache decode_tokens_per_second, of `new_tokens` tokens decoded after a
    context of that length, summed over the rows.
    training_tokens: tokens in a training step, as rows of the length, at least one row; None measures no training. A step is forward, loss
    at every position and backward, without an optimizer and not compiled. Rows: training_tokens_per_second, on a GPU training_memory_gb.
    """
    for name, value in {"batch_size": batch_size, "repeats": repeats, "new_tokens": new_tokens, "training_tokens": training_tokens}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if data.objective not in ("lm", "mlm"):
        return refusal(TASK, "is measured for language models only")
    settings = {"batch_size": batch_size, "repeats": repeats, "new_tokens": new_tokens}
    tokens = batch_size * (1 + repeats)
    measurements = []
    for length in sorted(lengths):
        measure = partial(_measure, model, data, length, batch_size, repeats, new_tokens)
        measurements.append(Measurement(TASK, measure, settings, tokens * length, length))
        if training_tokens:
            n_rows = max(1, training_tokens // length)
            measure = partial(_training, model, length, n_rows, repeats)
            rows = {"training_rows": n_rows, "repeats": repeats}
            measurements.append(Measurement(TASK, measure, rows, n_rows * length * (1 + repeats), length))
    return Plan(measurements)


def _measure(
    model: torch.nn.Module, data, length: int, batch_size: int, repeats: int, new_tokens: int, advance: Callable[[int], None]
) -> list[Row]:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(model.vocab_size, (batch_size, length), generator=generator).to(device)
    last = (torch.arange(1, batch_size + 1, device=device) * length) - 1
    model(input_ids[:1, :1], logits_at=last.new_zeros(1))  # warm-up: what libraries allocate once is not counted
    before, seconds = _watch_memory(device), []
    for _ in range(1 + repeats):
        seconds.append(_seconds(lambda: model(input_ids, logits_at=last), device))
        advance(input_ids.numel())
    prefill = statistics.median(seconds[1:])
    common = {"task": TASK, "length": length, "count": repeats, "note": f"batch of {batch_size}{_spread(seconds[1:])}"}
    rows = [
        Row(metric="tokens_per_second", value=batch_size * length / prefill, **common),
        Row(metric="prefill_seconds", value=prefill, **common),
    ]
    if device.type == "cuda":
        rows.append(Row(metric="peak_memory_gb", value=_peak_gb(model, before), **common))
    if data.objective == "lm" and model.supports.cache:
        rows.append(_decoding(model, input_ids, new_tokens, repeats, common))
    return rows


def _decoding(model: torch.nn.Module, input_ids: torch.Tensor, new_tokens: int, repeats: int, common: dict) -> Row:
    """The speed of decoding token by token after a context that is in the KV cache."""
    batch_size, length = input_ids.shape
    try:
        decoding = model.decoding(input_ids, max(new_tokens + 1, GRAPHED), temperature=0.0, graph=None)
    except ValueError as error:  # a model with learned positions has no more of them
        return Row(metric="decode_tokens_per_second", **{**common, "count": 0, "note": str(error)})
    for _ in range(GRAPHED):  # reads the context, and captures the CUDA graph if there is one
        decoding.step()

    def decode() -> None:
        decoding.rewind()  # every repetition decodes the same tokens
        for _ in range(new_tokens):
            decoding.step()

    seconds = [_seconds(decode, input_ids.device) for _ in range(1 + repeats)][1:]
    if decoding.graphed:
        common = {**common, "note": f"{common['note']}; CUDA graph"}
    return Row(metric="decode_tokens_per_second", value=batch_size * new_tokens / statistics.median(seconds), **common)


@torch.inference_mode(False)
def _training(model: torch.nn.Module, length: int, n_rows: int, repeats: int, advance: Callable[[int], None]) -> list[Row]:
    """Steps of training without an optimizer."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(model.vocab_size, (n_rows, length), generator=generator).to(next(model.parameters()).device)
    seconds, gb = training_steps(model, [{"input_ids": tokens, "labels": tokens}] * (1 + repeats), lambda _: advance(tokens.numel()))
    common = {"task": TASK, "length": length, "count": repeats, "note": f"steps of {n_rows} rows{_spread(seconds)}"}
    rows = [Row(metric="training_tokens_per_second", value=tokens.numel() / statistics.median(seconds), **common)]
    if gb is not None:
        rows.append(Row(metric="training_memory_gb", value=gb, **common))
    return rows


@torch.inference_mode(False)
@torch.enable_grad()
def training_steps(
    model: torch.nn.Module, batches: Sequence[Batch], advance: Callable[[Batch], None]
) -> tuple[list[float], float | None]:
    """Times a step (forward, loss, backward) on each batch. The first batch is a warm-up and is not counted.

    Returns the seconds of each other batch, and on a GPU the peak memory in GB, else None. The model is set to training mode meanwhile.
    There is no optimizer, and nothing is compiled. advance: called after each batch.
    """
    device = next(model.parameters()).device
    before = _watch_memory(device)
    backward = getattr(model, "backward", torch.Tensor.backward)  # Fabric's own, where the model was placed by it

    def step(batch: Batch) -> None:
        backward(summed_loss(model, batch)[0])
        model.zero_grad()

    seconds, was_training = [], model.training
    model.train()
    try:
        for batch in batches:
            seconds.append(_seconds(partial(step, batch), device))
            advance(batch)
    finally:
        model.zero_grad()
        model.train(was_training)
    return seconds[1:], _peak_gb(model, before) if device.type == "cuda" else None


def _watch_memory(device: torch.device) -> int:
    """Resets the GPU's peak memory statistics and returns the bytes in use now; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_gb(model: torch.nn.Module, before: int) -> float:
    """Peak memory in GB since `_watch_memory` returned `before`, plus the weights, which `before` includes."""
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.nbytes for tensor in tensors)
    return (torch.cuda.max_memory_allocated(tensors[0].device) - before + weights) / 1e9


def _spread(seconds: Sequence[float]) -> str:
    factor = max(seconds) / min(seconds)
    return f"; repetitions differ by a factor of {factor:.2g}" if factor > FACTOR else ""


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
