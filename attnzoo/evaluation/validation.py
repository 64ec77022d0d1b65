"""The validation loss of a checkpoint: training's loader, batches and weighting, so that it repeats what training reported."""

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from attnzoo.evaluation.perplexity import SPLIT, mean_and_stderr
from attnzoo.evaluation.results import Row, language_model_rows
from attnzoo.training.module import summed_loss


@torch.inference_mode()
def validation_loss(model: torch.nn.Module, data, *, lengths: Sequence[int] = (), context: int | None = None) -> list[Row]:
    """Loss, perplexity and bits per byte over the whole validation split, in training's rows and, for BERT, with its masks.

    data: a data module; its `val_dataloader()`, `seq_len` and `bytes_per_token(split)` are used. lengths, context: not used, every task is
    given them. The standard error takes batches as the independent draws.
    """
    device = next(model.parameters()).device
    parts = []
    for batch in tqdm(data.val_dataloader(), desc="validation", leave=False, disable=None):
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        parts.append(torch.stack(summed_loss(model, batch)).double())
    sums, counts = torch.stack(parts).cpu().unbind(1)
    mean = mean_and_stderr(sums, counts)
    return language_model_rows(*mean, data.bytes_per_token(SPLIT), task="validation", length=data.seq_len, count=int(counts.sum()))
