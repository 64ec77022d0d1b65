"""Accuracy of a classifier on held-out sequences (the test split, if the data have one), and the cost of its training steps."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from attnzoo.batch import Batch
from attnzoo.evaluation.cost import training_steps
from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.results import Row, mean_row
from attnzoo.training.module import predict

TASK = "classification"


def accuracy(
    model: torch.nn.Module, data, *, lengths: Sequence[int] = (), context: int | None = None, split: str | None = None,
    steps: int | None = None,
) -> Plan:
    """Accuracy and loss (nats) over one split, and the cost of a step of training on the run's own batches.

    data: a ClassificationDataModule. split: "test" or "validation"; None takes test if there is one. lengths, context: not used; every
    task is given them. The standard error treats sequences as the independent samples.
    steps: the number of training steps to time; None times none. A step is forward, loss and backward, without an optimizer and not
    compiled. This gives the rows training_steps_per_second, of the median step, and on a GPU training_memory_gb, the peak in use.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if not hasattr(model, "n_classes"):
        return refusal(TASK, "needs a model that was trained with task=classification")
    if split not in (None, "test", "validation"):
        return refusal(TASK, f"split={split!r} must be test or validation")
    split = split or ("test" if "test" in data.stores else "validation")
    settings = {"split": split, "seq_len": data.seq_len, "packed": data.packed}
    tokens = data.record()["splits"][split]["tokens"]
    measurements = [Measurement(TASK, partial(_measure, model, data, split), settings, tokens, data.seq_len)]
    if steps:
        trained = {**settings, "split": "train", "batch_size": data.batch_size, "steps": steps}
        read = data.batch_size * data.towers * data.seq_len * (1 + steps)  # an upper bound
        measurements.append(Measurement(TASK, partial(_steps, model, data, steps), trained, read, data.seq_len))
    return Plan(measurements)


@torch.inference_mode()
def _measure(model: torch.nn.Module, data, split: str, advance: Callable[[int], None]) -> list[Row]:
    device = next(model.parameters()).device
    hits, losses = [], []
    for batch in data.test_dataloader() if split == "test" else data.val_dataloader():
        logits, targets = predict(model, _moved(batch, device))
        hits.append(torch.where(logits.isnan().any(-1), torch.nan, (logits.argmax(-1) == targets).float()))
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        advance(batch["n_tokens"])
    columns = {"task": TASK, "length": data.seq_len, "note": f"{split} split"}
    values = {"accuracy": torch.cat(hits).double(), "loss": torch.cat(losses).double()}
    return [mean_row(of_metric.tolist(), metric=metric, **columns) for metric, of_metric in values.items()]


@torch.inference_mode(False)
def _steps(model: torch.nn.Module, data, n_steps: int, advance: Callable[[int], None]) -> list[Row]:
    device = next(model.parameters()).device
    batches = [_moved(batch, device) for batch in itertools.islice(itertools.cycle(data.train_dataloader()), 1 + n_steps)]
    seconds, gb = training_steps(model, batches, lambda batch: advance(batch["n_tokens"]))
    columns = {"task": TASK, "length": data.seq_len, "count": n_steps, "note": f"steps of {data.batch_size}"}
    rows = [Row(metric="training_steps_per_second", value=1 / statistics.median(seconds), **columns)]
    return rows if gb is None else [*rows, Row(metric="training_memory_gb", value=gb, **columns)]


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
