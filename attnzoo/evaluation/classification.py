"""Accuracy of a classifier on held-out sequences: the test split, where the data have one."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from attnzoo.evaluation.measurement import Measurement, Plan, refusal
from attnzoo.evaluation.results import Row, mean_row
from attnzoo.training.module import predict

TASK = "classification"


def accuracy(model: torch.nn.Module, data, *, lengths: Sequence[int] = (), context: int | None = None, split: str | None = None) -> Plan:
    """Accuracy and loss (nats) over one split.

    data: a ClassificationDataModule. split: "test" or "validation"; None takes test where there is one. lengths, context: not used, every
    task is given them. The standard error takes sequences as the independent draws.
    """
    if not hasattr(model, "n_classes"):
        return refusal(TASK, "needs a model that was trained with task=classification")
    if split not in (None, "test", "validation"):
        return refusal(TASK, f"split={split!r} must be test or validation")
    split = split or ("test" if "test" in data.stores else "validation")
    settings = {"split": split, "seq_len": data.seq_len, "packed": data.packed}
    tokens = data.record()["splits"][split]["tokens"]
    return Plan([Measurement(TASK, partial(_measure, model, data, split), settings, tokens, data.seq_len)])


@torch.inference_mode()
def _measure(model: torch.nn.Module, data, split: str, advance: Callable[[int], None]) -> list[Row]:
    device = next(model.parameters()).device
    hits, losses = [], []
    for batch in data.test_dataloader() if split == "test" else data.val_dataloader():
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        logits, targets = predict(model, batch)
        hits.append(torch.where(logits.isnan().any(-1), torch.nan, (logits.argmax(-1) == targets).float()))
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        advance(batch["n_tokens"])
    columns = {"task": TASK, "length": data.seq_len, "note": f"{split} split"}
    values = {"accuracy": torch.cat(hits).double(), "loss": torch.cat(losses).double()}
    return [mean_row(of_metric.tolist(), metric=metric, **columns) for metric, of_metric in values.items()]
