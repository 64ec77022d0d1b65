"""The validation loss of a checkpoint, with training's loader, batches and weighting, so that it is the loss that training reported."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from attnzoo.evaluation.measurement import Measurement, Plan
from attnzoo.evaluation.perplexity import SPLIT, mean_and_stderr
from attnzoo.evaluation.results import Row, language_model_rows
from attnzoo.training.module import summed_loss

# attributes of a data module that decide its batches
SETTINGS = ("objective", "seq_len", "eval_batch_size", "cross_documents", "packed", "eval_mask_rate", "min_seq_len", "predict_prompts")


def validation_loss(model: torch.nn.Module, data, *, lengths: Sequence[int] = (), context: int | None = None) -> Plan:
    """Loss, perplexity and bits per byte over the whole validation split, in training's rows and, for BERT, with its masks.

    data: a data module; its `val_dataloader()`, `seq_len` and `bytes_per_token(split)` are used. lengths, context: not used; every task is
    given them. The standard error treats batches as the independent samples.
    """
    loader = data.val_dataloader()
    settings = {name: getattr(data, name, None) for name in SETTINGS}
    tokens = len(loader) * data.eval_batch_size * data.seq_len
    return Plan([Measurement("validation", partial(_measure, model, data, loader), settings, tokens, data.seq_len)])


def _measure(model: torch.nn.Module, data, loader: Iterable, advance: Callable[[int], None]) -> list[Row]:
    device = next(model.parameters()).device
    parts = []
    for batch in loader:
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        parts.append(torch.stack(summed_loss(model, batch)).double())
        advance(batch["input_ids"].numel())
    sums, counts = torch.stack(parts).cpu().unbind(1)
    mean = mean_and_stderr(sums, counts)
    return language_model_rows(*mean, data.bytes_per_token(SPLIT), task="validation", length=data.seq_len, count=int(counts.sum()))
